"""Compiles the Triton kernels for GPUs that are not there, and reads what came out.

    python -P tests/doubles/compiled_kernels.py      # a table, a line a configuration

Triton brings ptxas, cuobjdump and nvdisasm along. What this shows is what the compiler decided,
not how fast anything is.
"""

import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from prefixkv.kernels.triton_attention import attend_kernel
from prefixkv.kernels.triton_block_copy import COPIED_ELEMENTS, copy_kernel
from prefixkv.kernels.triton_kv_write import write_kernel
from prefixkv.kernels.triton_merge import merge_kernel
from prefixkv.kernels.triton_tiles import choose_tiles

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
BUDGETS = Path(__file__).parent.parent / "kernels" / "kernel_budgets.toml"
NUM_KV_HEADS = 8
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
FLOATS = ("acc_ptr", "peak_ptr", "total_ptr")
INT32 = (
    "work_ptr", "rows_ptr", "positions_ptr", "blocks_ptr", "tokens_ptr", "indptr_ptr", "pairs_ptr",
)  # fmt: skip
INT64_STRIDES = ("block", "layer", "kv", "head", "slot", "key_token", "value_token")


@dataclass(frozen=True, slots=True)
class Resources:
    """What one compiled kernel takes.

    Attributes:
        registers: of a thread.
        spills: bytes of a thread on the stack, for want of registers.
        shared: bytes of shared memory of a program.
        async_loads: LDGSTS of 16 bytes, from global to shared memory without a register.
        wide_loads, wide_stores: LDG and STG of 16 bytes.
        matrix: matrix instructions by name: HMMA, HGMMA (sm_90), UTCHMMA (sm_100).
        instructions: of the whole kernel.
        per_token: instructions by tokens of a tile, 0 for kernels without tiles.
        ttir: Triton's first intermediate form.
    """

    registers: int
    spills: int
    shared: int
    async_loads: int
    wide_loads: int
    wide_stores: int
    matrix: Mapping[str, int]
    instructions: int
    per_token: float
    ttir: str


def load_budgets() -> dict[str, dict[str, Any]]:
    """Configurations and what each may take, by name."""
    configs: dict[str, dict[str, Any]] = tomllib.loads(BUDGETS.read_text())
    return configs


def compile_config(config: Mapping[str, Any], *, aligned: bool = True) -> Resources:
    """Compile one configuration of the budgets.

    Args:
        aligned: whether the compiler may take pointers and strides as multiples of 16, as it may
            at run time for tensors that are.
    """
    function, constants, options = _variant(config)
    types = {name: _type(name, config["dtype"], function) for name in function.arg_names}
    signature = {name: "constexpr" if name in constants else types[name] for name in types}
    hints = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(function.arg_names)
        if aligned and (name.endswith("_ptr") or name.startswith("stride_"))
    }
    source = ASTSource(fn=function, signature=signature, constexprs=constants, attrs=hints)
    target = GPUTarget("cuda", config["arch"], 32)
    compiled = triton.compile(source, target=target, options={**options, "enable_fp_fusion": True})
    return _read(compiled, constants.get("BLOCK_N", 0))


