"""New tokens' K and V into their slots, in Triton: one program is one token."""

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def write_kernel(
    key_ptr,
    value_ptr,
    key_pool_ptr,
    value_pool_ptr,
    slots_ptr,
    num_slots,
    stride_key_token: tl.int64,
    stride_key_head,
    stride_value_token: tl.int64,
    stride_value_head,
    stride_block: tl.int64,
    stride_head: tl.int64,
    stride_slot: tl.int64,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    token = tl.program_id(0)
    slot = tl.load(slots_ptr + token)
    # a slot outside the pool, such as -1 of a padding row, is not written
    if (slot >= 0) & (slot < num_slots):
        head = tl.arange(0, BLOCK_H)[:, None]
        d = tl.arange(0, BLOCK_D)[None, :]
        mask = (head < NUM_KV_HEADS) & (d < HEAD_DIM)
        first = slot // BLOCK_SIZE * stride_block + slot % BLOCK_SIZE * stride_slot
        key = tl.load(key_ptr + token * stride_key_token + head * stride_key_head + d, mask=mask)
        tl.store(key_pool_ptr + first + head * stride_head + d, key, mask=mask)
        value = tl.load(
            value_ptr + token * stride_value_token + head * stride_value_head + d, mask=mask
        )
        tl.store(value_pool_ptr + first + head * stride_head + d, value, mask=mask)


def write_slots(layer_pool: Tensor, key: Tensor, value: Tensor, slots: Tensor) -> None:
    """Write each token's K and V to its slot of one layer.

    Args:
        layer_pool: [num_blocks, 2, num_kv_heads, block_size, head_dim], one layer of the pool; a
            slot's elements lie one after the other, all else by its strides. Changed.
        key, value: [num_tokens, num_kv_heads, head_dim], dtype of the pool, likewise.
        slots: int64 [num_tokens] on the device, no slot twice; those outside the pool are skipped.
    """
    num_blocks, _, num_kv_heads, block_size, head_dim = layer_pool.shape
    if not len(slots):
        return
    write_kernel[(len(slots),)](
        key,
        value,
        layer_pool[:, 0],
        layer_pool[:, 1],
        slots,
        num_blocks * block_size,
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        layer_pool.stride(0),
        layer_pool.stride(2),
        layer_pool.stride(3),
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        BLOCK_H=triton.next_power_of_2(num_kv_heads),
        BLOCK_D=triton.next_power_of_2(head_dim),
        num_warps=4,
    )
