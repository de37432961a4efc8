"""Triton's writes into slots and copies of blocks, and nothing beside them."""

import pytest
import torch
from general_plans import make_far_pool
from hypothesis import given, settings
from hypothesis import strategies as st
from interpreter_guard import guarded
from torch import Tensor

from prefixkv.kernels.triton_backend import TritonBackend
from prefixkv.kernels.triton_block_copy import copy_blocks, independent_batches
from prefixkv.kernels.triton_kv_write import write_slots

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
Pairs = list[tuple[int, int, int]]


def make_pool(dtype: torch.dtype = torch.float32, num_kv_heads: int = 3) -> Tensor:
    """7 blocks of 4 slots, 2 layers, kv heads of 24."""
    shape = (7, 2, 2, num_kv_heads, 4, 24)
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)


def by_token(pool: Tensor) -> Tensor:
    """The same data, each block's tokens before its heads."""
    return pool.transpose(3, 4).contiguous().transpose(3, 4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("contiguous", [True, False])
def test_a_write_touches_its_slots_only(
    backend: TritonBackend, dtype: torch.dtype, contiguous: bool
) -> None:
    """One layer's named slots hold the new K and V; every other byte is as before."""
    pool = make_pool(dtype) if contiguous else by_token(make_pool(dtype))
    expected = pool.clone()
    slots = torch.tensor([27, 5, 12, 0, 13])
    key, value = torch.randn(2, 5, 3, 24, generator=torch.Generator().manual_seed(1)).to(dtype)
    if not contiguous:
        key, value = key.transpose(0, 1).contiguous().transpose(0, 1), value.mT.contiguous().mT
    for token, slot in enumerate(slots.tolist()):
        expected[slot // 4, 1, 0, :, slot % 4] = key[token]
        expected[slot // 4, 1, 1, :, slot % 4] = value[token]

    with guarded(1, races=True):
        backend.write_kv(pool, 1, key, value, slots)

    assert torch.equal(pool, expected)


@pytest.mark.parametrize("slot", [-1, 28])
def test_a_slot_outside_the_pool_writes_nothing(backend: TritonBackend, slot: int) -> None:
    """An IndexError, and the pool is untouched; the kernel alone skips the slot."""
    pool = make_pool()
    expected = pool.clone()
    key, value = torch.randn(2, 2, 3, 24)

    with pytest.raises(IndexError, match="outside"):
        backend.write_kv(pool, 0, key, value, torch.tensor([3, slot]))
    assert torch.equal(pool, expected)

    write_slots(pool[:, 0], key, value, torch.tensor([3, slot]))
    expected[0, 0, 0, :, 3], expected[0, 0, 1, :, 3] = key[0], value[0]
    assert torch.equal(pool, expected)


def test_rows_of_another_shape_or_dtype_are_refused(backend: TritonBackend) -> None:
    """The backend says what it got and what it needs."""
    pool, slots = make_pool(), torch.tensor([1])

    for key in (torch.zeros(1, 2, 24), torch.zeros(1, 3, 24, dtype=torch.bfloat16)):
        with pytest.raises(ValueError, match=r"must be \(1, 3, 24\) torch.float32"):
            backend.write_kv(pool, 0, key, key, slots)


def test_writing_nothing_is_possible(backend: TritonBackend) -> None:
    """No tokens, no pairs and pairs of no slots change nothing."""
    pool = make_pool()
    expected = pool.clone()
    nothing = torch.zeros(0, 3, 24)

    backend.write_kv(pool, 0, nothing, nothing, torch.zeros(0, dtype=torch.int64))
    backend.copy_blocks(pool, [])
    backend.copy_blocks(pool, [(1, 2, 0), (3, 3, 4)])

    assert torch.equal(pool, expected)


def copy_one_by_one(pool: Tensor, pairs: Pairs) -> Tensor:
    """What the pool holds if each pair runs alone, in order."""
    expected = pool.clone()
    for src, dst, num_slots in pairs:
        expected[dst, :, :, :, :num_slots] = expected[src, :, :, :, :num_slots].clone()
    return expected


pairs_of = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6), st.integers(0, 4)), max_size=8)


@given(pairs_of, st.integers(0, 99))
@settings(deadline=None, max_examples=25)
def test_copies_run_one_after_the_other(pairs: Pairs, seed: int) -> None:
    """Chains, repeated targets and partial blocks end as if in order, in any order of programs."""
    pool = make_pool(torch.bfloat16, num_kv_heads=1)
    expected = copy_one_by_one(pool, pairs)

    with guarded(seed):
        copy_blocks(pool, pairs)

    assert torch.equal(pool, expected)


@given(pairs_of)
@settings(deadline=None)
def test_batches_are_independent_and_in_order(pairs: Pairs) -> None:
    """Within a batch nobody writes what another touches; batch after batch gives the whole."""
    batches = independent_batches(pairs)

    for batch in batches:
        targets = [dst for _, dst, _ in batch]
        assert len(set(targets)) == len(targets)
        assert not set(targets) & {src for src, _, _ in batch}
    pool = torch.arange(28).reshape(7, 1, 1, 1, 4, 1)
    in_batches = [pair for batch in batches for pair in batch]
    assert torch.equal(copy_one_by_one(pool, in_batches), copy_one_by_one(pool, pairs))


def test_unrelated_pairs_share_a_launch() -> None:
    """Readers of one block too; a chain of n waits n times."""
    assert independent_batches([(0, 1, 4), (0, 2, 4), (3, 4, 1)]) == [
        [(0, 1, 4), (0, 2, 4), (3, 4, 1)]
    ]
    chain = [(0, 1, 4), (1, 2, 4), (2, 3, 4)]
    assert independent_batches(chain) == [[pair] for pair in chain]


@pytest.mark.parametrize("layout", [Tensor.contiguous, by_token])
def test_copies_of_any_layout_race_with_nothing(layout: object) -> None:
    """A launch touches each address from one program only, beyond one program's share too."""
    assert callable(layout)
    pool = layout(torch.randn(4, 2, 2, 2, 64, 80, generator=torch.Generator().manual_seed(0)))
    pairs = [(0, 1, 64), (2, 3, 37)]
    expected = copy_one_by_one(pool, pairs)

    with guarded(3, races=True):
        copy_blocks(pool, pairs)

    assert torch.equal(pool, expected)


def test_offsets_beyond_int32() -> None:
    """Blocks 2^31 elements into the pool are written and copied."""
    pool = make_far_pool(make_pool())
    key, value = torch.randn(2, 1, 3, 24, generator=torch.Generator().manual_seed(1))

    write_slots(pool[:, 1], key, value, torch.tensor([4 * 4 + 3]))
    pairs = [(5, 0, 3), (1, 5, 4), (6, 2, 1)]
    copy_blocks(pool, pairs)

    expected = copy_one_by_one(make_pool(), pairs)
    expected[4, 1, 0, :, 3], expected[4, 1, 1, :, 3] = key[0], value[0]
    assert torch.equal(pool, expected)


@pytest.mark.parametrize("pair", [(7, 0, 1), (0, -1, 1), (0, 1, 5), (0, 1, -1)])
def test_a_copy_outside_the_pool_copies_nothing(
    backend: TritonBackend, pair: tuple[int, int, int]
) -> None:
    """An IndexError, and not even the pairs before it ran."""
    pool = make_pool()
    expected = pool.clone()

    with pytest.raises(IndexError, match="exceeds 7 blocks of 4 slots"):
        backend.copy_blocks(pool, [(1, 2, 4), pair])
    assert torch.equal(pool, expected)
