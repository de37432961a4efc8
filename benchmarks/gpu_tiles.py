"""Other tiles and chunks, timed: the part of `benchmarks/gpu.py` that runs with `--tune`."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.gpu_batch import Batch, Heads, make_batch
from benchmarks.gpu_session import Session
from benchmarks.gpu_speed import all_layers, random_pool
from prefixkv.kernels import triton_backend
from prefixkv.kernels.triton_backend import TritonBackend
from prefixkv.kernels.triton_tiles import Tile, choose_tiles

HEADS = [
    Heads(32, 8, 128, 16, torch.bfloat16),
    Heads(32, 8, 64, 16, torch.bfloat16),
    Heads(16, 4, 256, 16, torch.bfloat16),
]
SMOKE_HEADS = [Heads(4, 2, 16, 16, torch.float32)]
# (tokens, warps, stages): of few rows, and of many
FEW = [(32, 4, 3), (64, 4, 2), (64, 4, 3), (64, 4, 4), (64, 8, 3), (128, 4, 3), (128, 8, 2)]
MANY = [(32, 4, 3), (64, 4, 2), (64, 4, 3), (64, 8, 2), (64, 8, 3), (64, 8, 4), (128, 8, 2)]
CHUNKS = [256, 512, 1024]
NUM_LAYERS = 4
Choice = tuple[int, int, int]


def timed(
    session: Session, heads: Heads, batch: Batch, tiles: tuple[Tile, Tile], chunk: int
) -> float | str:
    """Microseconds a layer with these tiles and chunks; or why not."""

    def choose(dtype: torch.dtype, head_dim: int, group: int) -> tuple[Tile, Tile]:
        return tiles

    with (
        patch.object(triton_backend, "choose_tiles", choose),
        patch.object(triton_backend, "PLAN_CHUNK", chunk),
    ):
        try:
            return _timed(session, heads, batch)
        except Exception as error:  # more shared memory or registers than there are
            return f"{type(error).__name__}: {str(error)[:120]}"


def _timed(session: Session, heads: Heads, batch: Batch) -> float:
    backend = TritonBackend()
    options = backend.plan_options(heads.dtype, heads.head_dim, *heads[:2], heads.block_size)
    num_layers = 1 if session.smoke else NUM_LAYERS
    torch.manual_seed(0)
    pool = random_pool(session, heads, batch.num_blocks, num_layers)
    shape = (batch.num_tokens, heads.num_heads, heads.head_dim)
    query: Tensor = torch.randn(shape, device=session.device).to(heads.dtype)
    run = all_layers(backend, pool, query, batch.plan(options), list(range(num_layers)))
    return session.median_us({"run": run}, repeats=9)["run"] / num_layers


def best_of(
    session: Session,
    choices: list[Any],
    measure: Callable[[Any], float | str],
    until: float,
    name: str,
) -> dict[str, Any]:
    """Times of all choices, and the shortest."""
    times: dict[Any, float | str] = {}
    for choice in choices:
        if session.left() < until:
            session.skip("tune", f"{name} {choice}", "out of time")
            continue
        times[choice] = measure(choice)
        session.free()
    good = {choice: us for choice, us in times.items() if isinstance(us, float)}
    best = min(good, key=lambda choice: good[choice]) if good else None
    print(f"tune: {name}: best {best} {'' if best is None else f'{good[best]:.1f} us'}", flush=True)
    return {"best": best, "us": {str(choice): us for choice, us in times.items()}}


def tune_heads(session: Session, heads: Heads, until: float) -> dict[str, Any]:
    """Decode by tiles of few rows, a prompt by those of many, then decode by chunks."""
    smoke, size = session.smoke, heads.block_size
    few, many = choose_tiles(heads.dtype, heads.head_dim, heads.num_heads // heads.num_kv_heads)
    decode = make_batch(
        [1] * (2 if smoke else 32), [40 if smoke else 8192] * (2 if smoke else 32), size
    )
    prompt = make_batch([24 if smoke else 2048], [30 if smoke else 4096], size)
    chunk = triton_backend.PLAN_CHUNK

    def with_shape(tile: Tile, choice: Choice) -> Tile:
        tokens, num_warps, num_stages = choice
        return replace(tile, tokens=tokens, num_warps=num_warps, num_stages=num_stages)

    parts: dict[str, tuple[list[Any], Callable[[Any], float | str]]] = {
        "few rows": (
            FEW,
            lambda c: timed(session, heads, decode, (with_shape(few, c), many), chunk),
        ),
        "many rows": (
            MANY,
            lambda c: timed(session, heads, prompt, (few, with_shape(many, c)), chunk),
        ),
        "chunk": (CHUNKS, lambda c: timed(session, heads, decode, (few, many), c)),
    }
    return {
        name: best_of(
            session, choices[:2] if smoke else choices, measure, until, f"{heads}, {name}"
        )
        for name, (choices, measure) in parts.items()
    }


def run(session: Session, until: float) -> None:
    """All head sizes, while more than `until` seconds are left, and ten."""
    results: dict[str, Any] = {}
    session.report["tune"] = results
    for heads in SMOKE_HEADS if session.smoke else HEADS:
        results[str(heads)] = tune_heads(session, heads, max(until, 0 if session.smoke else 10))
        session.save()
