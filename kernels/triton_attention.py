"""Attention of work items in Triton: one program is one item times one kv head.

Decode, chunked prefill and shared prefixes are the same program: some query rows, times the query
heads that share a kv head, read one run of blocks. Row m of a tile is query token m // GROUP of
the item and query head m % GROUP of the group, so K and V of a run are read once for all of them.
Scores are kept in base 2; sums are float32 whatever the dtype of the pool.
"""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from prefixkv.kernels.triton_plan import DevicePlan
from prefixkv.kernels.triton_tiles import Tile

LOG2_E = math.log2(math.e)


class Partials(NamedTuple):
    """Unnormalised results of items that are not final; float32.

    A partial without a visible token has acc 0, peak -inf and total 0.

    Attributes:
        acc: [num_partials, num_heads, head_dim], sum of weights times values.
        peak: [num_partials, num_heads], largest score in base 2.
        total: [num_partials, num_heads], sum of weights 2 ** (score - peak).
    """

    acc: Tensor
    peak: Tensor
    total: Tensor


@triton.jit
def attend_kernel(
    query_ptr,
    key_ptr,
    value_ptr,
    out_ptr,
    acc_ptr,
    peak_ptr,
    total_ptr,
    work_ptr,
    rows_ptr,
    positions_ptr,
    blocks_ptr,
    score_scale,
    score_cap,
    window,
    stride_query_token,
    stride_query_head,
    stride_out_token,
    stride_out_head,
    stride_block: tl.int64,
    stride_head: tl.int64,
    stride_slot: tl.int64,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
):
    # neighbouring programs are the kv heads of one item: they read the same block ids
    item_ptr = work_ptr + (tl.program_id(0) // NUM_KV_HEADS).to(tl.int64) * 8
    kv_head = tl.program_id(0) % NUM_KV_HEADS
    row_off = tl.load(item_ptr + 0)
    row_cnt = tl.load(item_ptr + 1)
    blk_off = tl.load(item_ptr + 2)
    tok0 = tl.load(item_ptr + 3)
    tok1 = tl.load(item_ptr + 4)
    dst_slot = tl.load(item_ptr + 5)
    final = tl.load(item_ptr + 6)
    base_pos = tl.load(item_ptr + 7)

    offs_m = tl.arange(0, BLOCK_M)
    offs_n = tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, BLOCK_D)
    in_head = offs_d < HEAD_DIM
    row = offs_m // GROUP
    head = kv_head * GROUP + offs_m % GROUP
    is_row = row < row_cnt
    token = tl.load(rows_ptr + row_off + row, mask=is_row, other=0)
    position = tl.load(positions_ptr + token, mask=is_row, other=0)
    token = token.to(tl.int64)
    query = tl.load(
        query_ptr
        + (token * stride_query_token + head * stride_query_head)[:, None]
        + offs_d[None, :],
        mask=is_row[:, None] & in_head[None, :],
        other=0.0,
    )

    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    # tiles start at positions that are multiples of BLOCK_N: one lies in one block where blocks are
    # large, and wherever a run begins, a row's sums are made up of the same tiles
    if BLOCK_SIZE % BLOCK_N == 0:
        first = tok0 // BLOCK_N * BLOCK_N  # base_pos is a multiple of the block size
    else:
        first = (base_pos + tok0) // BLOCK_N * BLOCK_N - base_pos
    for start in range(first, tok1, BLOCK_N):
        n = start + offs_n
        in_run = (n >= tok0) & (n < tok1)
        if BLOCK_SIZE % BLOCK_N == 0:
            block = tl.load(blocks_ptr + blk_off + start // BLOCK_SIZE).to(tl.int64)
            slot = block * stride_block + (start % BLOCK_SIZE + offs_n) * stride_slot
        else:
            block = tl.load(blocks_ptr + blk_off + n // BLOCK_SIZE, mask=in_run, other=0)
            slot = block.to(tl.int64) * stride_block + (n % BLOCK_SIZE) * stride_slot
        offsets = (slot + kv_head * stride_head)[:, None] + offs_d[None, :]
        is_slot = in_run[:, None] & in_head[None, :]
        key = tl.load(key_ptr + offsets, mask=is_slot, other=0.0).to(query.dtype)
        score = tl.dot(query, tl.trans(key), input_precision="ieee") * score_scale
        if HAS_CAP:
            # tanh by an exponential that cannot overflow; score_scale doubles for it
            shrink = tl.exp2(-tl.abs(score))
            tanh = (1.0 - shrink) / (1.0 + shrink)
            score = score_cap * tl.where(score < 0, -tanh, tanh)
        distance = position[:, None] - (base_pos + n)[None, :]
        visible = is_row[:, None] & in_run[None, :] & (distance >= 0)
        if HAS_WINDOW:
            visible = visible & (distance < window)
        score = tl.where(visible, score, float("-inf"))

        new_peak = tl.maximum(peak, tl.max(score, 1))
        # a row that has seen nothing yet must not compute -inf - -inf
        safe_peak = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        weight = tl.exp2(score - safe_peak[:, None])
        rescale = tl.exp2(peak - safe_peak)
        total = total * rescale + tl.sum(weight, 1)
        # masked, for a weight of 0 times a stray NaN is NaN
        value = tl.load(value_ptr + offsets, mask=is_slot, other=0.0).to(query.dtype)
        weighted = tl.dot(weight.to(query.dtype), value, input_precision="ieee")
        acc = acc * rescale[:, None] + weighted
        peak = new_peak

    is_out = is_row[:, None] & in_head[None, :]
    if final != 0:
        out = acc / tl.where(total == 0.0, 1.0, total)[:, None]
        tl.store(
            out_ptr
            + (token * stride_out_token + head * stride_out_head)[:, None]
            + offs_d[None, :],
            out.to(out_ptr.dtype.element_ty),
            mask=is_out,
        )
    else:
        partial = (dst_slot + row).to(tl.int64) * (NUM_KV_HEADS * GROUP) + head
        tl.store(acc_ptr + partial[:, None] * HEAD_DIM + offs_d[None, :], acc, mask=is_out)
        tl.store(peak_ptr + partial, peak, mask=is_row)
        tl.store(total_ptr + partial, total, mask=is_row)


def attend_items(
    query: Tensor,
    layer_pool: Tensor,
    plan: DevicePlan,
    scale: float,
    softcap: float | None,
    out: Tensor,
    partials: Partials,
) -> None:
    """Run all items of a plan, those of few and of many rows in a launch each.

    Args:
        query: [num_tokens, num_heads, head_dim], the head's elements one after the other.
        layer_pool: [num_blocks, 2, num_kv_heads, block_size, head_dim], one layer of the pool; a
            slot's elements lie one after the other, all else by its strides.
        scale: what q . k is multiplied with; scores are then softcap * tanh(score / softcap).
        out: like `query`; rows of final items are written.
        partials: those of the other items are written.
    """
    if softcap is None:
        score_scale, score_cap = scale * LOG2_E, 1.0
    else:
        score_scale, score_cap = 2.0 * LOG2_E * scale / softcap, softcap * LOG2_E
    for work, tile in ((plan.few_rows, plan.few_rows_tile), (plan.many_rows, plan.many_rows_tile)):
        if len(work):
            _launch(query, layer_pool, plan, work, tile, score_scale, score_cap,
                    softcap is not None, out, partials)  # fmt: skip


def _launch(
    query: Tensor,
    layer_pool: Tensor,
    plan: DevicePlan,
    work: Tensor,
    tile: Tile,
    score_scale: float,
    score_cap: float,
    has_cap: bool,
    out: Tensor,
    partials: Partials,
) -> None:
    num_kv_heads, block_size, head_dim = layer_pool.shape[2:]
    attend_kernel[(len(work) * num_kv_heads,)](
        query,
        layer_pool[:, 0],
        layer_pool[:, 1],
        out,
        partials.acc,
        partials.peak,
        partials.total,
        work,
        plan.rows,
        plan.positions,
        plan.blocks,
        score_scale,
        score_cap,
        plan.window or 0,
        query.stride(0),
        query.stride(1),
        out.stride(0),
        out.stride(1),
        layer_pool.stride(0),
        layer_pool.stride(2),
        layer_pool.stride(3),
        NUM_KV_HEADS=num_kv_heads,
        GROUP=query.shape[1] // num_kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        BLOCK_M=tile.rows,
        BLOCK_N=tile.tokens,
        BLOCK_D=max(16, triton.next_power_of_2(head_dim)),
        HAS_WINDOW=plan.window is not None,
        HAS_CAP=has_cap,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


def empty_partials(num_partials: int, query: Tensor) -> Partials:
    """Room for partials on the device of `query`; not initialised."""
    num_heads, head_dim = query.shape[1:]
    device = query.device
    return Partials(
        torch.empty((num_partials, num_heads, head_dim), dtype=torch.float32, device=device),
        torch.empty((num_partials, num_heads), dtype=torch.float32, device=device),
        torch.empty((num_partials, num_heads), dtype=torch.float32, device=device),
    )
