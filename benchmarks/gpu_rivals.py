"""What the decode kernel is compared with, on K and V that were gathered before."""

import importlib
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.gpu_batch import Batch
from benchmarks.gpu_session import Session
from prefixkv.memory import memory_of


def decode_rivals(
    session: Session, batch: Batch, pool: Tensor, query: Tensor
) -> dict[str, float | str]:
    """Microseconds of each, or why there are none. All read every sequence's K and V alone."""
    makers: dict[str, Callable[[Batch, Tensor, Tensor], Callable[[], object]]] = {
        "sdpa": _sdpa, "flash_attn": _flash_attn, "flashinfer": _flashinfer
    }  # fmt: skip
    found: dict[str, float | str] = {}
    for name, make in makers.items():
        try:
            run = make(batch, pool, query)
            found[name] = session.median_us({name: run}, repeats=7)[name]
        except Exception as error:  # not installed, or not for these sizes
            found[name] = f"{type(error).__name__}: {str(error)[:120]}"
        session.free()
    return found


def _gathered(batch: Batch, pool: Tensor) -> Tensor:
    """[2, batch, num_kv_heads, tokens, head_dim] of layer 0; tokens of the longest sequence."""
    tokens = max(batch.context_lens)
    num_blocks = -(-tokens // batch.block_size)
    kv_heads, block_size, head_dim = pool.shape[3:]
    sizes = (2, len(batch.tables), kv_heads, num_blocks, block_size, head_dim)
    needed = int(np.prod(sizes)) * pool.element_size()
    if pool.is_cuda and needed > 0.8 * memory_of(pool.device).free:
        raise MemoryError(f"{needed / 2**30:.0f} GiB do not fit")
    out = torch.empty(sizes, dtype=pool.dtype, device=pool.device)
    for i, table in enumerate(batch.tables):
        ids = torch.from_numpy(table).long().to(pool.device)
        out[:, i, :, : len(ids)] = pool[ids, 0].permute(1, 2, 0, 3, 4)
        out[:, i, :, len(ids) :] = 0
    return out.flatten(3, 4)[:, :, :, :tokens]


def _sdpa(batch: Batch, pool: Tensor, query: Tensor) -> Callable[[], object]:
    key, value = _gathered(batch, pool).unbind(0)
    rows = query[:, :, None]
    return lambda: scaled_dot_product_attention(rows, key, value, enable_gqa=True)


def _flash_attn(batch: Batch, pool: Tensor, query: Tensor) -> Callable[[], object]:
    flash_attn: Any = importlib.import_module("flash_attn")

    key, value = (part.transpose(1, 2).contiguous() for part in _gathered(batch, pool).unbind(0))
    lengths = torch.tensor(batch.context_lens, dtype=torch.int32, device=pool.device)
    rows = query[:, None]
    attend: Any = flash_attn.flash_attn_with_kvcache
    return lambda: attend(rows, key, value, cache_seqlens=lengths)


def _flashinfer(batch: Batch, pool: Tensor, query: Tensor) -> Callable[[], object]:
    """It reads pages as we do: of a layer's blocks, copied together."""
    flashinfer: Any = importlib.import_module("flashinfer")

    used = np.concatenate(
        [
            t[: -(-n // batch.block_size)]
            for t, n in zip(batch.tables, batch.context_lens, strict=True)
        ]
    )
    counts = [-(-context // batch.block_size) for context in batch.context_lens]
    last = [(context - 1) % batch.block_size + 1 for context in batch.context_lens]
    workspace = torch.empty(2**28, dtype=torch.uint8, device=pool.device)
    wrapper: Any = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "HND")
    wrapper.plan(
        torch.tensor(np.cumsum([0, *counts]), dtype=torch.int32, device=pool.device),
        torch.from_numpy(used).to(pool.device),
        torch.tensor(last, dtype=torch.int32, device=pool.device),
        query.shape[1], pool.shape[3], pool.shape[5], pool.shape[4],
        q_data_type=query.dtype, kv_data_type=pool.dtype,
    )  # fmt: skip
    layer = pool[:, 0].contiguous()
    return lambda: wrapper.run(query, layer)
