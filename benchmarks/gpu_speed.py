"""Times of the kernels beside the bytes that they must move: a part of `benchmarks/gpu.py`."""

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from benchmarks.gpu_batch import Batch, Heads, make_batch
from benchmarks.gpu_rivals import decode_rivals
from benchmarks.gpu_session import Session
from benchmarks.gpu_times import judge
from prefixkv.kernels.plan import Plan
from prefixkv.kernels.plan_options import plan_bytes
from prefixkv.kernels.triton_backend import TritonBackend
from prefixkv.kernels.triton_block_copy import COPIED_ELEMENTS, copy_kernel

HEADS = Heads(32, 8, 128, 16, torch.bfloat16)
SMOKE_HEADS = Heads(4, 2, 16, 16, torch.float32)
FLUSHED_BYTES = 2**28  # K and V of other layers between two reads of one: several L2 caches
MOST_LAYERS = 64


class Decode(NamedTuple):
    """One query token a sequence; levels as `make_batch` wants them, in parts of the context."""

    batch: int
    context: int
    levels: tuple[tuple[int, float], ...] = ()
    block_size: int = 16

    def __str__(self) -> str:
        sharing = " + ".join(f"{part:.3g} by {members}" for members, part in self.levels)
        blocks = f", blocks of {self.block_size}" if self.block_size != 16 else ""
        return f"decode {self.batch} x {self.context}, shared: {sharing or 'nothing'}{blocks}"

    def make(self) -> Batch:
        """Its block tables."""
        shared = [(members, int(part * self.context)) for members, part in self.levels]
        contexts = [self.context - i % 7 for i in range(self.batch)]
        return make_batch([1] * self.batch, contexts, self.block_size, shared=shared)


