"""From logits to token ids.

Every draw takes one uniform number from Philox, keyed by (seed, branch) at counter `position`, and
walks the cumulative distribution in vocabulary order. So a token depends on its own row and on
(seed, branch, position) only, never on what else is in the batch; and because the walk is not in
order of likelihood, logits that differ in their last bits move the draw by as little.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from prefixkv.kernels.upload import upload_array, upload_ids
from prefixkv.logits_processing import RuledRow, apply_rules
from prefixkv.logits_rules import LogitsRules
from prefixkv.logprobs import LogprobRows, likeliest, rows_of_logprobs
from prefixkv.outputs import TokenLogprobs
from prefixkv.sampling_params import SamplingParams

_NUM_LIKELIEST = 1024  # top_p rarely needs more, and sorting a whole vocabulary costs ten times it
_MASK_64 = 2**64 - 1


class SamplingRow(NamedTuple):
    """How to choose the token of one row of logits.

    `position` is the index of the chosen token in its sequence; together with `seed` and `branch`
    it must name one draw only.

    Attributes:
        rules: from `compile_rules` on `params`; None if that gave none.
        tokens: prompt and output so far of this branch; read only if there are rules.
        wants_logprob: the chosen token's log-probability is wanted, whatever `params.logprobs` is.
    """

    params: SamplingParams
    seed: int
    branch: int
    position: int
    rules: LogitsRules | None = None
    tokens: Sequence[int] = ()
    num_prompt_tokens: int = 0
    wants_logprob: bool = False

    @property
    def num_top_logprobs(self) -> int | None:
        """Likeliest tokens to tell of besides the chosen one; None to tell of none at all."""
        if self.params.logprobs is None and self.wants_logprob:
            return 0
        return self.params.logprobs


class Sampled(NamedTuple):
    """The token of one row: None if the rules of the row exclude all."""

    token_id: int | None
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True)
class Draws:
    """Tokens chosen on the device; `read` brings them to the host.

    Attributes:
        tokens: int64 [num_rows].
        ruled, is_stuck: rows that rules apply to, and bool [len(ruled)]: whether these leave
            nothing to choose; the token is anything then.
        told: indices of the rows whose log-probabilities are wanted.
        logprobs: those; None if there are none.
    """

    tokens: torch.Tensor
    ruled: Sequence[int]
    is_stuck: torch.Tensor
    told: Sequence[int]
    logprobs: LogprobRows | None

    def read(self) -> list[Sampled]:
        """Wait for the device."""
        flags = self.is_stuck.tolist() if len(self.ruled) else []
        stuck = {i for i, is_stuck in zip(self.ruled, flags, strict=True) if is_stuck}
        rows = self.logprobs.read() if self.logprobs is not None else []
        logprobs = dict(zip(self.told, rows, strict=True))
        return [
            Sampled(None) if i in stuck else Sampled(token, logprobs.get(i))
            for i, token in enumerate(self.tokens.tolist())
        ]


class Sampler:
    """Chooses one token per row of logits. Holds no state."""

    def sample(self, logits: torch.Tensor, rows: Sequence[SamplingRow]) -> list[Sampled]:
        """Draw one token per row, and wait for them."""
        return self.draw(logits, rows).read()

    def draw(self, logits: torch.Tensor, rows: Sequence[SamplingRow]) -> Draws:
        """Choose one token per row; does not wait for the device.

        First the row's rules apply, as `logits_processing` says. Then greedy rows take the
        likeliest token, the lowest id among equals; the others apply temperature, min_p, top_k
        and top_p, in this order, and draw.

        Args:
            logits: [num_rows, vocab_size], any float dtype and device; read only. A row that is
                not finite gives any token, and does not touch the others.
            rows: one per row of `logits`.
        """
        assert logits.shape[0] == len(rows), (logits.shape, len(rows))
        if not rows:
            nothing = torch.empty(0, dtype=torch.int64)
            return Draws(nothing, (), nothing, (), None)
        ruled = [i for i, row in enumerate(rows) if _has_rules(row)]
        scores, is_stuck = _under_rules(logits, rows, ruled)
        tokens = torch.argmax(scores, dim=-1)
        drawn = [i for i, row in enumerate(rows) if not row.params.is_greedy]
        if drawn:
            picked = upload_ids(drawn, logits.device)
            tokens[picked] = _draw(scores[picked], [rows[i] for i in drawn])
        told = [i for i, row in enumerate(rows) if row.num_top_logprobs is not None]
        logprobs = _wanted_logprobs(logits, tokens, rows, told) if told else None
        return Draws(tokens, ruled, is_stuck, told, logprobs)


def kept_weights(logits: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """Return [num_rows, vocab_size] weights, 1 for the likeliest token and 0 for dropped ones.

    They are float64 for float64 logits and float32 otherwise. Requires: no temperature is 0.
    """
    scores = logits.to(torch.promote_types(logits.dtype, torch.float32))
    temperature = _column([_in_float32_range(p.temperature) for p in params], scores)
    # the maximum goes first, so that no temperature, however small, makes an infinity of it
    scores = (scores - scores.amax(dim=-1, keepdim=True)) / temperature
    _drop_below_top_k(scores, [p.top_k for p in params])
    weights = scores.exp_()
    # before or after top_k is all the same for min_p; top_p shares out what both have left
    min_p = [p.min_p for p in params]
    if any(min_p):
        weights.masked_fill_(weights < _column(min_p, weights), 0.0)
    _drop_outside_nucleus(weights, [p.top_p for p in params])
    return weights


def uniform(seed: int, branch: int, position: int) -> float:
    """Return the number in [0, 1) that belongs to (seed, branch, position)."""
    key = np.array([seed & _MASK_64, branch], dtype=np.uint64)
    counter = np.array([position, 0, 0, 0], dtype=np.uint64)
    bits = int(np.random.Philox(key=key, counter=counter).random_raw())
    return (bits >> 11) * 2.0**-53


def _has_rules(row: SamplingRow) -> bool:
    num_output_tokens = len(row.tokens) - row.num_prompt_tokens
    return row.rules is not None and row.rules.apply_after(num_output_tokens)


def _under_rules(
    logits: torch.Tensor, rows: Sequence[SamplingRow], ruled: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the logits after the rules; and of the ruled rows, whether these exclude all."""
    if not ruled:
        return logits, torch.empty(0, dtype=torch.bool)
    scores = logits.to(torch.promote_types(logits.dtype, torch.float32), copy=True)
    for_rules = []
    for i in ruled:
        rules = rows[i].rules
        assert rules is not None
        for_rules.append(RuledRow(i, rules, rows[i].tokens, rows[i].num_prompt_tokens))
    apply_rules(scores, for_rules)
    return scores, scores[upload_ids(ruled, scores.device)].amax(dim=-1) == -torch.inf


