"""A request: what was asked, the tokens so far, and the sequence that holds its KV."""

from array import array

from prefixkv.hashing import Tokens, pack_tokens
from prefixkv.identity import ModelIdentity
from prefixkv.logits_rules import LogitsRules
from prefixkv.outputs import Usage
from prefixkv.sampling_params import SamplingParams
from prefixkv.sequence import Sequence


class Request:
    """One request from submission to its last token.

    It waits with `sequence` None and runs with one; preemption takes the sequence away again, and
    all its tokens, those it generated included, are then matched anew.

    Attributes:
        tokens: ids of the prompt and of the output so far (typecode "i").
        number: order of arrival.
        admission: order of the first admission; None until then.
        seed: of its draws; fixed at submission.
        max_tokens: output tokens at most; resolved at submission.
        rules: what its parameters ask of logits; the same for all that is generated for it.
        not_before: version of the cache at which it last found no room; None to try at any.
    """

    def __init__(
        self,
        request_id: str,
        prompt: Tokens,
        params: SamplingParams,
        identity: ModelIdentity,
        *,
        number: int,
        max_tokens: int,
        seed: int = 0,
        priority: int = 0,
        rules: LogitsRules | None = None,
    ) -> None:
        self.request_id = request_id
        self.tokens = array("i", pack_tokens(prompt))
        self.num_prompt_tokens = len(self.tokens)
        self.params = params
        self.identity = identity
        self.number = number
        self.max_tokens = max_tokens
        self.seed = seed
        self.priority = priority
        self.rules = rules
        self.admission: int | None = None
        self.sequence: Sequence | None = None
        self.not_before: int | None = None
        self.usage = Usage(num_prompt_tokens=self.num_prompt_tokens)

    def __repr__(self) -> str:
        return f"<Request {self.request_id} of {len(self.tokens)} tokens>"

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far."""
        return len(self.tokens) - self.num_prompt_tokens

    @property
    def num_pending_tokens(self) -> int:
        """Tokens whose KV is neither computed nor scheduled; one while decoding."""
        return len(self.tokens) - (self.sequence.num_tokens if self.sequence else 0)

    @property
    def queue_rank(self) -> tuple[int, int]:
        """Order of waiting: by priority (lower first), then by arrival."""
        return (self.priority, self.number)

    def append(self, token_id: int) -> None:
        """Add a generated token."""
        self.tokens.append(token_id)
        self.usage.num_completion_tokens += 1
