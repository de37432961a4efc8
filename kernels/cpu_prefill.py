"""Attention of many query rows: gather the run's K and V once, then torch's fused attention."""

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from prefixkv.kernels.plan import BASE_POS, BLK_OFF, ROW_CNT, ROW_OFF, TOK0, TOK1, Int32Array, Plan

# rows per call: bounds the mask, and each call reads only the keys that its rows can see
TILE_ROWS = 128


def attend_gathered(
    pool: Tensor, layer: int, query: Tensor, plan: Plan, item: Int32Array, scale: float, out: Tensor
) -> None:
    """Run one final work item, for all heads; writes its rows of `out`, float32.

    Memory: K and V of the run once, and a mask of TILE_ROWS rows.
    """
    run = _gather_run(pool, layer, plan, item).to(query.dtype)
    rows = plan.rows[item[ROW_OFF] : item[ROW_OFF] + item[ROW_CNT]]
    for begin in range(0, len(rows), TILE_ROWS):
        tile = rows[begin : begin + TILE_ROWS]
        # positions counted from the first gathered token
        last = plan.positions[tile] - (item[BASE_POS] + item[TOK0])
        first = np.zeros_like(last) if plan.window is None else last - plan.window + 1
        lo, hi = max(0, int(first.min())), min(run.shape[2], int(last.max()) + 1)
        if lo >= hi:
            out[torch.from_numpy(tile)] = 0
            continue
        columns = np.arange(lo, hi, dtype=np.int32)
        visible = (columns <= last[:, None]) & (columns >= first[:, None])
        index = torch.from_numpy(tile)
        attended = scaled_dot_product_attention(
            query[index].transpose(0, 1)[None],
            run[0:1, :, lo:hi],
            run[1:2, :, lo:hi],
            attn_mask=torch.from_numpy(visible),
            scale=scale,
            enable_gqa=True,
        )
        out[index] = attended[0].transpose(0, 1).to(out.dtype)


def _gather_run(pool: Tensor, layer: int, plan: Plan, item: Int32Array) -> Tensor:
    """K and V of the tokens [tok0, tok1): [2, num_kv_heads, tok1 - tok0, head_dim]."""
    end_block = -(-int(item[TOK1]) // plan.block_size)
    blocks = torch.from_numpy(plan.blocks[item[BLK_OFF] : item[BLK_OFF] + end_block])
    by_block = pool[blocks, layer].permute(1, 2, 0, 3, 4)
    return by_block.flatten(2, 3)[:, :, item[TOK0] : item[TOK1]]
