"""Applies the rules of requests to their rows of logits.

The order is that of vLLM: bias, then penalties, and what is excluded is -inf. Nothing that is -inf
is changed by a bias or a penalty, so it is all the same that exclusion comes last here; this way
the penalties work on finite numbers only.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from prefixkv.kernels.upload import upload_array, upload_arrays
from prefixkv.logits_rules import LogitsRules

Ids = np.ndarray[tuple[int], np.dtype[np.int64]]


class RuledRow(NamedTuple):
    """A row of logits and the rules for it.

    Attributes:
        row: its index.
        tokens: prompt and output so far, of the sequence whose next token is chosen.
    """

    row: int
    rules: LogitsRules
    tokens: Sequence[int]
    num_prompt_tokens: int


def apply_rules(scores: torch.Tensor, rows: Sequence[RuledRow]) -> None:
    """Change `scores` [num_rows, vocab_size], finite, in place; excluded tokens become -inf.

    A row depends on its own rules and tokens only, bit for bit. O(tokens) per penalised row: the
    tokens are counted anew each time, so that forks, preemption and rollback have no count to keep.
    """
    _add_bias(scores, rows)
    _penalise_repetition(scores, [row for row in rows if row.rules.repetition_penalty != 1])
    _penalise_output(scores, [row for row in rows if row.rules.penalise_output])
    for row in rows:
        _keep_allowed(scores[row.row], row.rules)
    _exclude(scores, rows)


def _add_bias(scores: torch.Tensor, rows: Sequence[RuledRow]) -> None:
    biased = [row for row in rows if row.rules.bias_ids]
    if biased:
        cells = _cells(biased, [np.array(row.rules.bias_ids) for row in biased], scores.device)
        bias = np.concatenate([np.array(row.rules.bias) for row in biased])
        scores[cells] += upload_array(bias, scores.device).to(scores.dtype)


def _penalise_repetition(scores: torch.Tensor, rows: Sequence[RuledRow]) -> None:
    if not rows:
        return
    tokens = [np.array(row.tokens, np.int64) for row in rows]
    cells = _cells(rows, tokens, scores.device)
    penalties = [row.rules.repetition_penalty for row in rows]
    penalty = _each([min(max(p, 1e-30), 1e30) for p in penalties], tokens, scores)
    values = scores[cells]
    penalised = torch.where(values > 0, values / penalty, values * penalty)
    limit = torch.finfo(scores.dtype).max
    # a token that is there twice is written twice, with the same value
    scores[cells] = penalised.clamp_(-limit, limit)


def _penalise_output(scores: torch.Tensor, rows: Sequence[RuledRow]) -> None:
    counted = [
        np.unique(np.array(row.tokens[row.num_prompt_tokens :], np.int64), return_counts=True)
        for row in rows
    ]
    if not counted:
        return
    tokens = [ids for ids, _ in counted]
    cells = _cells(rows, tokens, scores.device)
    occurrences = np.concatenate([counts for _, counts in counted])
    counts = upload_array(occurrences, scores.device).to(scores.dtype)
    frequency = _each([row.rules.frequency_penalty for row in rows], tokens, scores)
    presence = _each([row.rules.presence_penalty for row in rows], tokens, scores)
    scores[cells] = scores[cells] - frequency * counts - presence


def _keep_allowed(row: torch.Tensor, rules: LogitsRules) -> None:
    if rules.allowed_ids:
        ids = upload_array(np.frombuffer(rules.allowed_ids, np.int64), row.device)
        kept = row[ids]
        row.fill_(-torch.inf)
        row[ids] = kept


def _exclude(scores: torch.Tensor, rows: Sequence[RuledRow]) -> None:
    excluded = [
        np.array(row.rules.excluded(row.tokens, row.num_prompt_tokens), np.int64) for row in rows
    ]
    scores[_cells(rows, excluded, scores.device)] = -torch.inf


def _cells(
    rows: Sequence[RuledRow], ids: Sequence[Ids], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows and the columns of all `ids`, which are given by row."""
    indices = np.repeat([row.row for row in rows], [len(one) for one in ids])
    columns = np.concatenate(ids)
    row_ids, token_ids = upload_arrays([indices, columns], device)
    return row_ids, token_ids


def _each(numbers: Sequence[float], ids: Sequence[Ids], like: torch.Tensor) -> torch.Tensor:
    """Return the number of each row once for each of its ids."""
    repeated = np.repeat(np.array(numbers, np.float64), [len(one) for one in ids])
    return upload_array(repeated, like.device).to(like.dtype)
