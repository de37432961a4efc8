"""Row tiles of a plan: pure arithmetic of the host, no kernel runs."""

import sys
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from prefixkv.kernels.backend import get_backend
from prefixkv.kernels.plan import BASE_POS, BLK_OFF, DST_SLOT, FINAL, ROW_CNT, ROW_OFF, TOK0, TOK1
from prefixkv.kernels.triton_plan import tile_rows, upload_plan
from prefixkv.kernels.triton_tiles import choose_tiles

if TYPE_CHECKING:
    from tests.kernels.conftest import MakeForest


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("window", [None, 1, 9])
def test_tiles_hold_each_row_once_with_all_it_sees(
    make_forest: "MakeForest", seed: int, window: int | None
) -> None:
    """Every tile is small enough; its tokens are those that its rows see, and no more."""
    forest = make_forest(seed)
    plan = forest.plan(window)
    most_rows = seed + 1
    tiles = tile_rows(plan, plan.work, most_rows)
    rows = [
        plan.rows[row_off : row_off + row_cnt]
        for row_off, row_cnt in tiles[:, [ROW_OFF, ROW_CNT]].tolist()
    ]

    offsets = np.argsort(tiles[:, ROW_OFF])
    assert np.concatenate([rows[n] for n in offsets]).tolist() == plan.rows.tolist()
    whole = {item[BLK_OFF]: item for item in plan.work.tolist()}
    for tile, tokens in zip(tiles.tolist(), rows, strict=True):
        item = whole[tile[BLK_OFF]]
        positions = plan.positions[tokens] - tile[BASE_POS]
        first = 0 if window is None else max(0, int(positions.min()) - window + 1)
        assert 1 <= tile[ROW_CNT] <= most_rows
        assert tile[TOK0] == max(item[TOK0], first)
        assert tile[TOK1] == min(item[TOK1], positions.max() + 1)
        assert tile[DST_SLOT] - item[DST_SLOT] == tile[ROW_OFF] - item[ROW_OFF]
        assert tile[FINAL] == item[FINAL]
        assert tile[BASE_POS] == item[BASE_POS]


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("window", [None, 9])
def test_long_tiles_come_first(make_forest: "MakeForest", seed: int, window: int | None) -> None:
    """By tokens read, most first; equally long ones by their rows, as in the plan."""
    plan = make_forest(seed).plan(window)
    tiles = tile_rows(plan, plan.work, seed + 1)

    keys = [(tile[TOK0] - tile[TOK1], tile[ROW_OFF]) for tile in tiles.tolist()]
    assert keys == sorted(keys)


@pytest.mark.parametrize("group", [1, 3, 16, 17, 32])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("head_dim", [8, 64, 80, 128, 192, 256])
def test_a_tile_holds_a_token_and_is_a_power_of_two(
    group: int, dtype: torch.dtype, head_dim: int
) -> None:
    """Whatever the model, both kinds of items can be cut."""
    for tile in choose_tiles(dtype, head_dim, group):
        assert tile.rows >= group
        for size in (tile.rows, tile.tokens):
            assert size >= 16
            assert size & (size - 1) == 0


def test_items_go_where_they_fit(make_forest: "MakeForest") -> None:
    """An item of few rows stays whole; one of many is cut into the larger tiles."""
    forest = make_forest(contexts=[(-1, 0, 90)] * 3, query_lens=[5, 6, 44])
    tiles = choose_tiles(torch.bfloat16, 16, 3)  # 16 and 64 rows: 5 and 21 tokens

    plan = upload_plan(forest.plan(), 3, tiles, torch.device("cpu"))

    assert plan.few_rows[:, ROW_CNT].tolist() == [5]
    assert plan.many_rows[:, ROW_CNT].tolist() == [6, 2, 21, 21]
    assert plan.many_rows[:, TOK1].tolist() == [90, 90, 88, 67]
    assert len(plan.merged_tokens) == 0


def test_a_plan_of_nothing_has_no_tiles(make_forest: "MakeForest") -> None:
    """No work, no blocks: nothing to launch, and no block id to refuse."""
    forest = make_forest()
    forest.tables, forest.keys, forest.query_lens = [], [], []

    plan = upload_plan(forest.plan(), 1, choose_tiles(torch.float32, 16, 1), torch.device("cpu"))

    assert len(plan.few_rows) == len(plan.many_rows) == 0
    assert (plan.smallest_block, plan.largest_block) == (0, -1)


def test_where_it_cannot_run_it_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a device and without the interpreter, and without triton, a ValueError."""
    from prefixkv.kernels import triton_backend

    monkeypatch.setattr(triton_backend, "INTERPRETED", False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="needs a CUDA device, or TRITON_INTERPRET=1"):
        get_backend("triton", torch.float32)

    backend = triton_backend.TritonBackend()
    with pytest.raises(ValueError, match="a pool on a CUDA device, not on cpu"):
        backend.copy_blocks(torch.zeros(2, 1, 2, 1, 4, 8), [(0, 1, 4)])

    monkeypatch.setitem(sys.modules, "prefixkv.kernels.triton_backend", None)
    with pytest.raises(ValueError, match="cannot be imported"):
        get_backend("triton", torch.float32)
