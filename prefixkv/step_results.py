"""What a step has for each branch: from rows of logits to tokens and log-probabilities."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from prefixkv.kernels.upload import upload_ids
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
    find_healthy: Callable[[], list[bool]],
    logits: torch.Tensor,
    sampler: Sampler,
    missing: Callable[[Branch], list[int]],
) -> list[StepResult]:
    """Draw from the rows that are drawn from, all at once, and score prompts.

    All draws are on their way to the device before it is waited for; hence they are made from rows
    that are not finite too, and then thrown away.

    Args:
        find_healthy: returns whether K and V of each branch are finite.
        logits: [sum of `num_logits`, vocab_size], one branch after the other.
        missing: indices of the branches that are to be forked from one.
    """
    rows: list[SamplingRow] = []
    sources: list[tuple[int, int]] = []  # of each of `rows`: row of `logits`, index in `batch`
    for i, (item, _, end) in enumerate(_with_rows(batch)):
        if item.samples and not item.branch.request.in_lockstep:
            wanted = _sampling_rows(item.branch, missing(item.branch))
            rows += wanted
            sources += [(end - 1, i)] * len(wanted)
    draws = sampler.draw(_pick(logits, [row for row, _ in sources]), rows)
    is_finite = torch.isfinite(logits).all(dim=-1)

    finite = is_finite.tolist()  # here the device is waited for
    results = [
        StepResult(healthy and all(finite[first:end]))
        for (_, first, end), healthy in zip(_with_rows(batch), find_healthy(), strict=True)
    ]
    for (_, i), token in zip(sources, draws.read(), strict=True):
        if results[i].is_finite:
            results[i].sampled.append(token)
    for (item, first, end), result in zip(_with_rows(batch), results, strict=True):
        if result.is_finite and item.branch.request.is_scoring:
            result.prompt_logprobs = _score(item, logits[first:end])
        if result.is_finite and item.samples and item.branch.request.in_lockstep:
            result.row = logits[end - 1]
    return results


def _pick(logits: torch.Tensor, rows: list[int]) -> torch.Tensor:
    """Return some rows; without copying, if they are all rows in their order."""
    if rows == list(range(len(logits))):
        return logits
    return logits[upload_ids(rows, logits.device)]


def _with_rows(batch: Sequence[ScheduledBranch]) -> Iterator[tuple[ScheduledBranch, int, int]]:
    first = 0
    for item in batch:
        yield item, first, first + item.num_logits
        first += item.num_logits


def _score(item: ScheduledBranch, logits: torch.Tensor) -> list[TokenLogprobs]:
    """Return the log-probabilities of the prompt's tokens that follow these rows."""
    request = item.branch.request
    known = len(request.prompt_logprobs)
    targets = request.prompt[known : known + len(logits)]
    if not len(targets):
        return []
    num_top = [request.num_top_prompt_logprobs] * len(targets)
    on_device = upload_ids(targets, logits.device)
    return token_logprobs(logits[: len(targets)], on_device, num_top)


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
