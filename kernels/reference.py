"""Attention from a plan in plain torch: the oracle of every other backend.

Every row is computed alone from exactly the slots that it may see, so nothing that a plan does not
name is ever read, and no row depends on another. Any dtype; slow on purpose.
"""

from collections.abc import Sequence
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from prefixkv.kernels.block_copy import copy_blocks
from prefixkv.kernels.plan import (
    BASE_POS,
    BLK_OFF,
    DST_SLOT,
    FINAL,
    ROW_CNT,
    ROW_OFF,
    TOK0,
    TOK1,
    Plan,
)
from prefixkv.kernels.pool_bounds import check_slots
from prefixkv.kernels.upload import upload_arrays


class ReferenceBackend:
    """Implements `prefixkv.kernels.backend.AttentionBackend` for every floating dtype."""

    name = "reference"

    def supports(
        self, dtype: torch.dtype, head_dim: int, num_heads: int, num_kv_heads: int
    ) -> str | None:
        """None if it can serve such a model, else the reason."""
        if not dtype.is_floating_point:
            return f"the reference backend needs a floating dtype, not {dtype}"
        if num_heads % num_kv_heads:
            return f"{num_heads} query heads are not a multiple of {num_kv_heads} kv heads"
        return None

    def plan_options(
        self, dtype: torch.dtype, head_dim: int, num_heads: int, num_kv_heads: int, block_size: int
    ) -> None:
        """See `AttentionBackend.plan_options`; each row is computed alone, whatever the plan."""

    def upload(
        self, pool: Tensor, num_heads: int, plans: Sequence[Plan], arrays: Sequence[NDArray[Any]]
    ) -> list[Tensor]:
        """See `AttentionBackend.upload`; plans stay on the host."""
        return upload_arrays(arrays, pool.device)

    def write_kv(self, pool: Tensor, layer: int, key: Tensor, value: Tensor, slots: Tensor) -> None:
        """See `AttentionBackend.write_kv`."""
        check_slots(pool, slots.cpu())
        blocks, offsets = slots // pool.shape[4], slots % pool.shape[4]
        pool[blocks, layer, 0, :, offsets] = key
        pool[blocks, layer, 1, :, offsets] = value

    def copy_blocks(self, pool: Tensor, pairs: Sequence[tuple[int, int, int]]) -> None:
        """See `AttentionBackend.copy_blocks`."""
        copy_blocks(pool, pairs)

    def attend(self, pool: Tensor, layer: int, query: Tensor, plan: Plan, scale: float) -> Tensor:
        """See `AttentionBackend.attend`; accumulates in float32, for float64 queries in float64."""
        dtype = torch.promote_types(query.dtype, torch.float32)
        num_tokens, num_heads, head_dim = query.shape
        num_kv_heads = pool.shape[3]
        grouped = query.to(dtype).view(num_tokens, num_kv_heads, -1, head_dim) * scale
        out = torch.zeros_like(grouped)
        partials: list[_Partial | None] = [None] * plan.num_partials
        for item in plan.work.tolist():
            keys, values = _read_run(pool, layer, plan, item)
            rows = plan.rows[item[ROW_OFF] : item[ROW_OFF] + item[ROW_CNT]].tolist()
            for r, token in enumerate(rows):
                lo, hi = _visible(plan, item, int(plan.positions[token]))
                partial = _Partial(
                    grouped[token], keys[:, lo:hi].to(dtype), values[:, lo:hi].to(dtype)
                )
                if item[FINAL]:
                    out[token] = partial.output()
                else:
                    partials[item[DST_SLOT] + r] = partial
        for token, (begin, end) in enumerate(
            zip(plan.merge_indptr[:-1].tolist(), plan.merge_indptr[1:].tolist(), strict=True)
        ):
            if begin < end:
                found = [partials[slot] for slot in plan.merge_slots[begin:end].tolist()]
                out[token] = _merge([partial for partial in found if partial is not None])
        return out.view(num_tokens, num_heads, head_dim).to(query.dtype)


class _Partial:
    """Softmax over some keys for one row, unnormalised: sum of weights, of weighted values."""

    def __init__(self, query: Tensor, keys: Tensor, values: Tensor) -> None:
        """Attend a scaled query [num_kv_heads, group, head_dim] to [num_kv_heads, n, head_dim]."""
        scores = query @ keys.transpose(1, 2)
        if keys.shape[1]:
            self.peak = scores.amax(-1, keepdim=True)
        else:
            self.peak = scores.new_full((*query.shape[:2], 1), -torch.inf)
        weights = torch.exp(scores - self.peak)
        self.total = weights.sum(-1, keepdim=True)
        self.acc = weights @ values

    def output(self) -> Tensor:
        """The attention output; 0 where no key was visible."""
        return torch.where(self.total == 0, 0, self.acc / self.total)


def _merge(partials: Sequence[_Partial]) -> Tensor:
    # an empty partial has peak -inf, total 0 and acc 0: it must not meet -inf - -inf
    seen = [partial for partial in partials if bool((partial.total != 0).any())]
    if not seen:
        return torch.zeros_like(partials[0].acc)
    peak = torch.stack([partial.peak for partial in seen]).amax(0)
    rescale = [torch.exp(partial.peak - peak) for partial in seen]
    total = sum(p.total * r for p, r in zip(seen, rescale, strict=True))
    acc = sum(p.acc * r for p, r in zip(seen, rescale, strict=True))
    return torch.as_tensor(acc) / torch.as_tensor(total)


def _read_run(pool: Tensor, layer: int, plan: Plan, item: Sequence[int]) -> tuple[Tensor, Tensor]:
    """K and V of the item's tokens [tok0, tok1), each [num_kv_heads, tok1 - tok0, head_dim]."""
    end_block = -(-item[TOK1] // plan.block_size)
    ids = torch.from_numpy(plan.blocks[item[BLK_OFF] : item[BLK_OFF] + end_block]).long()
    # [num_blocks, 2, num_kv_heads, block_size, head_dim] -> [2, num_kv_heads, tokens, head_dim]
    run = pool[ids, layer].permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, item[TOK0] : item[TOK1]]
    return run[0], run[1]


def _visible(plan: Plan, item: Sequence[int], position: int) -> tuple[int, int]:
    """The half-open range of tokens, counted from tok0, that a row at `position` sees."""
    hi = min(item[TOK1], position - item[BASE_POS] + 1)
    lo = item[TOK0]
    if plan.window is not None:
        lo = max(lo, position - item[BASE_POS] - plan.window + 1)
    return lo - item[TOK0], max(lo, hi) - item[TOK0]
