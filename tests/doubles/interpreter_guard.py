"""Makes Triton's interpreter stricter than a GPU, and exact where it is not.

As it is, the interpreter multiplies the bit patterns of bfloat16, truncates what it casts to it,
reads and writes whatever an address happens to point to, wraps int32 without a word, and runs
programs in order. Here the upper 16 bits of an address, which no address of a process needs, say
which argument it was computed from. What it still does not show: races inside a program, limits of
shared memory, the number of warps and stages, fused multiply-adds, fast exponentials; no atomics.

Source: read in triton 3.9's runtime/interpreter.py; the names used here are also those of 3.6.
"""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

Handle = Any  # interpreter.TensorHandle, untyped
Builder = interpreter.InterpreterBuilder
BFLOAT16 = tl.bfloat16
ADDRESS_BITS = np.uint64(48)
ADDRESS = np.uint64(2**48 - 1)


@contextmanager
def guarded(seed: int, *, races: bool = False) -> Iterator[None]:
    """Within it, kernels run under the guard, programs in an order that `seed` shuffles.

    Args:
        races: also watch what each program touches: slow, for small tensors.

    Raises:
        InterpreterError: (from the launch, naming it)
            IndexError for a lane outside the tensor whose pointer its address was computed from,
            OverflowError for int32 arithmetic that leaves its range, and RuntimeError for what
            depends on the order of programs: an address that two of them write, or that one writes
            and another reads. NotImplementedError for atomics.
    """
    guard = _Guard(seed, races)
    replaced: dict[str, Callable[..., Any]] = {
        "create_dot": _exact_dot,
        "create_fp_to_fp": _exact_float_cast,
        "cast_impl": _exact_cast,
        "binary_op": _checked_binary,
        "create_masked_load": guard.load,
        "create_masked_store": guard.store,
        "create_atomic_cas": _no_atomics,
        "create_atomic_rmw": _no_atomics,
        "set_grid_dim": guard.set_grid_dim,
        "set_grid_idx": guard.set_grid_idx,
    }
    builder: dict[str, Any] = {name: _as_method(new) for name, new in replaced.items()}
    executor: dict[str, Any] = {
        "_init_args_hst": _as_method(guard.begin_launch),
        "_restore_args_dev": _as_method(lambda *_: None),  # tensors of the CPU are not copied
    }
    with (
        patch.multiple(Builder, **builder),
        patch.multiple(interpreter.GridExecutor, **executor),
        patch.object(interpreter, "_implicit_cvt", guard.note_argument),
    ):
        yield


