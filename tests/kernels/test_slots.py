"""Writing tokens into slots and copying blocks, and nothing beside them."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixkv.kernels.backend import BackendName, get_backend

backends = pytest.mark.parametrize(
    ("name", "dtype"),
    [("cpu", torch.float32), ("cpu", torch.bfloat16), ("reference", torch.float64)],
)
both = pytest.mark.parametrize("name", ["cpu", "reference"])


def make_pool(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """7 blocks of 4 slots, 3 layers, 2 kv heads of 8."""
    return torch.randn(7, 3, 2, 2, 4, 8, generator=torch.Generator().manual_seed(0)).to(dtype)


@backends
@pytest.mark.parametrize("contiguous", [True, False])
def test_a_write_touches_its_slots_only(
    name: BackendName, dtype: torch.dtype, contiguous: bool
) -> None:
    """One layer's named slots hold the new K and V; every other byte is as before."""
    pool = make_pool(dtype)
    expected = pool.clone()
    slots = torch.tensor([27, 5, 12, 0, 13])
    key, value = torch.randn(2, 5, 2, 8).to(dtype)
    if not contiguous:
        key, value = (x.transpose(0, 1).contiguous().transpose(0, 1) for x in (key, value))
    for token, slot in enumerate(slots.tolist()):
        expected[slot // 4, 1, 0, :, slot % 4] = key[token]
        expected[slot // 4, 1, 1, :, slot % 4] = value[token]

    get_backend(name, dtype).write_kv(pool, 1, key, value, slots)

    assert torch.equal(pool, expected)


@both
@pytest.mark.parametrize("slot", [-1, 28])
def test_a_slot_outside_the_pool_writes_nothing(name: BackendName, slot: int) -> None:
    """An IndexError, and the pool is untouched."""
    pool = make_pool()
    expected = pool.clone()
    key, value = torch.randn(2, 2, 2, 8)

    with pytest.raises(IndexError, match="outside"):
        get_backend(name, torch.float32).write_kv(pool, 0, key, value, torch.tensor([3, slot]))
    assert torch.equal(pool, expected)


def test_rows_of_another_shape_or_dtype_are_refused() -> None:
    """The cpu backend says what it got and what it needs."""
    backend, pool = get_backend("cpu", torch.float32), make_pool()
    slots = torch.tensor([1])

    for key in (torch.zeros(1, 3, 8), torch.zeros(1, 2, 8, dtype=torch.bfloat16)):
        with pytest.raises(ValueError, match=r"must be \(1, 2, 8\) torch.float32"):
            backend.write_kv(pool, 0, key, key, slots)


@both
@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6), st.integers(0, 4)), max_size=8))
@settings(deadline=None)
def test_copies_run_one_after_the_other(
    name: BackendName, pairs: list[tuple[int, int, int]]
) -> None:
    """Chains, repeated targets and partial blocks end as if each pair ran alone, in order."""
    pool = make_pool()
    expected = pool.clone()
    for src, dst, num_slots in pairs:
        expected[dst, :, :, :, :num_slots] = expected[src, :, :, :, :num_slots].clone()

    get_backend(name, torch.float32).copy_blocks(pool, pairs)

    assert torch.equal(pool, expected)


@both
@pytest.mark.parametrize("pair", [(7, 0, 1), (0, -1, 1), (0, 1, 5), (0, 1, -1)])
def test_a_copy_outside_the_pool_copies_nothing(
    name: BackendName, pair: tuple[int, int, int]
) -> None:
    """An IndexError, and not even the pairs before it ran."""
    pool = make_pool()
    expected = pool.clone()

    with pytest.raises(IndexError, match="exceeds 7 blocks of 4 slots"):
        get_backend(name, torch.float32).copy_blocks(pool, [(1, 2, 4), pair])
    assert torch.equal(pool, expected)
