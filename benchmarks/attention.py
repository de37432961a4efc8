"""Attention of one layer on the CPU, beside gather + SDPA and the speed of memory itself.

    python -P benchmarks/attention.py [--threads N] [--repeats N]

Candidates run in turn, and the best time of each counts: the machine may be shared. With one
thread it is CPU time, which other processes disturb less; else wall time. "read" is summing as many
bytes as the K and V that one layer's decode reads. "shared" decodes sequences with a common
beginning, 30 layers in turn, as a step does: so K and V come from memory, not from a cache.
"""

import argparse
import time
from collections.abc import Callable
from functools import partial

import numba
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from prefixkv.kernels.backend import get_backend
from prefixkv.kernels.jit import jit
from prefixkv.kernels.plan import Plan, build_plan
from prefixkv.kernels.plan_options import PlanOptions
from prefixkv.kernels.planner import build_plans

BLOCK_SIZE = 16
DECODE = [(8, 1024, 9, 3, 64), (8, 4096, 9, 3, 64), (8, 1024, 32, 8, 128)]
PREFILL = [(1, 1024, 9, 3, 64), (1, 1024, 32, 8, 128)]
# the tokens in common come first
SHARED = [
    (0, 1, 544, 9, 3, 64),
    (0, 8, 544, 9, 3, 64),
    (512, 8, 544, 9, 3, 64),
    (2048, 8, 2176, 9, 3, 64),
    (0, 8, 2176, 9, 3, 64),
]
CHUNKS = [256, 512]
NUM_LAYERS = 30
Case = tuple[int, int, int, int, int]
SharedCase = tuple[int, int, int, int, int, int]


@jit(parallel=True)
def read_stream(values: NDArray[np.float32], sums: NDArray[np.float32]) -> None:
    """Sum equal parts of `values`, one for each element of `sums`."""
    part = len(values) // len(sums)
    for i in numba.prange(len(sums)):
        total = np.float32(0.0)
        for j in range(i * part, (i + 1) * part):
            total += values[j]
        sums[i] = total