def _wanted_logprobs(
    logits: torch.Tensor, tokens: torch.Tensor, rows: Sequence[SamplingRow], told: Sequence[int]
) -> LogprobRows:
    """Return what is wanted of some rows; of the model's own logits, which no parameter changed."""
    picked = upload_ids(told, logits.device)
    num_top = [rows[i].num_top_logprobs or 0 for i in told]
    return rows_of_logprobs(logits[picked], tokens[picked], num_top)


def _draw(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
    weights = kept_weights(logits, [row.params for row in rows])
    cumulative = weights.cumsum(dim=-1, dtype=torch.float64)
    total = cumulative[:, -1:]
    uniforms = [uniform(row.seed, row.branch, row.position) for row in rows]
    # rounding must not carry the target up to the total, where no token is left to take
    below_total = torch.nextafter(total, torch.zeros_like(total))
    target = torch.minimum(_column(uniforms, total) * total, below_total)
    tokens = torch.searchsorted(cumulative, target, right=True).squeeze(-1)
    return tokens.clamp_(max=logits.shape[-1] - 1)  # weights that are not numbers end beyond


def _drop_below_top_k(scores: torch.Tensor, top_k: Sequence[int]) -> None:
    """Set to -inf what is less likely than the k-th likeliest; equals of the k-th stay."""
    vocab_size = scores.shape[-1]
    limited = [i for i, k in enumerate(top_k) if 0 < k < vocab_size]
    if not limited:
        return
    rows = upload_ids(limited, scores.device)
    wanted = [top_k[i] for i in limited]
    likeliest = scores[rows].topk(max(wanted), dim=-1).values
    threshold = likeliest.gather(-1, upload_ids(wanted, scores.device)[:, None] - 1)
    scores[rows] = scores[rows].masked_fill(scores[rows] < threshold, -torch.inf)


def _drop_outside_nucleus(weights: torch.Tensor, top_p: Sequence[float]) -> None:
    """Zero what lies outside the smallest set of likeliest tokens whose share reaches top_p."""
    limited = [i for i, p in enumerate(top_p) if p < 1]
    if not limited:
        return
    rows = upload_ids(limited, weights.device)
    chosen = weights[rows]
    total = chosen.sum(dim=-1, keepdim=True, dtype=torch.float64)
    mass = _column([top_p[i] for i in limited], total) * total
    # a GPU would have to be waited for to know whether so few were enough
    kept = _nucleus(chosen, mass, _NUM_LIKELIEST if weights.is_cpu else weights.shape[-1])
    weights[rows] = chosen.masked_fill(~kept, 0.0)


def _nucleus(weights: torch.Tensor, mass: torch.Tensor, num_likeliest: int) -> torch.Tensor:
    """Return the mask of the fewest likeliest tokens that weigh `mass` [num_rows, 1] together."""
    num_likeliest = min(num_likeliest, weights.shape[-1])
    values, ids = likeliest(weights, num_likeliest)
    inside = values.cumsum(dim=-1, dtype=torch.float64) - values < mass
    kept = torch.zeros_like(weights, dtype=torch.bool).scatter_(-1, ids, inside)
    if num_likeliest < weights.shape[-1]:
        # undecided where the set may go on, or where equals of its last token were not looked at
        lightest = values.masked_fill(~inside, torch.inf).amin(dim=-1)
        (undecided,) = torch.nonzero(lightest <= values[:, -1], as_tuple=True)
        if len(undecided):
            kept[undecided] = _nucleus(weights[undecided], mass[undecided], weights.shape[-1])
    return kept


def _in_float32_range(temperature: float) -> float:
    return min(max(temperature, 1e-30), 1e30)


def _column(numbers: Sequence[float], like: torch.Tensor) -> torch.Tensor:
    return upload_array(np.array(numbers, np.float64), like.device).to(like.dtype)[:, None]
