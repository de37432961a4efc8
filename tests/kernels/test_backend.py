"""Which backend serves what, and the arithmetic that they share."""

import numpy as np
import pytest
import torch

from prefixkv.kernels.backend import BackendName, get_backend
from prefixkv.kernels.jit import exp2, jit


@pytest.mark.parametrize(
    ("name", "dtype", "expected"),
    [
        ("auto", torch.float32, "cpu"),
        ("auto", torch.bfloat16, "cpu"),
        ("auto", torch.float16, "reference"),
        ("auto", torch.float64, "reference"),
        ("cpu", torch.float32, "cpu"),
        ("reference", torch.float32, "reference"),
    ],
)
def test_auto_takes_the_fastest_that_can(
    name: BackendName, dtype: torch.dtype, expected: str
) -> None:
    """The cpu backend for float32 and bfloat16, the reference for all else."""
    assert get_backend(name, dtype).name == expected


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_cpu_refuses_other_dtypes(dtype: torch.dtype) -> None:
    """A ValueError names the dtype and the way out."""
    with pytest.raises(ValueError, match=f"not {dtype}; use 'reference'"):
        get_backend("cpu", dtype)


def test_an_unknown_backend_is_refused() -> None:
    """A ValueError names the ones that there are."""
    with pytest.raises(ValueError, match="none of 'auto'"):
        get_backend("gpu", torch.float32)  # type: ignore[arg-type]


def test_what_cannot_be_served_has_a_reason() -> None:
    """None for sizes that work, a sentence for those that don't."""
    cpu, reference = get_backend("cpu", torch.float32), get_backend("reference", torch.float32)

    assert cpu.supports(torch.bfloat16, 64, 9, 3) is None
    assert reference.supports(torch.float64, 5, 9, 3) is None
    assert "float64" in (cpu.supports(torch.float64, 64, 9, 3) or "")
    assert "multiple of 8, not 60" in (cpu.supports(torch.float32, 60, 9, 3) or "")
    for backend in (cpu, reference):
        assert "9 query heads" in (backend.supports(torch.float32, 64, 9, 4) or "")
    assert "int8" in (reference.supports(torch.int8, 64, 9, 3) or "")


@pytest.mark.parametrize(("block_size", "chunk"), [(16, 256), (64, 256), (48, 288)])
def test_a_backend_says_how_its_plans_are_cut(block_size: int, chunk: int) -> None:
    """The cpu backend wants fixed chunks of whole blocks; the reference does not care."""
    cpu, reference = get_backend("cpu", torch.float32), get_backend("reference", torch.float32)
    options = cpu.plan_options(torch.bfloat16, 64, 9, 3, block_size)

    assert options is not None
    assert (options.chunk_tokens, options.fixed_chunks) == (chunk, True)
    assert options.token_bytes == 2 * 3 * 64 * 2
    assert options.partial_bytes == 9 * (64 + 2) * 4 * 2
    assert reference.plan_options(torch.float32, 64, 9, 3, block_size) is None


@jit()
def _exp2_all(x: np.ndarray, out: np.ndarray) -> None:
    for i in range(len(x)):
        out[i] = exp2(x[i])


def test_exp2_is_accurate_to_float32() -> None:
    """Relative error below 1e-6 over all finite weights; NaN stays NaN."""
    x = np.append(np.linspace(-126, 0, 100_003, dtype=np.float32), np.float32(np.nan))
    found = np.empty_like(x)

    _exp2_all(x, found)

    expected = np.exp2(x.astype(np.float64))
    assert np.abs(found[:-1] / expected[:-1] - 1).max() < 1e-6
    assert np.isnan(found[-1])
    assert found[-2] == 1.0