def best_ms(candidates: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """The shortest time of each candidate in milliseconds, after one warm-up, run in turn."""
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for run in candidates.values():
        run()
    for _ in range(repeats):
        for name, run in candidates.items():
            start = clock()
            run()
            times[name].append(clock() - start)
    return {name: 1e3 * min(values) for name, values in times.items()}


def make_pool(case: Case, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A random 2-layer pool and the block tables [batch, blocks] of `case`, shuffled."""
    batch, context, _, num_kv_heads, head_dim = case
    num_blocks = batch * context // BLOCK_SIZE
    pool = torch.randn(num_blocks, 2, 2, num_kv_heads, BLOCK_SIZE, head_dim).to(dtype)
    return pool, torch.randperm(num_blocks).to(torch.int32).view(batch, -1)


def gather_and_sdpa(pool: Tensor, tables: Tensor, query: Tensor) -> Tensor:
    """Decode as plain torch does it: copy each sequence's K and V together, then attend."""
    run = pool[tables, 1].permute(2, 0, 3, 1, 4, 5).flatten(3, 4)
    return scaled_dot_product_attention(query[:, :, None], run[0], run[1], enable_gqa=True)


def bench_decode(case: Case, dtype: torch.dtype, repeats: int) -> str:
    """One table line for decoding one token per sequence."""
    batch, context, num_heads, num_kv_heads, head_dim = case
    pool, tables = make_pool(case, dtype)
    query = torch.randn(batch, num_heads, head_dim).to(dtype)
    plan = build_plan(list(tables.numpy()), [1] * batch, [context] * batch, BLOCK_SIZE)
    backend, scale = get_backend("cpu", dtype), head_dim**-0.5
    num_bytes = 2 * batch * context * num_kv_heads * head_dim * dtype.itemsize
    stream, sums = np.ones(num_bytes // 4, np.float32), np.empty(64, np.float32)
    ms = best_ms(
        {
            "cpu": lambda: backend.attend(pool, 1, query, plan, scale),
            "gather": lambda: gather_and_sdpa(pool, tables, query),
            "read": lambda: read_stream(stream, sums),
        },
        repeats,
    )
    return (
        f"decode  {_name(case, dtype)} {num_bytes / 2**20:6.1f} MiB  cpu {ms['cpu']:7.2f} ms  "
        f"gather+sdpa {ms['gather']:7.2f} ms  read {ms['read']:6.2f} ms "
        f"{num_bytes / ms['read'] / 1e6:5.1f} GB/s  cpu is {ms['read'] / ms['cpu']:4.0%} of it"
    )


def bench_prefill(case: Case, dtype: torch.dtype, repeats: int) -> str:
    """One table line for computing whole prompts at once."""
    batch, context, num_heads, num_kv_heads, head_dim = case
    pool, tables = make_pool(case, dtype)
    query = torch.randn(batch * context, num_heads, head_dim).to(dtype)
    plan = build_plan(list(tables.numpy()), [context] * batch, [context] * batch, BLOCK_SIZE)
    backend, scale = get_backend("cpu", dtype), head_dim**-0.5
    dense = torch.randn(2, batch, num_kv_heads, context, head_dim).to(dtype)
    heads = query.view(batch, context, num_heads, head_dim).transpose(1, 2)
    ms = best_ms(
        {
            "cpu": lambda: backend.attend(pool, 1, query, plan, scale),
            "sdpa": lambda: scaled_dot_product_attention(
                heads, dense[0], dense[1], is_causal=True, enable_gqa=True
            ),
        },
        repeats,
    )
    return (
        f"prefill {_name(case, dtype)}             cpu {ms['cpu']:7.2f} ms  "
        f"causal sdpa, K and V contiguous {ms['sdpa']:7.2f} ms"
    )


def bench_shared(case: SharedCase, dtype: torch.dtype, repeats: int) -> str:
    """One table line for decoding sequences with a common beginning, by several plans."""
    common, batch, context, num_heads, num_kv_heads, head_dim = case
    num_common, num_own = common // BLOCK_SIZE, (context - common) // BLOCK_SIZE
    num_blocks = num_common + batch * num_own
    pool = torch.randn(num_blocks, NUM_LAYERS, 2, num_kv_heads, BLOCK_SIZE, head_dim).to(dtype)
    ids = torch.randperm(num_blocks).to(torch.int32)
    own = ids[num_common:].view(batch, num_own)
    tables = [torch.cat((ids[:num_common], rest)).numpy() for rest in own]
    lengths = ([1] * batch, [context] * batch, BLOCK_SIZE)
    plans = {"plain": build_plan(tables, *lengths)}
    for chunk in (None, *CHUNKS):
        for share in (False, True):
            options = PlanOptions.for_heads(
                num_heads, num_kv_heads, head_dim, dtype.itemsize,
                tile_rows=15, chunk_tokens=chunk, fixed_chunks=chunk is not None, share=share,
            )  # fmt: skip
            if chunk or share:
                name = f"{'grouped' if share else 'alone'} {chunk or ''}"
                plans[name] = build_plans(tables, *lengths, [None], options)[None]
    query = torch.randn(batch, num_heads, head_dim).to(dtype)
    backend = get_backend("cpu", dtype)

    def attend_all(plan: Plan) -> None:
        for layer in range(NUM_LAYERS):
            backend.attend(pool, layer, query, plan, head_dim**-0.5)

    ms = best_ms({name: partial(attend_all, plan) for name, plan in plans.items()}, repeats)
    times = "  ".join(f"{name} {value / NUM_LAYERS:.3f}" for name, value in ms.items())
    return f"shared  {common:4} of {_name(case[1:], dtype)} {times}"


def _name(case: Case, dtype: torch.dtype) -> str:
    batch, context, num_heads, num_kv_heads, head_dim = case
    return f"{batch} x {context} {num_heads:2}/{num_kv_heads}/{head_dim:<3} {str(dtype)[6:]:8}"


def main() -> None:
    """Print one line per case and dtype."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--only", choices=("decode", "prefill", "shared"))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    numba.set_num_threads(options.threads)
    torch.manual_seed(0)
    print(f"ms per layer, block size {BLOCK_SIZE}, {options.threads} threads")
    for dtype in (torch.float32, torch.bfloat16):
        lines = {
            "decode": (bench_decode(case, dtype, options.repeats) for case in DECODE),
            "prefill": (bench_prefill(case, dtype, options.repeats) for case in PREFILL),
            "shared": (bench_shared(case, dtype, options.repeats) for case in SHARED),
        }
        for name in [options.only] if options.only else lines:
            for line in lines[name]:
                print(line, flush=True)


if __name__ == "__main__":
    main()
