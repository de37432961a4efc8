"""Batches for `benchmarks/gpu.py`: block tables that share or do not, and a pool for them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from prefixkv.kernels.plan import Int32Array, Plan
from prefixkv.kernels.plan_options import PlanOptions
from prefixkv.kernels.planner import build_plans


class Heads(NamedTuple):
    """The shape of an attention layer."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        shape = f"{self.num_heads}/{self.num_kv_heads}/{self.head_dim}"
        return f"{dtype} {shape} blocks of {self.block_size}"

    @property
    def token_bytes(self) -> int:
        """K and V of a token in one layer."""
        return 2 * self.num_kv_heads * self.head_dim * self.dtype.itemsize


@dataclass
class Batch:
    """Sequences of one step.

    Attributes:
        tables: physical block ids of each sequence.
        num_blocks: of the pool that these ids need.
        lengths: query tokens and context tokens of each sequence.
    """

    tables: list[Int32Array]
    num_blocks: int
    query_lens: list[int]
    context_lens: list[int]
    block_size: int

    @property
    def num_tokens(self) -> int:
        """Query tokens of all sequences."""
        return sum(self.query_lens)

    @property
    def num_unique(self) -> int:
        """Distinct blocks that hold any of the contexts."""
        used = [
            table[: -(-context // self.block_size)]
            for table, context in zip(self.tables, self.context_lens, strict=True)
        ]
        return len(np.unique(np.concatenate(used)))

    def plan(self, options: PlanOptions | None, window: int | None = None) -> Plan:
        """The step's plan; None: one run a sequence."""
        lengths = (self.query_lens, self.context_lens, self.block_size)
        return build_plans(self.tables, *lengths, [window], options)[window]


def make_batch(
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    block_size: int,
    *,
    shared: Sequence[tuple[int, int]] = (),
    spare: int = 3,
    seed: int = 0,
) -> Batch:
    """Sequences over randomly permuted blocks.

    Args:
        shared: (sequences of a group, tokens in common from the front); groups are neighbours.
            Tokens grow and groups shrink from one level to the next. Cut to whole blocks.
        spare: blocks of the pool that nobody uses.
    """
    logical: list[list[tuple[int, ...]]] = []
    for i, (query, context) in enumerate(zip(query_lens, context_lens, strict=True)):
        table: list[tuple[int, ...]] = []
        for level, (members, tokens) in enumerate(shared):
            until = min(tokens, context - query) // block_size
            table += [(level, i // members, block) for block in range(len(table), until)]
        end = -(-context // block_size)
        logical.append(table + [(-1, i, block) for block in range(len(table), end)])
    numbers: dict[tuple[int, ...], int] = {}
    for table in logical:
        for block_name in table:
            numbers.setdefault(block_name, len(numbers))
    num_blocks = len(numbers) + spare
    physical = np.random.default_rng(seed).permutation(num_blocks).astype(np.int32)
    tables = [physical[[numbers[name] for name in table]] for table in logical]
    return Batch(tables, num_blocks, list(query_lens), list(context_lens), block_size)


def make_pool(
    heads: Heads, num_blocks: int, num_layers: int, device: torch.device, *, strided: bool = False
) -> Tensor:
    """A pool of NaN; `strided` has the tokens outside the heads in memory."""
    inner = [heads.num_kv_heads, heads.block_size]
    if strided:
        inner.reverse()
    sizes = (num_blocks, num_layers, 2, *inner, heads.head_dim)
    pool = torch.empty(sizes, dtype=heads.dtype, device=device).fill_(torch.nan)
    return pool.transpose(3, 4) if strided else pool


def fill_contexts(pool: Tensor, layer: int, batch: Batch) -> None:
    """Write random K and V into the slots of all contexts; the others keep what they hold."""
    for table, context in zip(batch.tables, batch.context_lens, strict=True):
        ids = torch.from_numpy(table[: -(-context // batch.block_size)]).long().to(pool.device)
        full = context // batch.block_size
        shape = (full, *pool.shape[2:])
        pool[ids[:full], layer] = torch.randn(shape, device=pool.device).to(pool.dtype)
        rest = context - full * batch.block_size
        if rest:
            tail = torch.randn((*pool.shape[2:4], rest, pool.shape[5]), device=pool.device)
            pool[ids[full], layer, :, :, :rest] = tail.to(pool.dtype)


def gather(pool: Tensor, layer: int, table: Int32Array, context: int) -> Tensor:
    """K and V of one sequence, [2, num_kv_heads, context, head_dim]."""
    block_size = pool.shape[4]
    ids = torch.from_numpy(table[: -(-context // block_size)]).long().to(pool.device)
    run = pool[ids, layer].permute(1, 2, 0, 3, 4).flatten(2, 3)
    return run[:, :, :context]
