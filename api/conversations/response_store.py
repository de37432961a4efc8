"""Stored responses: what later ones go on from, as exact tokens."""

import sys
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from prefixkv.api.access.tenant import Tenant
from prefixkv.api.errors import ResponseNotFound
from prefixkv.api.history.shared_lru import Part, SharedLRU
from prefixkv.api.history.transcript import Transcript
from prefixkv.api.replies.bodies import dump_json

MAX_STORED_RESPONSES = 10_000
STORED_RESPONSES_BYTES = 256 * 2**20


@dataclass(frozen=True, slots=True, eq=False)
class Turns:
    """Messages behind those of earlier turns, without instructions, which are not carried over."""

    earlier: "Turns | None"
    messages: Sequence[Mapping[str, Any]]
    num_bytes: int

    def parts(self) -> Iterator["Turns"]:
        """Yield the turns, the last one first."""
        turn: Turns | None = self
        while turn is not None:
            yield turn
            turn = turn.earlier

    def all_messages(self) -> list[Mapping[str, Any]]:
        """Return the messages of all turns."""
        return [message for turn in reversed(list(self.parts())) for message in turn.messages]

    def with_answer(self, answer: Mapping[str, Any]) -> "Turns":
        """Return the same with `answer` as the last message of the last turn."""
        num_bytes = self.num_bytes + sys.getsizeof(answer["content"]) + 100
        return Turns(self.earlier, [*self.messages, answer], num_bytes)


def turns_of(messages: Sequence[Mapping[str, Any]], earlier: Turns | None = None) -> Turns:
    """Return a turn of `messages` behind `earlier` ones."""
    return Turns(earlier, messages, sys.getsizeof(dump_json(messages)) + 200)


@dataclass(frozen=True, slots=True, eq=False)
class StoredResponse:
    """A response that ended.

    Attributes:
        body: as JSON.
        turns: the conversation up to and including its answer, the last message.
        transcript: the exact tokens of the conversation, and the text they stand for.
        rest: the end of the answer's text, where a stop string cut it inside a token.
        instructions: at its beginning.
        template_kwargs: with which it was rendered.
        salt: under which it was computed.
        num_bytes: of what is here and not in other parts.
    """

    body: str
    turns: Turns
    transcript: Transcript
    rest: str
    instructions: str | None
    template_kwargs: Mapping[str, Any]
    salt: str | None
    num_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        size = sys.getsizeof(self.body) + sys.getsizeof(dump_json(self.template_kwargs)) + 500
        object.__setattr__(self, "num_bytes", size)

    def parts(self) -> Iterator[Part]:
        """Yield what it is made of; conversations that begin alike share most of it."""
        yield self
        yield from self.turns.parts()
        yield from self.transcript.parts()


class ResponseStore:
    """Keeps the responses that were used last, within bounds; each tenant sees its own only.

    Args:
        max_responses: at most so many.
        max_bytes: of bodies, messages and tokens; what conversations share counts once.
    """

    def __init__(
        self,
        max_responses: int = MAX_STORED_RESPONSES,
        max_bytes: int = STORED_RESPONSES_BYTES,
    ) -> None:
        self._responses: SharedLRU[tuple[Tenant, str], StoredResponse] = SharedLRU(
            max_bytes, max_responses
        )
        self._max_claims = max_responses
        self._claimed: OrderedDict[tuple[Tenant, str], None] = OrderedDict()

    @property
    def num_bytes(self) -> int:
        """What the stored responses take."""
        return self._responses.num_bytes

    def __len__(self) -> int:
        return len(self._responses)

    def put(self, tenant: Tenant, response_id: str, response: StoredResponse) -> None:
        """Keep a response, and let go of those that were not used for longest."""
        self._responses.put((tenant, response_id), response, tenant.name)

    def claim(self, tenant: Tenant, response_id: str) -> bool:
        """Take an id for a response that begins.

        Returns whether it is free: no stored response has it, and none of those that began last,
        which may run still.
        """
        key = tenant, response_id
        if key in self._claimed or self.has(tenant, response_id):
            return False
        self._claimed[key] = None
        if len(self._claimed) > self._max_claims:
            self._claimed.popitem(last=False)
        return True

    def has(self, tenant: Tenant, response_id: str) -> bool:
        """Return whether the tenant has a response of that id."""
        return self._responses.get((tenant, response_id)) is not None

    def get(self, tenant: Tenant, response_id: str) -> StoredResponse:
        """Return a response. Raises ResponseNotFound if the tenant has none of that id."""
        response = self._responses.get((tenant, response_id))
        if response is None:
            raise ResponseNotFound(f"Response with id {response_id!r:.200} not found.")
        return response

    def previous(self, tenant: Tenant, response_id: str, salt: str | None) -> StoredResponse:
        """Return the response to go on from.

        Raises:
            ResponseNotFound: there is none, or it was computed under another salt.
        """
        response = self._responses.get((tenant, response_id))
        if response is None or response.salt != salt:
            error = ResponseNotFound(
                f"Previous response with id {response_id!r:.200} not found.",
                "previous_response_id",
            )
            error.code = "previous_response_not_found"
            raise error
        return response

    def delete(self, tenant: Tenant, response_id: str) -> None:
        """Let go of a response; those that went on from it stay. Raises ResponseNotFound."""
        if self._responses.pop((tenant, response_id)) is None:
            raise ResponseNotFound(f"Response with id {response_id!r:.200} not found.")
