"""Every kernel against float64 on the same device: a part of `benchmarks/gpu.py`."""

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.gpu_batch import Batch, Heads, fill_contexts, gather, make_batch, make_pool
from benchmarks.gpu_session import Session
from prefixkv.kernels.triton_backend import TritonBackend

# worst error of a row and head, in the norm, relative to the row's
TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-5}
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
GROUPED = ": grouped - ungrouped"
QUERY_ROWS = 128  # that the float64 attention scores at a time


class Config(NamedTuple):
    """A shape, and what is unusual about it; kernels are compiled for each."""

    heads: Heads
    window: int | None = None
    strided: bool = False
    more_blocks: int = 0  # of the pool, so that its offsets exceed 32 bits

    def __str__(self) -> str:
        parts = [str(self.heads)]
        parts += [f"window {self.window}"] if self.window else []
        parts += ["strided"] if self.strided else []
        parts += ["beyond 2^31 elements"] if self.more_blocks else []
        return ", ".join(parts)


CONFIGS = [
    Config(Heads(32, 8, 128, 16, BF16)),
    Config(Heads(32, 8, 128, 64, BF16)),
    Config(Heads(9, 3, 64, 16, FP32)),
    Config(Heads(32, 8, 128, 16, FP16)),
    Config(Heads(32, 8, 128, 16, BF16), window=1000),
    Config(Heads(32, 8, 128, 16, BF16), strided=True),
    Config(Heads(32, 8, 128, 16, BF16), more_blocks=70_000),
    Config(Heads(8, 8, 64, 16, BF16)),
    Config(Heads(32, 4, 64, 64, BF16)),
    Config(Heads(16, 4, 256, 16, BF16)),
    Config(Heads(16, 2, 256, 64, FP16)),
    Config(Heads(32, 8, 128, 64, FP32)),
    Config(Heads(8, 8, 256, 16, FP32)),
]
SMOKE_CONFIGS = [
    Config(Heads(4, 2, 16, 16, FP32)),
    Config(Heads(4, 1, 16, 16, FP16), window=40, strided=True),
]


