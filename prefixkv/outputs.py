"""What comes back for a request: pieces while it runs, and its accounts."""

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from prefixkv.cache_control import CacheReport

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(slots=True)
class Usage:
    """Token counts of one request.

    `num_cached_tokens` is set once, at the first admission: prompt tokens found in the cache,
    from blocks that other requests computed. `num_computed_tokens` counts what the model really
    ran for this request, recomputation after preemption included. All branches count together;
    `peak_num_blocks` are distinct blocks held at once, those that several branches share once.
    `num_cache_write_tokens` is set at the first admission, too: prompt tokens that were not found
    and that others can find once they are computed, so `num_prompt_tokens` (or the `write_limit`,
    if that is less) - `num_cached_tokens`; 0 if the cache is disabled. It does not foresee that the
    request fails, that another computes the same in the meantime, or that digests collide.
    """

    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_completion_tokens: int = 0
    num_computed_tokens: int = 0
    num_preemptions: int = 0
    num_forks: int = 0
    num_copies: int = 0
    num_slots_copied: int = 0
    peak_num_blocks: int = 0
    num_cache_write_tokens: int = 0


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


PromptLogprob = TokenLogprobs | None
"""Of a token of the prompt; the first one has none."""


@dataclass(frozen=True, slots=True)
class OutputDelta:
    """What one step added to a request.

    `text` is final: text that may still turn into a stop string, or half a character, is held
    back until it is decided. `token_ids` are all ids sampled, an ending token included.
    `index` is the branch that it belongs to, below the request's `n`; the last delta of each
    branch has a `finish_reason`. With "error", `error` says why, and the whole request is over.
    `stop_reason` is the stop string or stop token id that ended it, None for an end token.
    `logprobs` is parallel to `token_ids`, None unless the request asked for it. `score` is what a
    beam or a sample of `best_of` was ranked by, on its last delta. `prompt_logprobs` comes with the
    first delta of a request that asked for them, one value for each token of the prompt.
    `cache_report` comes with the last delta of a request.
    """

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    usage: Usage
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None
    index: int = 0
    score: float | None = None
    prompt_logprobs: tuple[PromptLogprob, ...] | None = None
    cache_report: CacheReport | None = None


@dataclass(slots=True)
class BranchOutput:
    """One finished answer: what the deltas of one branch add up to."""

    index: int = 0
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason = "abort"
    stop_reason: int | str | None = None
    logprobs: list[TokenLogprobs] | None = field(default=None, repr=False)
    score: float | None = None

    def add(self, delta: OutputDelta) -> None:
        """Append a delta of the same branch."""
        self.text += delta.text
        self.token_ids.extend(delta.token_ids)
        if delta.logprobs is not None:
            self.logprobs = self.logprobs or []
            self.logprobs.extend(delta.logprobs)
        if delta.finish_reason is not None:
            self.finish_reason = delta.finish_reason
            self.stop_reason = delta.stop_reason
            self.score = delta.score


@dataclass(slots=True)
class Completion:
    """A finished request: one output for each of its `n` branches; of ranked ones the best first.

    `text`, `token_ids` and so on are those of the first.
    """

    request_id: str
    usage: Usage
    outputs: list[BranchOutput]
    prompt_token_ids: list[int] = field(default_factory=list, repr=False)
    prompt_logprobs: list[PromptLogprob] | None = field(default=None, repr=False)
    cache_report: CacheReport | None = None

    def add(self, delta: OutputDelta) -> None:
        """Append a delta of the request."""
        self.outputs[delta.index].add(delta)
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs = list(delta.prompt_logprobs)
        if delta.cache_report is not None:
            self.cache_report = delta.cache_report

    @property
    def text(self) -> str:
        """Text of the first output."""
        return self.outputs[0].text

    @property
    def token_ids(self) -> list[int]:
        """Token ids of the first output."""
        return self.outputs[0].token_ids

    @property
    def finish_reason(self) -> FinishReason:
        """Why the first output ended."""
        return self.outputs[0].finish_reason

    @property
    def stop_reason(self) -> int | str | None:
        """The stop string or token that ended the first output."""
        return self.outputs[0].stop_reason

    @property
    def logprobs(self) -> list[TokenLogprobs] | None:
        """Log-probabilities of the first output's tokens."""
        return self.outputs[0].logprobs