def decode_cases(smoke: bool) -> list[Decode]:
    """The most telling first: time may run out."""
    if smoke:
        return [Decode(2, 48), Decode(4, 90, ((4, 0.95),)), Decode(1, 20)]
    first = [
        Decode(32, 8192), Decode(32, 8192, ((32, 0.875),)), Decode(32, 8192, (), 64),
        Decode(32, 8192, ((32, 0.875),), 64),
    ]  # fmt: skip
    cases = []
    for context in (8192, 1024, 32768):
        for batch in (32, 8, 128, 256, 1):
            cases.append(Decode(batch, context))
            if batch > 1:
                cases.append(Decode(batch, context, ((batch, 0.875),)))
                cases.append(Decode(batch, context, ((batch, 0.5), (max(2, batch // 8), 0.875))))
    return first + [case for case in cases if case not in first]


def random_pool(session: Session, heads: Heads, num_blocks: int, num_layers: int) -> Tensor:
    """All of it written: for times, values need not differ much."""
    sizes = (num_blocks, num_layers, 2, heads.num_kv_heads, heads.block_size, heads.head_dim)
    return torch.empty(sizes, dtype=heads.dtype, device=session.device).normal_()


def num_layers_for(layer_bytes: int, smoke: bool) -> int:
    """So many that what one layer reads is out of the cache when its turn comes again."""
    return 2 if smoke else min(MOST_LAYERS, FLUSHED_BYTES // layer_bytes + 2)


def planning_us(batch: Batch, options: Any) -> float:
    """The best of a few plans, on the host; the first may compile."""
    times = []
    for _ in range(4):
        begin = time.perf_counter()
        batch.plan(options)
        times.append(1e6 * (time.perf_counter() - begin))
    return min(times)


def all_layers(
    backend: TritonBackend, pool: Tensor, query: Tensor, plan: Plan, layers: list[int]
) -> Callable[[], object]:
    """Attend to these layers, one after the other."""
    scale = query.shape[2] ** -0.5

    def attend() -> None:
        for layer in layers:
            backend.attend(pool, layer, query, plan, scale)

    return attend


def time_decode(session: Session, case: Decode) -> dict[str, Any]:
    """One line: the plan that shares and the plain one, out of the cache and in it, and rivals."""
    base = SMOKE_HEADS if session.smoke else HEADS
    heads = base._replace(block_size=case.block_size)
    backend = TritonBackend()  # it keeps plans
    batch = case.make()
    unique = batch.num_unique * heads.block_size * heads.token_bytes
    num_layers = num_layers_for(unique, session.smoke)
    options = backend.plan_options(heads.dtype, heads.head_dim, *heads[:2], heads.block_size)
    plan, plain = batch.plan(options), batch.plan(replace(options, share=False))
    pool = random_pool(session, heads, batch.num_blocks, num_layers)
    query = torch.randn(batch.num_tokens, heads.num_heads, heads.head_dim, device=session.device)
    query = query.to(heads.dtype)
    layers = list(range(num_layers))
    runs = {
        "flushed": all_layers(backend, pool, query, plan, layers),
        "plain": all_layers(backend, pool, query, plain, layers),
        "resident": all_layers(backend, pool, query, plan, [0] * num_layers),
    }
    us = {name: value / num_layers for name, value in session.median_us(runs).items()}
    launched = session.median_us({"launched": runs["flushed"]}, repeats=5, graph=False)["launched"]
    moved = unique + 2 * query.numel() * query.element_size()
    row = {
        "case": str(case), "shape": str(heads), "sharing": bool(case.levels),
        "unique_bytes": unique, "moved_bytes": moved, "layers": num_layers,
        "plan_bytes": plan_bytes(plan, options).total,
        "plain_bytes": plan_bytes(plain, options).total,
        **{f"{name}_us": value for name, value in us.items()},
        "launched_us": launched / num_layers, "planning_us": planning_us(batch, options),
        "same_plan": len(plan.work) == len(plain.work),
    }  # fmt: skip
    add_floor(session, row, us["flushed"])
    row["rivals"] = decode_rivals(session, batch, pool, query)
    return row


def add_floor(session: Session, row: dict[str, Any], us: float) -> None:
    """The time of copying as many bytes, and the part of that speed that was reached."""
    if session.copy_bandwidth is None:
        row["floor_us"] = row["of_copy"] = None
        return
    row["floor_us"] = 1e6 * row["moved_bytes"] / session.copy_bandwidth
    row["of_copy"] = row["floor_us"] / us


def time_prefill(session: Session, backend: TritonBackend, context: int) -> dict[str, Any]:
    """A chunk of a prompt at the end of a context, beside causal SDPA on gathered K and V."""
    heads = SMOKE_HEADS if session.smoke else HEADS
    chunk = 24 if session.smoke else 2048
    batch = make_batch([chunk], [context], heads.block_size)
    options = backend.plan_options(heads.dtype, heads.head_dim, *heads[:2], heads.block_size)
    pool = random_pool(session, heads, batch.num_blocks, 2)
    query = torch.randn(chunk, heads.num_heads, heads.head_dim, device=session.device)
    query = query.to(heads.dtype)
    group = heads.num_heads // heads.num_kv_heads
    dense = torch.randn(2, 1, heads.num_heads, context, heads.head_dim, device=session.device)
    dense = dense.to(heads.dtype)
    mask: Any = causal_lower_right(chunk, context)
    sdpa = torch.nn.functional.scaled_dot_product_attention
    rows = query.transpose(0, 1)[None]
    us = session.median_us(
        {
            "flushed": all_layers(backend, pool, query, batch.plan(options), [0]),
            "sdpa": lambda: sdpa(rows, dense[0], dense[1], attn_mask=mask),
        }
    )
    pairs = chunk * (context - chunk) + chunk * (chunk + 1) // 2
    flops = 4 * heads.head_dim * heads.num_heads * pairs
    row = {
        "case": f"prefill, {chunk} of {context}", "shape": str(heads), "group": group,
        "flops": flops, "flushed_us": us["flushed"], "rivals": {"sdpa": us["sdpa"]},
    }  # fmt: skip
    if not session.smoke:
        row["tflops"] = flops / us["flushed"] / 1e6
    return row


def time_write(session: Session, backend: TritonBackend, num_rows: int) -> dict[str, Any]:
    """New K and V into random slots of several layers."""
    heads = SMOKE_HEADS if session.smoke else HEADS
    row_bytes = num_rows * heads.token_bytes
    num_layers = num_layers_for(row_bytes, session.smoke)
    num_blocks = num_rows // heads.block_size * 2 + 4
    pool = random_pool(session, heads, num_blocks, num_layers)
    slots = torch.randperm(num_blocks * heads.block_size)[:num_rows].to(session.device)
    both = torch.randn(2, num_rows, heads.num_kv_heads, heads.head_dim, device=session.device)
    key, value = both.to(heads.dtype).unbind(0)

    def write() -> None:
        for layer in range(num_layers):
            backend.write_kv(pool, layer, key, value, slots)

    us = session.median_us({"write": write})["write"] / num_layers
    row = {"case": f"KV write, {num_rows} tokens", "shape": str(heads), "flushed_us": us}
    row["moved_bytes"] = 2 * row_bytes
    add_floor(session, row, us)
    return row


def time_copy(session: Session, backend: TritonBackend, num_pairs: int) -> dict[str, Any]:
    """Whole blocks of all layers; the kernel, and beside it the call with its host's part."""
    heads = SMOKE_HEADS if session.smoke else HEADS
    num_layers = 2 if session.smoke else 32
    pool = random_pool(session, heads, 2 * num_pairs, num_layers)
    ids = torch.randperm(2 * num_pairs, dtype=torch.int32)
    full = torch.full((num_pairs,), heads.block_size, dtype=torch.int32)
    pairs = torch.stack((ids[:num_pairs], ids[num_pairs:], full), 1).contiguous()
    on_device = pairs.to(session.device)
    triples = [(int(a), int(b), int(n)) for a, b, n in pairs.tolist()]
    block_d = triton.next_power_of_2(heads.head_dim)
    block_s = min(heads.block_size, max(1, COPIED_ELEMENTS // block_d))
    spans = num_layers * 2 * heads.num_kv_heads
    grid = (num_pairs, spans, triton.cdiv(heads.block_size, block_s))

    def launch() -> None:  # as `copy_blocks` does it
        copy_kernel[grid](
            pool, on_device, *pool.stride()[:5], NUM_KV_HEADS=heads.num_kv_heads,
            HEAD_DIM=heads.head_dim, BLOCK_S=block_s, BLOCK_D=block_d, num_warps=4,
        )  # fmt: skip

    us = session.median_us({"kernel": launch})["kernel"]
    call = session.median_us(
        {"call": lambda: backend.copy_blocks(pool, triples)}, repeats=5, graph=False
    )["call"]
    row = {"case": f"block copy, {num_pairs} pairs", "shape": str(heads), "flushed_us": us}
    row["launched_us"] = call
    row["moved_bytes"] = 2 * num_pairs * num_layers * heads.block_size * heads.token_bytes
    add_floor(session, row, us)
    return row


def run(session: Session, until: float) -> None:
    """All cases, while more than `until` seconds are left."""
    backend = TritonBackend()
    smoke = session.smoke
    timed: list[tuple[str, Callable[[], dict[str, Any]]]] = [
        (f"block copy {n}", partial(time_copy, session, backend, n))
        for n in ([3] if smoke else [1024, 32])
    ]
    timed += [
        (f"KV write {n}", partial(time_write, session, backend, n))
        for n in ([20] if smoke else [32, 256, 8192])
    ]
    timed += [
        (f"prefill {n}", partial(time_prefill, session, backend, n))
        for n in ([30] if smoke else [2048, 8192])
    ]
    decodes: list[tuple[str, Callable[[], dict[str, Any]]]] = [
        (str(case), partial(time_decode, session, case))
        for case in decode_cases(smoke)
        if room_for(session, case)
    ]
    timed = decodes[:4] + timed + decodes[4:]
    rows: list[dict[str, Any]] = []
    session.report["speed"] = rows
    for name, measure in timed:
        if session.left() < max(until, 0 if smoke else 10):
            session.skip("speed", name, "out of time")
            continue
        try:
            rows.append(measure())
        except Exception as error:  # one that does not run must not hide the others
            session.skip("speed", name, f"{type(error).__name__}: {error}")
            session.check(f"speed, {name}: runs", str(error)[:200], False)
        session.free()
        session.save()
    judge(session, rows)


def room_for(session: Session, case: Decode) -> bool:
    """Whether its pool fits; said if not."""
    heads = SMOKE_HEADS if session.smoke else HEADS
    tokens = case.make().num_blocks * case.block_size
    layer_bytes = tokens * heads.token_bytes
    needed = layer_bytes * num_layers_for(layer_bytes, session.smoke)
    if session.fits(needed):
        return True
    session.skip("speed", str(case), f"a pool of {needed / 2**30:.0f} GiB does not fit")
    return False
