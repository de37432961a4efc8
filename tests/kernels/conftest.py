"""Random copy-on-write forests in a pool whose unwritten slots are poison, and their truth."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from prefixkv.kernels.plan import Plan
from prefixkv.kernels.plan_options import PlanOptions
from prefixkv.kernels.planner import build_plans

LAYER = 1
NOWHERE = 10**6  # a block id that no pool has


@dataclass(slots=True)
class Forest:
    """Sequences that share blocks, in layer LAYER of a pool; every other slot is `fill`.

    `keys` and `values` hold each sequence's own truth, [context, num_kv_heads, head_dim] float64.
    """

    pool: Tensor
    tables: list[np.ndarray[Any, np.dtype[np.int32]]]
    keys: list[Tensor]
    values: list[Tensor]
    query_lens: list[int]
    query: Tensor
    scale: float

    @property
    def context_lens(self) -> list[int]:
        """Tokens of each sequence."""
        return [len(keys) for keys in self.keys]

    def plan(self, window: int | None = None, options: PlanOptions | None = None) -> Plan:
        """The plan of all sequences; without options, one run for each."""
        lengths = (self.query_lens, self.context_lens, self.pool.shape[4])
        return build_plans(self.tables, *lengths, [window], options)[window]

    def show_positions(self) -> None:
        """Make scores equal and values one-hot, so that an output says what was attended to.

        For one kv head, and contexts no longer than head_dim.
        """
        block_size, head_dim = self.pool.shape[4:]
        self.query.zero_()
        for table, length in zip(self.tables, self.context_lens, strict=True):
            for position in range(length):
                slot = self.pool[table[position // block_size], LAYER, 1, 0, position % block_size]
                slot.copy_(torch.eye(head_dim)[position])

    def truth(self, window: int | None = None, softcap: float | None = None) -> Tensor:
        """Brute-force attention of all query rows in float64, from the sequences alone."""
        num_heads, head_dim = self.query.shape[1:]
        outputs = []
        for keys, values, query in zip(
            self.keys, self.values, torch.split(self.query.double(), self.query_lens), strict=True
        ):
            group = num_heads // keys.shape[1]
            wide_keys = keys.repeat_interleave(group, 1)
            wide_values = values.repeat_interleave(group, 1)
            scores = torch.einsum("rhd,nhd->hrn", query, wide_keys) * self.scale
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            columns = torch.arange(len(keys))
            positions = columns[len(keys) - len(query) :, None]
            visible = columns <= positions
            if window is not None:
                visible &= columns > positions - window
            weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
            outputs.append(torch.einsum("hrn,nhd->rhd", weights, wide_values))
        return torch.cat(outputs) if outputs else torch.empty(0, num_heads, head_dim)


MakeForest = Callable[..., Forest]


def _contexts(rng: np.random.Generator, num_seqs: int, longest: int) -> list[tuple[int, int, int]]:
    """(parent or -1, shared tokens, all tokens) of each sequence: fork anywhere, then grow."""
    contexts: list[tuple[int, int, int]] = []
    for i in range(num_seqs):
        total = int(rng.integers(1, longest + 1))
        parent = int(rng.integers(-1, i)) if i else -1
        most = min(total - 1, contexts[parent][2]) if parent >= 0 else 0
        contexts.append((parent, int(rng.integers(0, most + 1)), total))
    return contexts


def _make_forest(
    seed: int = 0,
    *,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 16,
    block_size: int = 4,
    dtype: torch.dtype = torch.float32,
    contexts: list[tuple[int, int, int]] | None = None,
    query_lens: list[int] | None = None,
    num_seqs: int = 6,
    longest: int = 60,
    fill: float = torch.nan,
) -> Forest:
    rng = np.random.default_rng(seed)
    generator = torch.Generator().manual_seed(seed)
    contexts = contexts or _contexts(rng, num_seqs, longest)
    num_blocks = 3 + sum(-(-total // block_size) for _, _, total in contexts)
    pool = torch.full((num_blocks, 2, 2, num_kv_heads, block_size, head_dim), fill, dtype=dtype)
    free = [int(block) for block in rng.permutation(num_blocks)]
    owned: list[list[int]] = []
    keys: list[Tensor] = []
    values: list[Tensor] = []
    for parent, shared, total in contexts:
        fresh = torch.randn(2, total - shared, num_kv_heads, head_dim, generator=generator)
        key, value = fresh.to(dtype).double()
        if parent >= 0:
            key = torch.cat((keys[parent][:shared], key))
            value = torch.cat((values[parent][:shared], value))
        # full blocks of the parent are shared; the one that is cut is copied
        num_shared = shared // block_size
        table = owned[parent][:num_shared] if parent >= 0 else []
        table = table + [free.pop() for _ in range(-(-total // block_size) - num_shared)]
        for position in range(num_shared * block_size, total):
            block, offset = table[position // block_size], position % block_size
            pool[block, LAYER, 0, :, offset] = key[position].to(dtype)
            pool[block, LAYER, 1, :, offset] = value[position].to(dtype)
        owned.append(table)
        keys.append(key)
        values.append(value)
    if query_lens is None:
        query_lens = [int(rng.integers(1, total + 1)) for _, _, total in contexts]
        query_lens[::2] = [1] * len(query_lens[::2])
    query = torch.randn(sum(query_lens), num_heads, head_dim, generator=generator).to(dtype)
    tables = [np.array([*table, NOWHERE, -7], np.int32) for table in owned]
    return Forest(pool, tables, keys, values, query_lens, query, head_dim**-0.5)


@pytest.fixture
def make_forest() -> MakeForest:
    """Build a Forest from a seed; every size can be set."""
    return _make_forest
