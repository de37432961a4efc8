"""The arrays of one step on the host, from what the scheduler decided."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from prefixkv.kernels.plan import Plan
from prefixkv.kernels.plan_options import PlanOptions
from prefixkv.kernels.planner import build_plans
from prefixkv.scheduler import ScheduledBranch


@dataclass(frozen=True, slots=True)
class StepInputs:
    """One step, packed: the tokens of all branches, one branch after the other.

    Attributes:
        token_ids, positions, slots: int64 [num_tokens].
        row_ends: int64 [num_branches]; branch i has the rows before row_ends[i], from
            row_ends[i - 1] on.
        logits_rows: int64 [num_logits], rows whose logits are wanted, in the order of the batch.
        plans: what attention reads, one plan a distinct window.
    """

    token_ids: NDArray[np.int64]
    positions: NDArray[np.int64]
    slots: NDArray[np.int64]
    row_ends: NDArray[np.int64]
    logits_rows: NDArray[np.int64]
    plans: dict[int | None, Plan]


def build_inputs(
    batch: Sequence[ScheduledBranch],
    block_size: int,
    windows: Iterable[int | None],
    options: PlanOptions | None = None,
) -> StepInputs:
    """Pack a batch whose blocks are reserved and written in the books.

    Args:
        options: how the backend wants its plans cut.
    """
    token_ids, positions, slots = [], [], []
    tables, query_lens, context_lens = [], [], []
    for item in batch:
        end = item.start + item.num_tokens
        token_ids.append(np.array(item.branch.token_slice(item.start, end), np.int64))
        position = np.arange(item.start, end)
        table = item.sequence.block_table()
        first = item.start // block_size
        blocks = np.array(table[first : -(-end // block_size)], np.int64)
        slots.append(blocks[position // block_size - first] * block_size + position % block_size)
        positions.append(position)
        tables.append(table)
        query_lens.append(item.num_tokens)
        context_lens.append(end)
    row_ends = np.cumsum(query_lens)
    logits_rows = [
        row
        for end, item in zip(row_ends.tolist(), batch, strict=True)
        for row in range(end - item.num_logits, end)
    ]
    return StepInputs(
        token_ids=np.concatenate(token_ids),
        positions=np.concatenate(positions),
        slots=np.concatenate(slots),
        row_ends=row_ends,
        logits_rows=np.array(logits_rows, np.int64),
        plans=build_plans(tables, query_lens, context_lens, block_size, windows, options),
    )
