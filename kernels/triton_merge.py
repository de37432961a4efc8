"""Merges a row's partials by log-sum-exp in Triton: one program is one query token and head."""

import triton
import triton.language as tl
from torch import Tensor

from prefixkv.kernels.triton_attention import Partials
from prefixkv.kernels.triton_plan import DevicePlan


@triton.jit
def merge_kernel(
    acc_ptr,
    peak_ptr,
    total_ptr,
    out_ptr,
    tokens_ptr,
    indptr_ptr,
    slots_ptr,
    stride_out_token,
    stride_out_head,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    token = tl.load(tokens_ptr + tl.program_id(0) // NUM_HEADS)
    head = tl.program_id(0) % NUM_HEADS
    offs_d = tl.arange(0, BLOCK_D)
    in_head = offs_d < HEAD_DIM
    peak = tl.full([], float("-inf"), tl.float32)
    total = tl.full([], 0.0, tl.float32)
    acc = tl.zeros([BLOCK_D], tl.float32)
    # always in the order of the merge list, so that a sum has one value
    for i in range(tl.load(indptr_ptr + token), tl.load(indptr_ptr + token + 1)):
        partial = tl.load(slots_ptr + i).to(tl.int64) * NUM_HEADS + head
        other_peak = tl.load(peak_ptr + partial)
        other_total = tl.load(total_ptr + partial)
        other_acc = tl.load(acc_ptr + partial * HEAD_DIM + offs_d, mask=in_head, other=0.0)
        new_peak = tl.maximum(peak, other_peak)
        # two empty partials merge to an empty one, without -inf - -inf
        safe_peak = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        rescale = tl.exp2(peak - safe_peak)
        other_rescale = tl.exp2(other_peak - safe_peak)
        acc = acc * rescale + other_acc * other_rescale
        total = total * rescale + other_total * other_rescale
        peak = new_peak
    out = acc / tl.where(total == 0.0, 1.0, total)
    offsets = token.to(tl.int64) * stride_out_token + head * stride_out_head + offs_d
    tl.store(out_ptr + offsets, out.to(out_ptr.dtype.element_ty), mask=in_head)


def merge_partials(partials: Partials, plan: DevicePlan, out: Tensor) -> None:
    """Write the rows of `out` that have partials: their merge, or 0 if no token was visible.

    Args:
        partials: of all items of the plan that are not final.
        out: [num_tokens, num_heads, head_dim]; other rows stay as they are.
    """
    num_heads, head_dim = out.shape[1:]
    if not len(plan.merged_tokens):
        return
    merge_kernel[(len(plan.merged_tokens) * num_heads,)](
        partials.acc,
        partials.peak,
        partials.total,
        out,
        plan.merged_tokens,
        plan.merge_indptr,
        plan.merge_slots,
        out.stride(0),
        out.stride(1),
        NUM_HEADS=num_heads,
        HEAD_DIM=head_dim,
        BLOCK_D=triton.next_power_of_2(head_dim),
        num_warps=1,
    )
