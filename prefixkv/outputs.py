"""What comes back for a request: pieces while it runs, and its accounts."""

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(slots=True)
class Usage:
    """Token counts of one request.

    `num_cached_tokens` is set once, at the first admission: prompt tokens found in the cache,
    from blocks that other requests computed. `num_computed_tokens` counts what the model really
    ran for this request, recomputation after preemption included.
    """

    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_completion_tokens: int = 0
    num_computed_tokens: int = 0
    num_preemptions: int = 0


class TokenLogprobs(NamedTuple):
    """How likely the model itself found a token, before penalties, temperature and the like.

    Attributes:
        logprob: natural logarithm of the probability.
        rank: 1 for the likeliest token; tokens that are as likely do not count.
        top: ids and log-probabilities of the likeliest tokens, the likeliest first.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class OutputDelta:
    """What one step added to a request.

    `text` is final: text that may still turn into a stop string, or half a character, is held
    back until it is decided. `token_ids` are all ids sampled, an ending token included.
    The last delta of a request has a `finish_reason`; with "error", `error` says why.
    `stop_reason` is the stop string or stop token id that ended it, None for an end token.
    `logprobs` is parallel to `token_ids`, None unless the request asked for it.
    """

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    usage: Usage
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None


@dataclass(slots=True)
class Completion:
    """A finished request: what all its deltas add up to."""

    request_id: str
    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    usage: Usage
    stop_reason: int | str | None = None
    prompt_token_ids: list[int] = field(default_factory=list, repr=False)
    logprobs: list[TokenLogprobs] | None = field(default=None, repr=False)