def batches_for(config: Config, smoke: bool) -> dict[str, Batch]:
    """Decode, shared prefixes on two levels, prompts, and both at once."""
    size, unit = config.heads.block_size, 100 if smoke else 4096
    ends = [1, size, size + 1, unit // 2 - 1, unit // 2, unit]
    tree = [(4 if smoke else 16, unit // 2), (2 if smoke else 4, unit - unit // 8)]
    members = 4 if smoke else 16
    near = [unit - i * 3 for i in range(members)]
    chunk = 40 if smoke else 700
    return {
        "decode": make_batch([1] * len(ends), ends, size),
        "shared prefix": make_batch([1] * members, near, size, shared=tree),
        "prefill": make_batch([chunk, 5, size], [chunk * 2 + 3, 5, size], size),
        "mixed": make_batch([chunk, *[1] * (members - 1)], near, size, shared=tree),
    }


def exact(pool: Tensor, layer: int, query: Tensor, batch: Batch, window: int | None) -> Tensor:
    """Attention in float64, each sequence alone, from its gathered K and V."""
    out = torch.empty(query.shape, dtype=torch.float64, device=query.device)
    num_kv_heads, first = pool.shape[3], 0
    for table, rows, context in zip(
        batch.tables, batch.query_lens, batch.context_lens, strict=True
    ):
        key, value = gather(pool, layer, table, context).double().unbind(0)
        key_at = torch.arange(context, device=query.device)
        for begin in range(0, rows, QUERY_ROWS):
            end = min(rows, begin + QUERY_ROWS)
            part = query[first + begin : first + end].double()
            # [rows, heads, dim] -> [kv_heads, group, rows, dim]
            part = part.view(end - begin, num_kv_heads, -1, query.shape[2]).permute(1, 2, 0, 3)
            scores = part @ key[:, None].transpose(2, 3) * query.shape[2] ** -0.5
            at = torch.arange(context - rows + begin, context - rows + end, device=query.device)
            distance = at[:, None] - key_at[None]
            hidden = distance < 0
            if window is not None:
                hidden |= distance >= window
            weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
            done = (weights @ value[:, None]).permute(2, 0, 1, 3).flatten(1, 2)
            out[first + begin : first + end] = done
        first += rows
    return out


def worst_error(found: Tensor, expected: Tensor) -> float:
    """Of any row and head: norm of the difference by the norm; infinite if it is not finite."""
    difference = (found.double() - expected).norm(dim=-1)
    worst = float((difference / expected.norm(dim=-1)).max())
    return worst if worst < torch.inf else torch.inf


def check_attention(
    session: Session, backend: TritonBackend, config: Config, name: str, batch: Batch
) -> list[dict[str, Any]]:
    """The error of the plan that shares; and whether one that does not gives the same bits."""
    heads = config.heads
    num_blocks = batch.num_blocks + config.more_blocks
    if config.more_blocks:  # the last ids of the pool, where offsets are largest
        batch = replace(batch, tables=[table + config.more_blocks for table in batch.tables])
    pool = make_pool(heads, num_blocks, 2 if not config.more_blocks else 1, session.device,
                     strided=config.strided)  # fmt: skip
    layer = pool.shape[1] - 1
    fill_contexts(pool, layer, batch)
    query = torch.randn(batch.num_tokens, heads.num_heads, heads.head_dim, device=session.device)
    query = query.to(heads.dtype)
    options = backend.plan_options(heads.dtype, heads.head_dim, *heads[:2], heads.block_size)
    scale = heads.head_dim**-0.5
    plan = batch.plan(options, config.window)
    alone_plan = batch.plan(replace(options, share=False), config.window)
    found = backend.attend(pool, layer, query, plan, scale)
    error = worst_error(found, exact(pool, layer, query, batch, config.window))
    rows = [outcome(config, name, error, TOLERANCE[heads.dtype], plan.num_partials)]
    if len(plan.work) != len(alone_plan.work):
        one_tile = TritonBackend(batch_invariant=True)
        together, alone = (
            one_tile.attend(pool, layer, query, p, scale) for p in (plan, alone_plan)
        )
        apart = float((together.double() - alone.double()).abs().max())
        # the interpreter multiplies by BLAS, whose sums depend on where a row lies
        allowed = TOLERANCE[heads.dtype] if session.smoke else 0.0
        rows.append(outcome(config, f"{name}{GROUPED}", apart, allowed, plan.num_partials))
    return rows


def outcome(
    config: Config, name: str, error: float, tolerance: float, num_partials: int = 0
) -> dict[str, Any]:
    """A line of the report."""
    return {
        "shape": str(config), "case": name, "tolerance": tolerance,
        "error": error if error < torch.inf else "not finite",
        "partials": num_partials, "ok": error <= tolerance,
    }  # fmt: skip


def check_write(session: Session, backend: TritonBackend, config: Config) -> dict[str, Any]:
    """New rows are in their slots, bit for bit, and all else is as it was."""
    heads, num_blocks, rows = config.heads, 97, 60 if session.smoke else 1000
    pool = make_pool(heads, num_blocks, 2, session.device, strided=config.strided)
    slots = torch.randperm(num_blocks * heads.block_size)[:rows]
    # K and V as a projection of both gives them: rows with a stride of their own
    both = torch.randn(len(slots), 2, heads.num_kv_heads, heads.head_dim, device=session.device)
    both = both.to(heads.dtype)
    expected = pool.clone()
    blocks, offsets = (slots // heads.block_size).to(pool.device), slots % heads.block_size
    expected[blocks, 1, :, :, offsets.to(pool.device)] = both
    backend.write_kv(pool, 1, both[:, 0], both[:, 1], slots)
    wrong = int((pool.nan_to_num(7.5) != expected.nan_to_num(7.5)).sum())
    return outcome(config, "KV write: wrong elements", wrong, 0.0)


def check_copy(session: Session, backend: TritonBackend, config: Config) -> dict[str, Any]:
    """Copies, chains among them, leave what a loop over torch leaves."""
    heads, num_blocks = config.heads, 65
    pool = make_pool(heads, num_blocks, 2, session.device, strided=config.strided)
    pool[: num_blocks // 2] = torch.randn(
        pool[: num_blocks // 2].shape, device=pool.device
    ).to(heads.dtype)  # fmt: skip
    ids = torch.randperm(num_blocks).tolist()
    pairs = [(ids[i], ids[i + 20], 1 + i % heads.block_size) for i in range(20)]
    pairs += [(ids[20], ids[50], heads.block_size), (ids[50], ids[51], heads.block_size)]
    expected = pool.clone()
    for source, target, num_slots in pairs:
        expected[target, :, :, :, :num_slots] = expected[source, :, :, :, :num_slots]
    backend.copy_blocks(pool, pairs)
    wrong = int((pool.nan_to_num(7.5) != expected.nan_to_num(7.5)).sum())
    return outcome(config, "block copy: wrong elements", wrong, 0.0)


def check_config(session: Session, backend: TritonBackend, config: Config) -> list[dict[str, Any]]:
    """All cases of one shape."""
    rows = []
    for name, batch in batches_for(config, session.smoke).items():
        rows += check_attention(session, backend, config, name, batch)
        session.free()
    if config.window is None and not config.more_blocks:
        rows += [check_write(session, backend, config), check_copy(session, backend, config)]
    elif session.smoke:
        rows.append(check_write(session, backend, config))
    return rows


def run(session: Session, until: float) -> None:
    """All shapes, the most important ones first, while more than `until` seconds are left."""
    backend = TritonBackend()
    rows: list[dict[str, Any]] = []
    session.report["correctness"] = rows
    for config in SMOKE_CONFIGS if session.smoke else CONFIGS:
        if session.left() < until:
            session.skip("correctness", str(config), "out of time")
            continue
        try:
            rows += check_config(session, backend, config)
        except Exception as error:  # a kernel that does not compile must not hide the others
            text = f"{type(error).__name__}: {error}"
            rows.append(outcome(config, text, torch.inf, 0.0))
        session.free()
        session.save()
    bits = [row for row in rows if row["case"].endswith(GROUPED)]
    for asked, judged in (
        ("all kernels right", [row for row in rows if row not in bits]),
        ("grouping changes nothing" if session.smoke else "grouping changes no bit", bits),
    ):
        failed = [row for row in judged if not row["ok"]]
        told = f"{len(failed)} of {len(judged)} cases wrong"
        told += ", beyond the tolerance" if session.smoke else ""
        session.check(asked, told, bool(judged) and not failed)
