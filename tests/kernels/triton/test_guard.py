"""The guard notices what it is there to notice: without this, green tests would mean little."""

import pytest
import torch
import triton
import triton.language as tl
from interpreter_guard import guarded
from triton.runtime.errors import InterpreterError


@triton.jit
def add_kernel(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < n)
    y = tl.load(y_ptr + i, mask=i < n)
    tl.store(out_ptr + i, x + y, mask=i < n)


@triton.jit
def dot_kernel(a_ptr, b_ptr, out_ptr, N: tl.constexpr):
    i = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    product = tl.dot(tl.load(a_ptr + i), tl.load(b_ptr + i))
    tl.store(out_ptr + i, product.to(out_ptr.dtype.element_ty))


@triton.jit
def stray_kernel(x_ptr, out_ptr, offset):
    i = tl.arange(0, 16)
    tl.store(out_ptr + i, tl.load(x_ptr + offset + i))


@triton.jit
def multiply_kernel(x_ptr, out_ptr, factor):
    i = tl.arange(0, 4)
    tl.store(out_ptr + i, tl.load(x_ptr + i) * factor)


@triton.jit
def rank_kernel(counter_ptr, ranks_ptr):
    rank = tl.load(counter_ptr)
    tl.store(ranks_ptr + tl.program_id(0), rank)
    tl.store(counter_ptr, rank + 1)


@triton.jit
def same_place_kernel(out_ptr):
    tl.store(out_ptr, tl.program_id(0))


def test_bfloat16_products_are_those_of_the_numbers() -> None:
    """A dot and its cast to bfloat16 equal float32 arithmetic, rounded to nearest."""
    a, b = torch.randn(2, 16, 16, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    out = torch.empty(16, 16, dtype=torch.bfloat16)

    dot_kernel[(1,)](a, b, out, N=16)

    torch.testing.assert_close(out, (a.float() @ b.float()).to(torch.bfloat16), rtol=0.01, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_are_rounded_once(dtype: torch.dtype) -> None:
    """Addition is bit for bit that of torch."""
    x, y = torch.randn(2, 37, generator=torch.Generator().manual_seed(1)).to(dtype)
    out = torch.empty(37, dtype=dtype)

    add_kernel[(3,)](x, y, out, 37, BLOCK=16)

    assert torch.equal(out, x + y)


@pytest.mark.parametrize("short", [0, 1, 2])
def test_a_lane_outside_its_tensor_raises(short: int) -> None:
    """Reads and writes one element past the end of a storage are errors."""
    tensors = [torch.zeros(20 - (i == short)) for i in range(3)]

    with pytest.raises(InterpreterError, match="1 of 4 lanes out of bounds"):
        add_kernel[(2,)](*tensors, 20, BLOCK=16)


def test_a_lane_in_another_argument_raises() -> None:
    """Also where it lies in the storage of its own: K and V are two views of one pool."""
    pool = torch.zeros(3, 20)

    with pytest.raises(InterpreterError, match="load: 4 of 4 lanes out of bounds"):
        add_kernel[(2,)](pool[0, :16], pool[1], pool[2], 20, BLOCK=16)
    with pytest.raises(InterpreterError, match="store: 4 of 4 lanes out of bounds"):
        add_kernel[(2,)](pool[0], pool[1], pool[2, :16], 20, BLOCK=16)
    with pytest.raises(InterpreterError, match="load: 16 of 16 lanes out of bounds"):
        stray_kernel[(1,)](pool[0], pool[2], 20)


def test_int32_that_overflows_raises() -> None:
    """Instead of wrapping to a negative offset."""
    x = torch.full((4,), 2**16, dtype=torch.int32)
    out = torch.empty_like(x)
    multiply_kernel[(1,)](x, out, 2**14)

    with pytest.raises(InterpreterError, match="int32 multiply gives 2147483648"):
        multiply_kernel[(1,)](x, out, 2**15)


def test_programs_run_in_another_order() -> None:
    """Each runs once; which one is first depends on the seed."""
    orders = []
    for seed in (1, 2):
        counter, ranks = torch.zeros(1, dtype=torch.int32), torch.empty(9, dtype=torch.int32)
        with guarded(seed):
            rank_kernel[(9,)](counter, ranks)
        orders.append(ranks.tolist())

    assert sorted(orders[0]) == sorted(orders[1]) == list(range(9))
    assert orders[0] != orders[1]


def test_dependence_between_programs_raises() -> None:
    """One address that two programs write, or one writes and another reads."""
    counter, ranks = torch.zeros(1, dtype=torch.int32), torch.empty(2, dtype=torch.int32)
    with guarded(1, races=True):
        with pytest.raises(InterpreterError, match="reads what another one writes"):
            rank_kernel[(2,)](counter, ranks)
        with pytest.raises(InterpreterError, match="two programs write"):
            same_place_kernel[(2,)](counter)
