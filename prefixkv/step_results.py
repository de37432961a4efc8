"""What a step has for each branch: from rows of logits to tokens and log-probabilities."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from prefixkv.logprobs import token_logprobs
from prefixkv.outputs import TokenLogprobs
from prefixkv.request import Branch
from prefixkv.sampling import Sampled, Sampler, SamplingRow
from prefixkv.scheduler import ScheduledBranch


@dataclass(slots=True)
class StepResult:
    """Of one branch.

    Attributes:
        is_finite: whether its K, V and logits are; there is nothing else if not.
        sampled: the next token, where it has reached its last one; where others are forked from it,
            the first tokens of all of them, its own last.
        row: in place of `sampled`, the logits [vocab_size] for a beam search.
        prompt_logprobs: of the tokens of its prompt that follow those of the step; empty unless
            they are wanted.
    """

    is_finite: bool
    sampled: list[Sampled] = field(default_factory=list)
    row: torch.Tensor | None = None
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)


def read_logits(
    batch: Sequence[ScheduledBranch],
    healthy: Iterable[bool],
    logits: torch.Tensor,
    sampler: Sampler,
    missing: Callable[[Branch], list[int]],
) -> list[StepResult]:
    """Score prompts, and draw from the rows that are drawn from, all at once.

    Args:
        healthy: whether K and V of each branch are finite.
        logits: [sum of `num_logits`, vocab_size], one branch after the other.
        missing: indices of the branches that are to be forked from one.
    """
    finite = torch.isfinite(logits).all(dim=-1).tolist()
    results: list[StepResult] = []
    rows: list[SamplingRow] = []
    sources: list[tuple[int, StepResult]] = []  # of each of `rows`: row of `logits`, who gets it
    for (item, first, end), is_healthy in zip(_with_rows(batch), healthy, strict=True):
        branch = item.branch
        result = StepResult(is_healthy and all(finite[first:end]))
        results.append(result)
        if not result.is_finite:
            continue
        if branch.request.is_scoring:
            result.prompt_logprobs = _score(item, logits[first:end])
        if not item.samples:
            continue
        if branch.request.in_lockstep:
            result.row = logits[end - 1]
            continue
        wanted = _sampling_rows(branch, missing(branch))
        rows += wanted
        sources += [(end - 1, result)] * len(wanted)
    sampled = sampler.sample(logits[[row for row, _ in sources]], rows)
    for (_, result), token in zip(sources, sampled, strict=True):
        result.sampled.append(token)
    return results


def _with_rows(batch: Sequence[ScheduledBranch]) -> Iterator[tuple[ScheduledBranch, int, int]]:
    first = 0
    for item in batch:
        yield item, first, first + item.num_logits
        first += item.num_logits


def _score(item: ScheduledBranch, logits: torch.Tensor) -> list[TokenLogprobs]:
    """Return the log-probabilities of the prompt's tokens that follow these rows."""
    request = item.branch.request
    known = len(request.prompt_logprobs)
    targets = torch.tensor(request.prompt[known : known + len(logits)], device=logits.device)
    if not len(targets):
        return []
    num_top = [request.num_top_prompt_logprobs] * len(targets)
    return token_logprobs(logits[: len(targets)], targets.to(torch.int64), num_top)


def _sampling_rows(branch: Branch, missing: list[int]) -> list[SamplingRow]:
    """One draw; or, where the prompt ends, one for each branch that goes on from there."""
    request = branch.request
    return [
        SamplingRow(
            request.params,
            request.seed,
            index,
            branch.num_tokens,
            rules=request.rules,
            tokens=branch.tokens,
            num_prompt_tokens=request.num_prompt_tokens,
            wants_logprob=request.params.is_ranked,
        )
        for index in (*missing, branch.index)
    ]
