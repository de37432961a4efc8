"""A plan as the Triton kernels take it: row tiles instead of items, arrays on the device.

One program holds a fixed number of query rows, so items of more rows are cut here, on the host and
once a step. Each cut keeps only the part of the run that its rows see: the kernel has no tile to
skip, whatever the window.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from prefixkv.kernels.plan import (
    BASE_POS,
    DST_SLOT,
    ROW_CNT,
    ROW_OFF,
    TOK0,
    TOK1,
    Int32Array,
    Plan,
)
from prefixkv.kernels.triton_tiles import Tile
from prefixkv.kernels.upload import upload_arrays


@dataclass(frozen=True, slots=True)
class DevicePlan:
    """What `attend_kernel` and `merge_kernel` read; all tensors int32, on one device.

    Attributes:
        few_rows, many_rows: [num_items, 8] as in `Plan.work`; an item's rows fit into its tile.
        rows, positions, blocks, merge_indptr, merge_slots: as in `Plan`.
        merged_tokens: query tokens that have partials to merge.
        smallest_block, largest_block: block ids of the plan; 0 and -1 if there are none.
    """

    few_rows: Tensor
    many_rows: Tensor
    few_rows_tile: Tile
    many_rows_tile: Tile
    rows: Tensor
    positions: Tensor
    blocks: Tensor
    merged_tokens: Tensor
    merge_indptr: Tensor
    merge_slots: Tensor
    num_partials: int
    window: int | None
    smallest_block: int
    largest_block: int


@dataclass(frozen=True, slots=True)
class TiledPlan:
    """A plan cut into row tiles, still on the host.

    Attributes:
        arrays: in the order of `DevicePlan`'s tensors.
    """

    plan: Plan
    tiles: tuple[Tile, Tile]
    arrays: tuple[Int32Array, ...]

    @classmethod
    def cut(cls, plan: Plan, group: int, tiles: tuple[Tile, Tile]) -> Self:
        """Cut a plan.

        Args:
            group: query heads of one kv head.
            tiles: for items of few and of many rows; an item is "few" if one such tile holds it.
        """
        few, many = (tile.rows // group for tile in tiles)
        is_few = plan.work[:, ROW_CNT] <= few
        arrays = (
            tile_rows(plan, plan.work[is_few], few),
            tile_rows(plan, plan.work[~is_few], many),
            plan.rows,
            plan.positions,
            plan.blocks,
            np.flatnonzero(np.diff(plan.merge_indptr)).astype(np.int32),
            plan.merge_indptr,
            plan.merge_slots,
        )
        return cls(plan, tiles, arrays)

    def on_device(self, tensors: Sequence[Tensor]) -> DevicePlan:
        """The plan, with its arrays where the kernels run."""
        few_rows, many_rows, rows, positions, blocks, merged, indptr, slots = tensors
        return DevicePlan(
            few_rows=few_rows,
            many_rows=many_rows,
            few_rows_tile=self.tiles[0],
            many_rows_tile=self.tiles[1],
            rows=rows,
            positions=positions,
            blocks=blocks,
            merged_tokens=merged,
            merge_indptr=indptr,
            merge_slots=slots,
            num_partials=self.plan.num_partials,
            window=self.plan.window,
            smallest_block=int(self.plan.blocks.min(initial=0)),
            largest_block=int(self.plan.blocks.max(initial=-1)),
        )


def upload_plan(
    plan: Plan, group: int, tiles: tuple[Tile, Tile], device: torch.device
) -> DevicePlan:
    """Cut one plan, and copy it to the device; see `TiledPlan.cut`."""
    tiled = TiledPlan.cut(plan, group, tiles)
    return tiled.on_device(upload_arrays(tiled.arrays, device))


def tile_rows(plan: Plan, work: Int32Array, most_rows: int) -> Int32Array:
    """Cut items into items of at most `most_rows` rows, each over the tokens that its rows see.

    Returns: [num_tiles, 8], those of most tokens first, as a long one that starts last is waited
        for alone; equally long ones in the order of the plan. An item that sees nothing stays,
        with tok0 >= tok1.
    """
    num_tiles = -(-work[:, ROW_CNT] // most_rows)
    tiles: np.ndarray[Any, np.dtype[np.int32]] = np.repeat(work, num_tiles, axis=0)
    if not len(tiles):
        return tiles
    first_row = (_counts_up(num_tiles) * most_rows).astype(np.int32)
    tiles[:, ROW_OFF] += first_row
    tiles[:, DST_SLOT] += first_row
    tiles[:, ROW_CNT] = np.minimum(tiles[:, ROW_CNT] - first_row, most_rows)

    # positions of each tile's rows, relative to the run, tile after tile
    counts = tiles[:, ROW_CNT]
    row_ids = plan.rows[np.repeat(tiles[:, ROW_OFF], counts) + _counts_up(counts)]
    relative = plan.positions[row_ids] - np.repeat(tiles[:, BASE_POS], counts)
    starts = np.cumsum(counts) - counts
    last = np.maximum.reduceat(relative, starts)
    tiles[:, TOK1] = np.minimum(tiles[:, TOK1], last + 1)
    if plan.window is not None:
        first = np.minimum.reduceat(relative, starts)
        tiles[:, TOK0] = np.maximum(tiles[:, TOK0], first - plan.window + 1)
    longest_first: Int32Array = tiles[np.argsort(tiles[:, TOK0] - tiles[:, TOK1], kind="stable")]
    return longest_first


def _counts_up(lengths: np.ndarray[Any, np.dtype[Any]]) -> np.ndarray[Any, np.dtype[np.int64]]:
    """0, 1, ... for each length, one after the other: [2, 3] gives 0 1 0 1 2."""
    ends = np.cumsum(lengths, dtype=np.int64)
    total = int(ends[-1]) if len(ends) else 0
    counts: np.ndarray[Any, np.dtype[np.int64]] = np.arange(total) - np.repeat(
        ends - lengths, lengths
    )
    return counts
