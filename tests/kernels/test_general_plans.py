"""Plans beyond one run per sequence: splits, shared nodes, empty partials."""

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from prefixkv.kernels.backend import BackendName, get_backend
from prefixkv.kernels.plan import BASE_POS, DST_SLOT, FINAL, ROW_CNT, ROW_OFF, TOK0, TOK1, Plan

if TYPE_CHECKING:
    from tests.kernels.conftest import Forest, MakeForest

LAYER = 1
both = pytest.mark.parametrize("name", ["cpu", "reference"])


def split_plan(plan: Plan, rng: np.random.Generator, share: float) -> Plan:
    """Cut a share of the items at random tokens, empty pieces included; shuffle the items."""
    work: list[list[int]] = []
    slots: list[list[int]] = [[] for _ in plan.positions]
    num_partials = 0
    for item in plan.work.tolist():
        if rng.random() >= share:
            work.append(item)
            continue
        cuts = sorted(int(cut) for cut in rng.integers(item[TOK0], item[TOK1] + 1, 3))
        for tok0, tok1 in zip([item[TOK0], *cuts], [*cuts, item[TOK1]], strict=True):
            piece = [*item[:TOK0], tok0, tok1, num_partials, 0, item[BASE_POS]]
            work.append(piece)
            for r in range(item[ROW_CNT]):
                slots[plan.rows[item[ROW_OFF] + r]].append(num_partials + r)
            num_partials += item[ROW_CNT]
    return replace(
        plan,
        work=np.array([work[i] for i in rng.permutation(len(work))], np.int32),
        merge_indptr=np.cumsum([0, *map(len, slots)], dtype=np.int32),
        merge_slots=np.array([slot for row in slots for slot in row], np.int32),
        num_partials=num_partials,
    )


def shared_node_plan(forest: "Forest", num_shared_blocks: int) -> Plan:
    """All rows read the common first blocks as one item, then each sequence its own rest."""
    plan = forest.plan()
    block_size, num_rows = plan.block_size, len(plan.rows)
    num_tokens = num_shared_blocks * block_size
    work = [[0, num_rows, 0, 0, num_tokens, 0, 0, 0]]
    for item in plan.work.tolist():
        row_off = item[ROW_OFF]
        rest = [*item]
        rest[TOK0], rest[DST_SLOT], rest[FINAL] = num_tokens, num_rows + row_off, 0
        work.append(rest)
    slots = np.arange(2 * num_rows, dtype=np.int32).reshape(2, num_rows).T.reshape(-1)
    return replace(
        plan,
        work=np.array(work, np.int32),
        merge_indptr=np.arange(0, 2 * num_rows + 1, 2, dtype=np.int32),
        merge_slots=np.ascontiguousarray(slots),
        num_partials=2 * num_rows,
    )


@both
@pytest.mark.parametrize("seed", range(8))
def test_splits_merge_to_the_whole(make_forest: "MakeForest", name: BackendName, seed: int) -> None:
    """Cutting runs anywhere, pieces without a visible token included, changes nothing."""
    forest = make_forest(seed)
    window = (None, 5)[seed % 2]
    plan = split_plan(forest.plan(window), np.random.default_rng(seed), share=0.7)

    out = get_backend(name, torch.float32).attend(
        forest.pool, LAYER, forest.query, plan, forest.scale
    )

    torch.testing.assert_close(out.double(), forest.truth(window), rtol=1e-5, atol=1e-5)


@both
@pytest.mark.parametrize("query_lens", [[1, 1, 1, 1], [7, 1, 12, 3]])
def test_a_shared_node_is_attended_once_for_all(
    make_forest: "MakeForest", name: BackendName, query_lens: list[int]
) -> None:
    """Rows of several sequences in one item over their common blocks give each its own output."""
    contexts = [(-1, 0, 41), (0, 21, 40), (0, 25, 33), (1, 20, 50)]
    forest = make_forest(4, contexts=contexts, query_lens=query_lens)

    out = get_backend(name, torch.float32).attend(
        forest.pool, LAYER, forest.query, shared_node_plan(forest, 5), forest.scale
    )

    torch.testing.assert_close(out.double(), forest.truth(), rtol=1e-5, atol=1e-5)


@both
def test_a_row_that_sees_nothing_gives_zero(make_forest: "MakeForest", name: BackendName) -> None:
    """Final items and merges without a visible token give 0, not NaN."""
    forest = make_forest(contexts=[(-1, 0, 30)] * 3, query_lens=[2, 17, 1])
    plan = forest.plan()
    work = plan.work.copy()
    work[:, BASE_POS] = 100  # every key lies in the future
    blind = replace(plan, work=work)

    for empty in (blind, split_plan(blind, np.random.default_rng(0), share=1.0)):
        out = get_backend(name, torch.float32).attend(
            forest.pool, LAYER, forest.query, empty, forest.scale
        )

        assert torch.equal(out, torch.zeros_like(out))
