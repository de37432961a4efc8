"""Plans that `build_plan` does not make, and pools as large as a GPU's, for tests of kernels."""

import mmap
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from prefixkv.kernels.plan import BASE_POS, DST_SLOT, FINAL, ROW_CNT, ROW_OFF, TOK0, TOK1, Plan


def split_plan(plan: Plan, rng: np.random.Generator, share: float) -> Plan:
    """Cut a share of the items at random tokens, empty pieces included; shuffle the items."""
    work: list[list[int]] = []
    slots: list[list[int]] = [[] for _ in plan.positions]
    num_partials = 0
    for item in plan.work.tolist():
        if rng.random() >= share:
            work.append(item)
            continue
        cuts = sorted(int(cut) for cut in rng.integers(item[TOK0], item[TOK1] + 1, 3))
        for tok0, tok1 in zip([item[TOK0], *cuts], [*cuts, item[TOK1]], strict=True):
            piece = [*item[:TOK0], tok0, tok1, num_partials, 0, item[BASE_POS]]
            work.append(piece)
            for r in range(item[ROW_CNT]):
                slots[plan.rows[item[ROW_OFF] + r]].append(num_partials + r)
            num_partials += item[ROW_CNT]
    return replace(
        plan,
        work=np.array([work[i] for i in rng.permutation(len(work))], np.int32),
        merge_indptr=np.cumsum([0, *map(len, slots)], dtype=np.int32),
        merge_slots=np.array([slot for row in slots for slot in row], np.int32),
        num_partials=num_partials,
    )


def shared_node_plan(plan: Plan, num_shared_blocks: int) -> Plan:
    """All rows read the common first blocks as one item, then each sequence its own rest."""
    block_size, num_rows = plan.block_size, len(plan.rows)
    num_tokens = num_shared_blocks * block_size
    work = [[0, num_rows, 0, 0, num_tokens, 0, 0, 0]]
    for item in plan.work.tolist():
        row_off = item[ROW_OFF]
        rest = [*item]
        rest[TOK0], rest[DST_SLOT], rest[FINAL] = num_tokens, num_rows + row_off, 0
        work.append(rest)
    slots = np.arange(2 * num_rows, dtype=np.int32).reshape(2, num_rows).T.reshape(-1)
    return replace(
        plan,
        work=np.array(work, np.int32),
        merge_indptr=np.arange(0, 2 * num_rows + 1, 2, dtype=np.int32),
        merge_slots=np.ascontiguousarray(slots),
        num_partials=2 * num_rows,
    )


def make_far_pool(pool: Tensor) -> Tensor:
    """The same data, the second half of the blocks 2^31 elements and more from the first block.

    Pages between blocks are never touched, and take no memory.
    """
    strides = list(pool.stride())
    strides[0] = 2**31 // (len(pool) // 2) // 16 * 16
    num_elements = (len(pool) - 1) * strides[0] + pool[0].numel()
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
    pages = mmap.mmap(-1, num_elements * pool.element_size(), flags=flags)
    far = torch.frombuffer(pages, dtype=pool.dtype).as_strided(pool.shape, strides)
    return far.copy_(pool)
