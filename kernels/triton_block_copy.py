"""Copies between blocks of the pool in Triton: all pairs and layers in one launch.

A launch copies its pairs at the same time, in no order. Pairs that depend on an earlier one, by
reading or writing what it writes or by writing what it reads, wait for a later launch.
"""

from collections.abc import Sequence

import numpy as np
import triton
import triton.language as tl
from torch import Tensor

from prefixkv.kernels.pool_bounds import check_copies
from prefixkv.kernels.upload import upload_array

COPIED_ELEMENTS = 4096  # of a (layer, K or V, head) that one program copies


@triton.jit
def copy_kernel(
    pool_ptr,
    pairs_ptr,
    stride_block: tl.int64,
    stride_layer: tl.int64,
    stride_kv: tl.int64,
    stride_head: tl.int64,
    stride_slot: tl.int64,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    pair_ptr = pairs_ptr + tl.program_id(0) * 3
    src = tl.load(pair_ptr + 0).to(tl.int64)
    dst = tl.load(pair_ptr + 1).to(tl.int64)
    num_slots = tl.load(pair_ptr + 2)
    span = tl.program_id(1)  # (layer, K or V, head), counted through
    slot = tl.program_id(2) * BLOCK_S + tl.arange(0, BLOCK_S)[:, None]
    d = tl.arange(0, BLOCK_D)[None, :]
    offsets = (
        span // (2 * NUM_KV_HEADS) * stride_layer
        + span // NUM_KV_HEADS % 2 * stride_kv
        + span % NUM_KV_HEADS * stride_head
        + slot * stride_slot
        + d
    )
    mask = (slot < num_slots) & (d < HEAD_DIM)
    copied = tl.load(pool_ptr + src * stride_block + offsets, mask=mask)
    tl.store(pool_ptr + dst * stride_block + offsets, copied, mask=mask)


def copy_blocks(pool: Tensor, pairs: Sequence[tuple[int, int, int]]) -> None:
    """Copy the first num_slots slots of block src to block dst in all layers, as if in order.

    Args:
        pool: [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]; a slot's elements
            lie one after the other, all else by its strides. Changed.
        pairs: (src, dst, num_slots).

    Raises: IndexError if a pair lies outside the pool; nothing was copied then.
    """
    check_copies(pool, pairs)
    num_layers, _, num_kv_heads, block_size, head_dim = pool.shape[1:]
    block_d = triton.next_power_of_2(head_dim)
    block_s = min(triton.next_power_of_2(block_size), max(1, COPIED_ELEMENTS // block_d))
    for batch in independent_batches(pairs):
        grid = (len(batch), num_layers * 2 * num_kv_heads, triton.cdiv(block_size, block_s))
        copy_kernel[grid](
            pool,
            upload_array(np.array(batch, np.int32), pool.device),
            *pool.stride()[:5],
            NUM_KV_HEADS=num_kv_heads,
            HEAD_DIM=head_dim,
            BLOCK_S=block_s,
            BLOCK_D=block_d,
            num_warps=4,
        )


def independent_batches(
    pairs: Sequence[tuple[int, int, int]],
) -> list[list[tuple[int, int, int]]]:
    """Batches to copy one after the other, each as early as what it depends on allows.

    Within a batch no block is written twice, or written and read. Pairs that copy nothing are
    left out. Usually there is one batch: chains are rare.
    """
    batches: list[list[tuple[int, int, int]]] = []
    after_read: dict[int, int] = {}  # block -> first batch that may write it
    after_write: dict[int, int] = {}  # block -> first batch that may read or write it
    for src, dst, num_slots in pairs:
        if src == dst or num_slots == 0:
            continue
        batch = max(after_write.get(src, 0), after_write.get(dst, 0), after_read.get(dst, 0))
        if batch == len(batches):
            batches.append([])
        batches[batch].append((src, dst, num_slots))
        after_read[src] = max(after_read.get(src, 0), batch + 1)
        after_write[dst] = batch + 1
    return batches
