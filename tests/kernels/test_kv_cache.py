"""The pool's sizes and limits, and one step's attention over it."""

from typing import TYPE_CHECKING

import psutil
import pytest
import torch

from prefixkv.attention_step import StepAttention
from prefixkv.errors import ConfigError
from prefixkv.kernels.backend import get_backend
from prefixkv.kernels.plan import build_plan
from prefixkv.kv_cache import KVCache, KVCacheShape

if TYPE_CHECKING:
    from tests.kernels.conftest import MakeForest


def make_shape(**sizes: object) -> KVCacheShape:
    """2 layers, 2 kv heads of 16, 4 slots, float32, unless told otherwise."""
    defaults = {"num_layers": 2, "num_kv_heads": 2, "head_dim": 16, "block_size": 4}
    return KVCacheShape(**{**defaults, "dtype": torch.float32, **sizes})  # type: ignore[arg-type]


def test_a_block_is_one_span_of_memory() -> None:
    """The pool is block-major and contiguous, block_bytes bytes a block."""
    cache = KVCache.allocate(make_shape(), 5)

    assert cache.pool.shape == (5, 2, 2, 2, 4, 16)
    assert cache.pool.is_contiguous()
    assert cache.num_blocks == 5
    assert cache.pool.stride(0) * cache.pool.itemsize == cache.shape.block_bytes


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"block_size": 3}, "block_size is 3"),
        ({"head_dim": 60}, "head_dim is 60"),
        ({"head_dim": 0}, "head_dim is 0"),
        ({"num_layers": 0}, "num_layers is 0"),
        ({"num_kv_heads": 0}, "num_kv_heads 0"),
        ({"dtype": torch.int8}, "torch.int8"),
    ],
)
def test_sizes_that_cannot_be_served_are_refused(sizes: dict[str, object], message: str) -> None:
    """A ConfigError names the offending value."""
    with pytest.raises(ConfigError, match=message):
        make_shape(**sizes)


def test_a_budget_gives_the_blocks_that_fit() -> None:
    """Whole blocks, rounded down; too few are an error with the numbers."""
    shape = make_shape()

    assert shape.num_blocks_in(10 * shape.block_bytes + 1) == 10
    with pytest.raises(ConfigError, match=rf"holds 1 blocks of {shape.block_bytes} bytes"):
        shape.num_blocks_in(2 * shape.block_bytes - 1)


def test_more_than_the_free_memory_is_refused() -> None:
    """The error says how much was asked and how much there is."""
    shape = make_shape()
    num_blocks = 2 * psutil.virtual_memory().total // shape.block_bytes

    with pytest.raises(ConfigError, match=r"need \d+\.\d\d GiB; \d+\.\d\d GiB are available"):
        KVCache.allocate(shape, num_blocks)
    with pytest.raises(ConfigError, match="num_blocks is 1"):
        KVCache.allocate(shape, 1)


def test_fill_reaches_the_whole_pool() -> None:
    """A filled pool is poison everywhere."""
    cache = KVCache.allocate(make_shape(), 3)
    cache.fill(torch.nan)

    assert torch.isnan(cache.pool).all()


def test_a_step_writes_then_attends_by_the_layers_window(make_forest: "MakeForest") -> None:
    """Each layer reads its own K and V, this step's tokens included, through its own window."""
    windows = (None, 3)
    forest = make_forest(8, block_size=4, contexts=[(-1, 0, 11), (-1, 0, 6)], query_lens=[4, 1])
    cache = KVCache.allocate(make_shape(), len(forest.pool))
    cache.fill(torch.nan)
    slots, rows = [], []
    for i, (table, length) in enumerate(zip(forest.tables, forest.context_lens, strict=True)):
        for position in range(length):
            slot = int(table[position // 4]) * 4 + position % 4
            if position < length - forest.query_lens[i]:
                for layer in range(2):
                    cache.pool[slot // 4, layer, 0, :, slot % 4] = forest.keys[i][position].float()
                    cache.pool[slot // 4, layer, 1, :, slot % 4] = forest.values[i][
                        position
                    ].float()
            else:
                slots.append(slot)
                rows.append((i, position))
    key = torch.stack([forest.keys[i][p] for i, p in rows]).float()
    value = torch.stack([forest.values[i][p] for i, p in rows]).float()
    plans = {window: forest.plan(window) for window in windows}
    backend = get_backend("cpu", torch.float32)
    step = StepAttention(cache, backend, torch.tensor(slots), plans, windows)

    for layer, window in enumerate(windows):
        out = step.attend(layer, forest.query, key, value, forest.scale)
        torch.testing.assert_close(out.double(), forest.truth(window), rtol=1e-5, atol=1e-5)
    assert step.find_finite_rows().all()


@pytest.mark.parametrize("poisoned", ["key", "value"])
def test_rows_that_are_not_finite_are_told_apart(poisoned: str) -> None:
    """After the last layer, exactly the tokens with a NaN or infinity in K or V are marked."""
    cache = KVCache.allocate(make_shape(), 3)
    plan = build_plan([[1, 2]], [5], [5], 4)
    step = StepAttention(
        cache, get_backend("cpu", torch.float32), torch.arange(4, 9), {None: plan}, (None, None)
    )
    rows = {"key": torch.randn(5, 2, 16), "value": torch.randn(5, 2, 16)}
    rows[poisoned][2, 1, 3] = torch.nan
    rows[poisoned][4, 0, 0] = -torch.inf
    for layer in range(2):
        step.attend(layer, torch.randn(5, 4, 16), rows["key"], rows["value"], 0.25)

    assert step.find_finite_rows().tolist() == [True, True, False, True, False]


def test_every_layer_needs_a_plan() -> None:
    """A window without a plan, or another number of layers than the pool's, is refused."""
    cache = KVCache.allocate(make_shape(), 3)
    plan = build_plan([[1]], [1], [1], 4)
    backend, slots = get_backend("cpu", torch.float32), torch.tensor([4])

    with pytest.raises(ValueError, match="no plan for window 7"):
        StepAttention(cache, backend, slots, {None: plan}, (None, 7))
    with pytest.raises(ValueError, match="1 windows for 2 layers"):
        StepAttention(cache, backend, slots, {None: plan}, (None,))