def _variant(config: Mapping[str, Any]) -> tuple[Any, dict[str, Any], dict[str, int]]:
    """The kernel of a configuration, its constants, and options of the compiler."""
    head_dim, block_size = config["head_dim"], config.get("block_size", 16)
    heads: dict[str, Any] = {"HEAD_DIM": head_dim, "BLOCK_D": triton.next_power_of_2(head_dim)}
    if config["kernel"] == "merge":
        return merge_kernel, {"NUM_HEADS": 32, **heads}, {"num_warps": 1}
    heads["NUM_KV_HEADS"] = NUM_KV_HEADS
    if config["kernel"] == "copy":
        heads["BLOCK_S"] = min(block_size, COPIED_ELEMENTS // heads["BLOCK_D"])
        return copy_kernel, heads, {"num_warps": 4}
    heads["BLOCK_SIZE"] = block_size
    if config["kernel"] == "write":
        return write_kernel, {**heads, "BLOCK_H": NUM_KV_HEADS}, {"num_warps": 4}
    tiles = choose_tiles(DTYPES[config["dtype"]], head_dim, config["group"])
    tile = tiles[config["kernel"] == "attend many rows"]
    constants = {
        **heads,
        "GROUP": config["group"],
        "BLOCK_M": tile.rows,
        "BLOCK_N": tile.tokens,
        "HAS_WINDOW": config.get("window", False),
        "HAS_CAP": config.get("softcap", False),
    }
    return attend_kernel, constants, {"num_warps": tile.num_warps, "num_stages": tile.num_stages}


def _type(name: str, dtype: str, function: Any) -> str:
    if name in FLOATS:
        return "*fp32"
    if name in INT32:
        return "*i32"
    if name == "slots_ptr":
        return "*i32" if function is merge_kernel else "*i64"
    if name.endswith("_ptr"):
        return f"*{dtype}"
    if name.startswith("score_"):
        return "fp32"
    if name.startswith("stride_"):
        return "i64" if name.removeprefix("stride_") in INT64_STRIDES else "i32"
    return "i32"


def _read(compiled: Any, tile_tokens: int) -> Resources:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = _run("cuobjdump", "--dump-resource-usage", file.name)
        sass = _run("nvdisasm", "-c", file.name)
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found is not None, usage
    instructions = len(re.findall(r"^\s+/\*[0-9a-f]{4,}\*/", sass, re.MULTILINE))
    matrix: dict[str, int] = {}
    for name in re.findall(r"\b(HMMA|HGMMA|UTC\w*MMA)\b", sass):
        matrix[name] = matrix.get(name, 0) + 1
    return Resources(
        registers=int(found[1]),
        spills=int(found[2]),
        shared=compiled.metadata.shared,
        async_loads=len(re.findall(r"LDGSTS\.E[.\w]*\.128", sass)),
        wide_loads=len(re.findall(r"LDG\.E[.\w]*\.128", sass)),
        wide_stores=len(re.findall(r"STG\.E[.\w]*\.128", sass)),
        matrix=matrix,
        instructions=instructions,
        per_token=instructions / tile_tokens if tile_tokens else 0.0,
        ttir=compiled.asm["ttir"],
    )


def _run(tool: str, *arguments: str) -> str:
    command = [str(TOOLS / tool), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def narrow_block_arithmetic(ttir: str) -> list[str]:
    """Lines that compute with a block id before it is widened to 64 bits.

    Follows what is loaded through `blocks_ptr` from definition to use.
    """
    followed, found = {"%blocks_ptr"}, []
    for line in ttir.splitlines():
        definition = re.match(r"\s*(%[\w#]+)(?::\d+)? = ([\w.]+) (.*)", line)
        if definition is None:
            continue
        result, operation, rest = definition.groups()
        if not followed & set(re.findall(r"%[\w#]+", rest)):
            continue
        if operation.startswith("tt."):
            followed.add(result)
        elif operation != "arith.extsi":
            found.append(line.strip())
    return found


def main() -> int:
    """Print a line for each configuration."""
    print(f"triton {triton.__version__}")  # noqa: T201
    print(  # noqa: T201
        f"{'configuration':<34} sm  regs spill   smem async16 ld16 st16 matrix        instr  /token"
    )
    for name, config in load_budgets().items():
        found = compile_config(config)
        matrix = ", ".join(f"{count} {kind}" for kind, count in found.matrix.items()) or "-"
        print(  # noqa: T201
            f"{name:<34} {config['arch']:<3} {found.registers:>4} {found.spills:>5} "
            f"{found.shared:>6} {found.async_loads:>7} {found.wide_loads:>4} "
            f"{found.wide_stores:>4} {matrix:<12} {found.instructions:>6} {found.per_token:>7.1f}",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
