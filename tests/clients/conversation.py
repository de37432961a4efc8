"""The conversation that every client has with the server, and what has to come of it.

A client's module has `converse(base_url, model)`; `python -m tests.clients.NAME URL MODEL` has it.
"""

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass

QUESTION = "What is the capital of France?"
FOLLOW_UP = "And of Italy?"
MAX_TOKENS = 32


@dataclass(frozen=True, slots=True)
class Conversation:
    """What a client was told.

    Attributes:
        plain: the answer to the question.
        streamed: the same question's answer, in pieces that were joined.
        num_tokens: of the first turn's prompt and answer, as the client counts them.
        num_cached: of the second turn's prompt, as the client tells it.
    """

    plain: str
    streamed: str
    num_tokens: int
    num_cached: int

    def check(self) -> None:
        """Raise AssertionError unless greedy answers agree and the second turn reuses the first.

        The last token of an answer was never an input, so its K and V are not there.
        """
        assert "Paris" in self.plain, self
        assert self.streamed == self.plain, self
        assert self.num_cached >= self.num_tokens - 1, self


def instructions(client: str) -> str:
    """The system message; another one for each client, so that none finds another's turns."""
    return f"You answer questions of {client} in one short sentence."


def main(converse: Callable[[str, str], Conversation]) -> None:
    """Have the conversation that the command line tells to, check it, and print it as JSON."""
    conversation = converse(*sys.argv[1:])
    conversation.check()
    print(json.dumps(asdict(conversation)))
