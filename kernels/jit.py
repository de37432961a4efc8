"""What every numba kernel of the CPU backend is compiled with.

Kernels see the pool as numpy does: float32 as it is, bfloat16 as its bits in uint16, which numba
has no type for. `as_float32` reads both, so one kernel text serves both.

numba's cache on disk looks at a kernel's own file only: after a change to this file, or to the
columns of a plan, remove `__pycache__/*.nb?` beside the kernels.
"""

import os
from collections.abc import Callable
from typing import Any, TypeVar, cast

# gomp's threads start a parallel loop faster than numba's own pool; decided before numba loads one
os.environ.setdefault("NUMBA_THREADING_LAYER", "omp")

import numba
import numpy as np
from llvmlite import ir
from numba.extending import intrinsic
from numpy.typing import NDArray

# float32, or bfloat16 as its bits
Bits = NDArray[np.float32] | NDArray[np.uint16]
Kernel = TypeVar("Kernel", bound=Callable[..., Any])

# everything that lets sums be vectorised, but NaN and infinity keep their meaning
FAST_MATH = frozenset({"reassoc", "contract", "nsz", "arcp"})


def jit(**options: Any) -> Callable[[Kernel], Kernel]:
    """Compile for the argument types at the first call; cached beside the source file."""
    decorate = numba.njit(cache=True, fastmath=set(FAST_MATH), error_model="numpy", **options)
    return cast(Callable[[Kernel], Kernel], decorate)


def _emit_as_float32(_context: Any, builder: Any, signature: Any, args: Any) -> Any:
    source, value = signature.args[0], args[0]
    if source == numba.types.uint16:
        widened = builder.zext(value, ir.IntType(32))
        value = builder.shl(widened, ir.Constant(ir.IntType(32), 16))
    return value if source == numba.types.float32 else builder.bitcast(value, ir.FloatType())


def _type_as_float32(_typing_context: Any, source: Any) -> Any:
    if source not in (numba.types.float32, numba.types.uint16, numba.types.int32):
        return None
    return numba.types.float32(source), _emit_as_float32


# float32 unchanged; uint16 as the bits of a bfloat16; int32 as the bits of a float32
as_float32 = cast(Callable[[Any], np.float32], intrinsic(_type_as_float32))


@jit(inline="always")
def exp2(x: np.float32) -> np.float32:
    """2 ** x to 2e-7 relative, in code that vectorises; below -126 it is 2 ** -126, never 0."""
    clamped = np.float32(-126.0) if x < np.float32(-126.0) else x
    whole = np.floor(clamped + np.float32(0.5))
    part = clamped - whole  # [-0.5, 0.5]
    power = np.float32(1.535336188319500e-4)
    power = power * part + np.float32(1.339887440266574e-3)
    power = power * part + np.float32(9.618437357674640e-3)
    power = power * part + np.float32(5.550332471162809e-2)
    power = power * part + np.float32(2.402264791363012e-1)
    power = power * part + np.float32(6.931472028550421e-1)
    power = power * part + np.float32(1.0)
    exponent_bits = np.int32((np.int32(whole) + 127) << 23)
    return np.float32(power * as_float32(exponent_bits))
