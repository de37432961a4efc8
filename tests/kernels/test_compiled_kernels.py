"""What the compiler makes of the Triton kernels for GPUs, without a GPU."""

import os
from typing import Any

import pytest

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("kernels that are interpreted cannot be compiled", allow_module_level=True)

import compiled_kernels
import triton
import triton.language as tl
from compiled_kernels import Resources, compile_config, load_budgets, narrow_block_arithmetic
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

if not (compiled_kernels.TOOLS / "cuobjdump").exists():
    pytest.skip("this triton brings no cuobjdump along", allow_module_level=True)

BUDGETS = load_budgets()
SHARED_LIMITS = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}


def exceeded(found: Resources, config: dict[str, Any]) -> list[str]:
    """What is over a budget, below a minimum, or missing."""
    complaints = [
        f"{getattr(found, what)} {what}, not at most {most}"
        for what, most in config["budget"].items()
        if getattr(found, what) > most
    ]
    complaints += [
        f"{getattr(found, what)} {what}, not at least {least}"
        for what, least in config["at_least"].items()
        if getattr(found, what) < least
    ]
    if "matrix" in config and not found.matrix.get(config["matrix"]):
        complaints.append(f"no {config['matrix']}, but {found.matrix}")
    return complaints


@pytest.mark.parametrize("name", BUDGETS)
def test_a_kernel_stays_in_its_budget(name: str) -> None:
    """Registers, spills, shared memory and length; 16-byte loads; matrix instructions; 64 bits."""
    config = BUDGETS[name]

    found = compile_config(config)

    assert exceeded(found, config) == []
    assert found.shared <= SHARED_LIMITS[config["arch"]]
    assert narrow_block_arithmetic(found.ttir) == []
    if config["kernel"].startswith("attend"):
        assert "%blocks_ptr" in found.ttir


def test_without_alignment_the_gate_fails() -> None:
    """The control: strides that may be anything lose every 16-byte load."""
    config = BUDGETS["decode, head 128, bf16"]

    found = compile_config(config, aligned=False)

    assert found.async_loads == 0
    assert any("async_loads" in complaint for complaint in exceeded(found, config))


@triton.jit  # type: ignore[untyped-decorator]
def _narrow_kernel(pool_ptr, blocks_ptr, out_ptr, stride: tl.int32):  # type: ignore[no-untyped-def]
    block = tl.load(blocks_ptr + tl.program_id(0))
    tl.store(out_ptr, tl.load(pool_ptr + block * stride))


def test_block_arithmetic_in_32_bits_is_found() -> None:
    """The control: a block id that is multiplied as it is."""
    source = ASTSource(
        fn=_narrow_kernel,
        signature={"pool_ptr": "*fp32", "blocks_ptr": "*i32", "out_ptr": "*fp32", "stride": "i32"},
    )

    compiled = triton.compile(
        source, target=GPUTarget("cuda", 90, 32), options={"enable_fp_fusion": True}
    )

    (line,) = narrow_block_arithmetic(compiled.asm["ttir"])
    assert "arith.muli" in line
    assert ": i32" in line