def _as_method(function: Callable[..., Any]) -> Callable[..., Any]:
    """A plain function, so that the class passes its instance first."""

    def method(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return method


_binary, _cast, _float_cast = Builder.binary_op, Builder.cast_impl, Builder.create_fp_to_fp
_load, _store = Builder.create_masked_load, Builder.create_masked_store
_set_grid_dim, _set_grid_idx = Builder.set_grid_dim, Builder.set_grid_idx
_begin_launch, _note_argument = interpreter.GridExecutor._init_args_hst, interpreter._implicit_cvt


def _floats(handle: Handle) -> Any:
    """The values of a handle; those of bfloat16 as float32."""
    if handle.dtype.scalar != BFLOAT16:
        return handle.data
    bits = torch.from_numpy(np.ascontiguousarray(handle.data).view(np.int16))
    return bits.view(torch.bfloat16).float().numpy()


def _rounded(values: Any) -> Handle:
    """A handle of bfloat16, rounded to nearest, ties to even."""
    exact = torch.from_numpy(np.array(values, np.float32)).to(torch.bfloat16)
    return interpreter.TensorHandle(exact.view(torch.int16).numpy().view(np.uint16), BFLOAT16)


def _exact_dot(
    builder: Any, a: Handle, b: Handle, d: Handle, precision: Any, imprecise: Any
) -> Handle:
    # in float64, for BLAS's float32 sums depend on where in a tile a row lies; no GPU's do
    product = np.matmul(_floats(a).astype(np.float64), _floats(b).astype(np.float64))
    return interpreter.TensorHandle(product.astype(np.float32) + d.data, d.dtype.scalar)


def _exact_cast(builder: Any, source: Handle, target: Any) -> Handle:
    kinds = source.dtype.scalar, target.scalar
    if kinds == (BFLOAT16, BFLOAT16) or BFLOAT16 not in kinds:
        return _cast(builder, source, target)
    if target.scalar == BFLOAT16:
        return _rounded(source.data)
    numbers = _floats(source).astype(interpreter._get_np_dtype(target))
    return interpreter.TensorHandle(numbers, target.scalar)


def _exact_float_cast(builder: Any, source: Handle, target: Any, rounding: Any) -> Handle:
    if BFLOAT16 in (source.dtype.scalar, target.scalar):
        return _exact_cast(builder, source, target)
    return _float_cast(builder, source, target, rounding)


def _checked_binary(builder: Any, a: Handle, b: Handle, op: Any) -> Handle:
    kind = a.dtype.scalar
    if kind == BFLOAT16:
        result = op(_floats(a), _floats(b))
        return interpreter.TensorHandle(result, kind) if result.dtype == bool else _rounded(result)
    if kind == tl.int32 and op in (np.add, np.subtract, np.multiply):
        wide = op(a.data.astype(np.int64), b.data.astype(np.int64))
        if wide.size and not -(2**31) <= wide.min() <= wide.max() < 2**31:
            raise OverflowError(f"int32 {op.__name__} gives {wide.min()} to {wide.max()}")
    return _binary(builder, a, b, op)


def _no_atomics(*_: Any) -> Any:
    raise NotImplementedError("the guard does not watch atomics")


class _Guard:
    """What a launch may touch, what its programs did touch, and their order."""

    def __init__(self, seed: int, races: bool) -> None:
        self.random = random.Random(seed)
        self.watches_races = races
        self.spans: list[tuple[int, int]] = []  # addresses [begin, end) of the tensors, in order
        self.bounds: Any = None  # these as arrays, from the first access on
        self.order: list[int] = []
        self.shape = (1, 1, 1)
        self.program = 0
        self.reads: dict[int, int] = {}  # address -> a program that read it
        self.writes: dict[int, int] = {}

    def begin_launch(self, executor: Any, args: Any, kwargs: Any) -> Any:
        """Forget the tensors of the launch before."""
        self.spans.clear()
        self.bounds = None
        return _begin_launch(executor, args, kwargs)

    def note_argument(self, arg: Any) -> Any:
        """A tensor may be touched from its first element to its last; its pointer is marked."""
        converted = _note_argument(arg)
        if isinstance(arg, torch.Tensor):
            last = sum((n - 1) * stride for n, stride in zip(arg.shape, arg.stride(), strict=True))
            length = (last + 1) * arg.element_size() if arg.numel() else 0
            handle = converted.handle
            handle.data = handle.data | np.uint64(len(self.spans)) << ADDRESS_BITS
            self.spans.append((arg.data_ptr(), arg.data_ptr() + length))
        return converted

    def set_grid_dim(self, builder: Any, x: int, y: int, z: int) -> None:
        """A launch begins: nothing is touched, all programs are to come."""
        self.shape = x, y, z
        self.order = list(range(x * y * z))
        self.random.shuffle(self.order)
        self.reads.clear()
        self.writes.clear()
        _set_grid_dim(builder, x, y, z)

    def set_grid_idx(self, builder: Any, x: int, y: int, z: int) -> None:
        """Run another program than the one whose turn it is."""
        _, size_y, size_z = self.shape
        self.program = self.order[(x * size_y + y) * size_z + z]
        rest, z = divmod(self.program, size_z)
        _set_grid_idx(builder, *divmod(rest, size_y), z)

    def load(self, builder: Any, pointers: Handle, mask: Handle, *rest: Any) -> Handle:
        """Load, if all lanes that the mask lets through lie in their tensor."""
        pointers, addresses = self._checked(pointers, mask, "load")
        if self.watches_races:
            for address in addresses.tolist():
                if self.writes.get(address, self.program) != self.program:
                    raise RuntimeError("a program reads what another one writes")
                self.reads[address] = self.program
        return _load(builder, pointers, mask, *rest)

    def store(self, builder: Any, pointers: Handle, value: Handle, mask: Handle, *rest: Any) -> Any:
        """Store, if all lanes that the mask lets through lie in their tensor."""
        pointers, addresses = self._checked(pointers, mask, "store")
        if self.watches_races:
            for address in addresses.tolist():
                if self.reads.get(address, self.program) != self.program:
                    raise RuntimeError("a program writes what another one reads")
                if self.writes.get(address, self.program) != self.program:
                    raise RuntimeError("two programs write to one address")
                self.writes[address] = self.program
        return _store(builder, pointers, value, mask, *rest)

    def _checked(self, pointers: Handle, mask: Handle, what: str) -> tuple[Handle, Any]:
        """The pointers without their marks, and the addresses that the mask lets through."""
        lanes = np.broadcast_to(mask.data, pointers.data.shape).astype(bool)
        marked = pointers.data[lanes].astype(np.uint64).reshape(-1)
        addresses, argument = marked & ADDRESS, (marked >> ADDRESS_BITS).astype(np.int64)
        if self.bounds is None:
            self.bounds = np.array(self.spans, np.uint64).T
        begins, ends = self.bounds
        known = np.minimum(argument, len(begins) - 1)
        width = np.uint64(max(1, pointers.get_element_ty().primitive_bitwidth // 8))
        outside = (argument != known) | (addresses < begins[known])
        outside |= addresses + width > ends[known]
        if outside.any():
            raise IndexError(
                f"{what}: {int(outside.sum())} of {outside.size} lanes out of bounds in program "
                f"{self.program}"
            )
        return interpreter.TensorHandle(pointers.data & ADDRESS, pointers.dtype), addresses
