"""Beam search of one prompt, apart from any engine: who goes on from whom, by log-probabilities.

It gives what transformers 5.24 gives for `generate(num_beams=width, do_sample=False,
num_return_sequences=width)`, down to the order of equals. So the choices among few scores are
made by `torch.topk` over arrays laid out as transformers lays out its own, in the same dtype.

    candidates      the likeliest (beam, next token) pairs, several times `width` of them, so that
                    `width` can go on even if each beam's likeliest tokens are all end tokens
    live beams      the likeliest `width` candidates that have not ended
    finished        the best `width` that ended, by their penalised score; of one step's candidates
                    only the first `width` may enter: the others are a reserve to go on from

A beam is a chain of nodes that leads back from its last token, and shares what it has in common
with others; a step adds at most 2 * width nodes, whatever the length. Lists of tokens are made in
`hypotheses()` only. A chain nobody leads to any more is freed by its references.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from prefixkv.errors import InvalidRequest

# what transformers adds where it means minus infinity. Scores below it cannot be told from none;
# with another number, equals next to masked scores would come in another order
_MASKED = -1e9


class Continuation(NamedTuple):
    """A beam that lives on: row `parent` of the step's log-probabilities, then `token_id`."""

    parent: int
    token_id: int


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A finished beam.

    `token_ids` are the generated ones, an end token included. `cumulative_logprob` is the sum of
    their log-probabilities, and `score` that sum / len(token_ids) ** length_penalty, which
    transformers calls `sequences_scores`.
    """

    token_ids: list[int]
    score: float
    cumulative_logprob: float
    finish_reason: Literal["stop", "length"]


class BeamSearch:
    """One search. The caller computes log-probabilities and owns the KV of the live beams.

        search = BeamSearch(width=4, max_tokens=64, end_token_ids=[2])
        while not search.is_done:
            rows = search.advance(logprobs)  # [search.num_live, vocab_size]
            ...  # fork the KV of row r.parent and append r.token_id, for each r of rows

    Beams are told apart by their prefixes only, so equal logits in equal dtype give equal results.
    The stopping rules count generated tokens only, the end token among them, never the prompt.

    Args:
        width: how many beams are kept, and how many hypotheses come back.
        max_tokens: the most tokens of a hypothesis.
        length_penalty: the exponent of the length in the score. As sums are negative, more than 0
            favours long hypotheses, less than 0 short ones; 0 compares plain sums.
        early_stopping: when the search ends, once `width` beams have finished. True: at once.
            False: when the best live beam, at its present length, scores no better than the worst
            finished one; a guess, as it may still improve where length is favoured. "never": when
            it could not score better at any length, as far as sums only fall.
        end_token_ids: tokens that end a beam.

    Raises:
        InvalidRequest: naming the argument, its value and the allowed range.

    Source: `_beam_search` in transformers/generation/utils.py, version 5.24.
    """

    def __init__(
        self,
        *,
        width: int,
        max_tokens: int,
        length_penalty: float = 1.0,
        early_stopping: bool | Literal["never"] = False,
        end_token_ids: Collection[int] = (),
    ) -> None:
        _refuse_unless(width >= 1, "width", width, "at least 1")
        _refuse_unless(max_tokens >= 1, "max_tokens", max_tokens, "at least 1")
        _refuse_unless(
            # of the order of a float32, in which the powers are divisors
            math.isfinite(length_penalty) and abs(length_penalty) * math.log10(max_tokens) < 30,
            "length_penalty", length_penalty, f"finite, and {max_tokens} to its power below 1e30",
        )  # fmt: skip
        _refuse_unless(
            isinstance(early_stopping, bool) or early_stopping == "never",
            "early_stopping", early_stopping, 'True, False or "never"',
        )  # fmt: skip
        self._width = width
        self._max_tokens = max_tokens
        self._length_penalty = length_penalty
        self._early_stopping = early_stopping
        self._end_token_ids = frozenset(end_token_ids)
        self._num_candidates = max(2, 1 + len(self._end_token_ids)) * width
        self._num_tokens = 0
        # The prompt has one row. It counts as `width` beams of which all but the first are masked:
        # topk's choice among equals depends on how many scores it looks at.
        self._live: list[_Node | None] = [None]
        self._live_scores = torch.tensor([0.0] + [_MASKED] * (width - 1), dtype=torch.float64)
        self._finished: list[_Finished | None] = [None] * width
        self._finished_scores = torch.full((width,), _MASKED, dtype=torch.float64)

    @property
    def num_live(self) -> int:
        """The rows that the next `advance` expects: 1 for the prompt, then at most `width`.

        Fewer than `width` where fewer continuations have a probability above 0; 0 at the end.
        """
        return len(self._live)

    @property
    def is_done(self) -> bool:
        """Whether the search is over."""
        return not self._live

    def advance(self, logprobs: torch.Tensor) -> list[Continuation]:
        """Take one step of all live beams; return those that live on, best first, [] at the end.

        Costs one topk over [num_live * vocab_size] on the device of `logprobs`, one copy to the
        host, and O(width) there, independently of the length.

        Args:
            logprobs: [num_live, vocab_size], any float dtype and device; read only. Row i belongs
                to the i-th beam that the last call returned. They are final: what changes them
                (penalties, bans by -inf, min_tokens) is applied by the caller, to log-softmaxed
                logits if it is to be as in transformers, which does not normalise them again.
                Sums are kept in this dtype, float32 at least; transformers always takes float32.
                Requires: no NaN, no +inf, the same dtype at each step, `not is_done`.
        """
        assert self._live, "the search is over"
        assert logprobs.shape[0] == len(self._live), (logprobs.shape, len(self._live))
        candidates = self._candidates(logprobs)
        self._num_tokens += 1
        self._finish(candidates)
        chosen = self._live_on(candidates)
        if self._is_over():
            self._live.clear()
            return []
        return [Continuation(candidates.parents[i], candidates.token_ids[i]) for i in chosen]

    def hypotheses(self) -> list[Hypothesis]:
        """Return the best `width` finished beams, best first.

        At the end there are `width` unless fewer sequences have a probability above 0; before it,
        those so far. Costs the sum of their lengths.
        """
        return [
            Hypothesis(
                finished.node.token_ids(),
                score,
                finished.cumulative_logprob,
                "stop" if finished.node.token_id in self._end_token_ids else "length",
            )
            for finished, score in zip(self._finished, self._finished_scores.tolist(), strict=True)
            if finished is not None
        ]

    def _candidates(self, logprobs: torch.Tensor) -> "_Candidates":
        """Return the likeliest next tokens of all beams together; the scores are on the host."""
        dtype = torch.promote_types(logprobs.dtype, torch.float32)
        totals = self._live_scores.to(logprobs.device, dtype)[:, None] + logprobs.to(dtype)
        values, places = totals.flatten().topk(min(self._num_candidates, totals.numel()))
        # one copy for both; float64 holds each place, and each value of a narrower dtype, exactly
        packed = torch.stack((values.double(), places.double())).cpu()
        scores = packed[0].to(dtype)
        vocab_size = logprobs.shape[1]
        parents, token_ids = [], []
        for place in packed[1].tolist():
            parent, token_id = divmod(int(place), vocab_size)
            parents.append(parent)
            token_ids.append(token_id)
        # the last token that fits ends a beam as an end token does: the best of the unfinished
        # compete with the finished ones then, and nothing is left to go on from
        is_last = self._num_tokens + 1 == self._max_tokens
        ended = [is_last or token_id in self._end_token_ids for token_id in token_ids]
        # where a small vocabulary or bans leave fewer than `width`, transformers fills up with
        # impossible tokens at -inf, or with copies of one beam at -1e9; here fewer go on
        possible = [
            parent < len(self._live) and score > -math.inf
            for parent, score in zip(parents, scores.tolist(), strict=True)
        ]
        return _Candidates(scores, parents, token_ids, ended, possible)

    def _finish(self, candidates: "_Candidates") -> None:
        """Merge the candidates that ended with those that had finished, and keep the best."""
        scores, _, _, ended, possible = candidates
        enters = [
            i < self._width and ended[i] and possible[i] for i in range(len(candidates.parents))
        ]
        penalised = scores / self._num_tokens**self._length_penalty + _mask(enters, scores, False)
        merged = torch.cat((self._finished_scores.to(scores.dtype), penalised))
        best = merged.topk(self._width).indices
        finished: list[_Finished | None] = []
        for i in best.tolist():
            i -= self._width  # below 0: it had finished before
            if i < 0:
                finished.append(self._finished[i])
            else:
                finished.append(self._finished_candidate(candidates, i) if enters[i] else None)
        self._finished, self._finished_scores = finished, merged[best]

    def _finished_candidate(self, candidates: "_Candidates", i: int) -> "_Finished":
        return _Finished(self._node(candidates, i), float(candidates.scores[i]))

    def _live_on(self, candidates: "_Candidates") -> list[int]:
        """Make the likeliest candidates that have not ended the live beams; return which."""
        scores, _, _, ended, possible = candidates
        open_scores = scores + _mask(ended, scores, True)
        likeliest = open_scores.topk(min(self._width, len(ended))).indices.tolist()
        chosen = [i for i in likeliest if possible[i] and not ended[i]]
        self._live = [self._node(candidates, i) for i in chosen]
        self._live_scores = scores[chosen]
        return chosen

    def _node(self, candidates: "_Candidates", i: int) -> "_Node":
        return _Node(candidates.token_ids[i], self._live[candidates.parents[i]])

    def _is_over(self) -> bool:
        """Whether no live beam is left, or none that `early_stopping` would wait for."""
        if not self._live:
            return True
        if None in self._finished:
            return False
        if self._early_stopping is True:
            return True
        favours_length = self._early_stopping == "never" and self._length_penalty > 0
        length = self._max_tokens if favours_length else self._num_tokens
        best_in_sight = self._live_scores[0] / length**self._length_penalty
        return not bool(best_in_sight > self._finished_scores.min())


class _Node:
    """The last token of a beam, and the node of the one before; None before the first."""

    __slots__ = ("parent", "token_id")

    def __init__(self, token_id: int, parent: "_Node | None") -> None:
        self.token_id = token_id
        self.parent = parent

    def token_ids(self) -> list[int]:
        node: _Node | None = self
        token_ids = []
        while node is not None:
            token_ids.append(node.token_id)
            node = node.parent
        return token_ids[::-1]


class _Finished(NamedTuple):
    node: _Node
    cumulative_logprob: float


class _Candidates(NamedTuple):
    """One entry per candidate, the likeliest first.

    `ended`: it takes an end token, or the last one that fits. `possible`: it is a sequence of its
    own with a probability above 0.
    """

    scores: torch.Tensor
    parents: list[int]
    token_ids: list[int]
    ended: list[bool]
    possible: list[bool]


def _mask(flags: list[bool], like: torch.Tensor, masked: bool) -> torch.Tensor:
    """Return what to add so that the entries whose flag is `masked` lose against all others."""
    return torch.tensor([_MASKED if flag is masked else 0.0 for flag in flags], dtype=like.dtype)


def _refuse_unless(ok: bool, param: str, value: object, allowed: str) -> None:
    if not ok:
        raise InvalidRequest(f"{param} is {value!r:.200}; it must be {allowed}", param)
