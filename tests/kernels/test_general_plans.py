"""Plans beyond one run per sequence: splits, shared nodes, empty partials."""

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from general_plans import shared_node_plan, split_plan

from prefixkv.kernels.backend import BackendName, get_backend
from prefixkv.kernels.plan import BASE_POS

if TYPE_CHECKING:
    from tests.kernels.conftest import MakeForest

LAYER = 1
both = pytest.mark.parametrize("name", ["cpu", "reference"])


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
        forest.pool, LAYER, forest.query, shared_node_plan(forest.plan(), 5), forest.scale
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
