"""The time to plan a step, for batches that share and batches that do not.

    python -P benchmarks/plan.py [--repeats N]

Prints the median and the best of the process's CPU time: the machine may be shared. Sizes are
32/8/128 in bfloat16, blocks of 16 tokens, chunks of 1,024, one query token per sequence; the block
tables are `array("i")`, as the engine's. "plain" is `build_plan`, one run per sequence.
"""

import argparse
import statistics
import time
from array import array
from collections.abc import Callable

import numpy as np

from prefixkv.kernels.plan import Plan, build_plan
from prefixkv.kernels.plan_options import PlanOptions, plan_bytes
from prefixkv.kernels.planner import build_plans

BLOCK_SIZE = 16
OPTIONS = PlanOptions.for_heads(32, 8, 128, 2, tile_rows=32, chunk_tokens=1024)
Tables = list["array[int]"]


def unshared(num_seqs: int, num_blocks: int) -> Tables:
    """Every block belongs to one sequence."""
    return [array("i", range(i * num_blocks, (i + 1) * num_blocks)) for i in range(num_seqs)]


def one_prefix(num_seqs: int, num_blocks: int) -> Tables:
    """All sequences share all but the last eight blocks."""
    prefix = range(num_blocks - 8)
    return [array("i", [*prefix, *range(1000 + 8 * i, 1008 + 8 * i)]) for i in range(num_seqs)]


def two_levels(num_seqs: int, num_blocks: int) -> Tables:
    """Half of each table is common to all, most of the rest to groups of eight."""
    half, next_id = num_blocks // 2, num_blocks
    tables = []
    for i in range(num_seqs):
        group = 10**6 + i // 8 * num_blocks
        own = range(next_id, next_id + 4)
        tables.append(array("i", [*range(half), *range(group, group + half - 4), *own]))
        next_id += 4
    return tables


def chain(num_seqs: int, num_blocks: int) -> Tables:
    """Each sequence is a fork of the one before it, one block shorter in common."""
    tables = [array("i", range(num_blocks))]
    for i in range(1, num_seqs):
        kept = max(num_blocks - i, 1)
        fresh = range(10**6 + i * num_blocks, 10**6 + i * num_blocks + num_blocks - kept)
        tables.append(tables[-1][:kept] + array("i", fresh))
    return tables


def measure_ms(run: Callable[[], object], repeats: int) -> tuple[float, float]:
    """The median and the shortest CPU time of one call in milliseconds, after a warm-up."""
    run()
    times = []
    for _ in range(repeats):
        start = time.process_time_ns()
        run()
        times.append(time.process_time_ns() - start)
    return statistics.median(times) / 1e6, min(times) / 1e6


def describe(plan: Plan) -> str:
    """The plan's size, what it moves, and how often it reads a block: once a tile of rows."""
    moved = plan_bytes(plan, OPTIONS)
    unique = len(np.unique(plan.blocks)) * BLOCK_SIZE * OPTIONS.token_bytes
    return (
        f"{len(plan.work):5} items  {moved.kv / 2**20:8.1f} MiB of K and V  "
        f"({moved.kv / unique:.2f} reads a block)  {moved.partials / 2**20:6.1f} MiB of partials"
    )


def bench(tables: Tables, repeats: int) -> str:
    """One table line for planning a decode step over these tables."""
    contexts = [len(table) * BLOCK_SIZE - 3 for table in tables]
    lengths = ([1] * len(tables), contexts, BLOCK_SIZE)
    ms, best_ms = measure_ms(lambda: build_plans(tables, *lengths, [None], OPTIONS), repeats)
    plain_ms, _ = measure_ms(lambda: build_plan(tables, *lengths), repeats)
    plan = build_plans(tables, *lengths, [None], OPTIONS)[None]
    return f"{ms:6.3f} ms  best {best_ms:6.3f} ms  (plain {plain_ms:6.3f} ms)  {describe(plan)}"


def main() -> None:
    """Print one line per batch."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=200)
    repeats = parser.parse_args().repeats
    for num_seqs, num_blocks in ((8, 34), (32, 264), (256, 256), (256, 2048)):
        for make in (unshared, one_prefix, two_levels, chain):
            name = f"{num_seqs:3} x {num_blocks:4} {make.__name__:10}"
            print(name, bench(make(num_seqs, num_blocks), repeats), flush=True)


if __name__ == "__main__":
    main()
