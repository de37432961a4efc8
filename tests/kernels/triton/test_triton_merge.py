"""Items that are not final, and the merge of what they leave."""

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from general_plans import shared_node_plan, split_plan
from torch import Tensor

from prefixkv.kernels.plan import BASE_POS, Plan
from prefixkv.kernels.triton_attention import Partials
from prefixkv.kernels.triton_backend import TritonBackend
from prefixkv.kernels.triton_merge import merge_partials
from prefixkv.kernels.triton_plan import upload_plan
from prefixkv.kernels.triton_tiles import Tile

if TYPE_CHECKING:
    from tests.kernels.conftest import MakeForest

LAYER = 1


@pytest.mark.parametrize("seed", range(6))
def test_splits_merge_to_the_whole(
    make_forest: "MakeForest", backend: TritonBackend, seed: int
) -> None:
    """Cutting runs anywhere, pieces without a visible token included, changes nothing."""
    group = (1, 2, 3)[seed % 3]
    forest = make_forest(seed, num_heads=2 * group, head_dim=24, num_seqs=4, longest=40)
    window = (None, 5)[seed % 2]
    plan = split_plan(forest.plan(window), np.random.default_rng(seed), share=0.7)

    out = backend.attend(forest.pool, LAYER, forest.query, plan, forest.scale)

    torch.testing.assert_close(out.double(), forest.truth(window), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("query_lens", [[1, 1, 1, 1], [7, 1, 12, 3]])
def test_a_shared_node_is_attended_once_for_all(
    make_forest: "MakeForest", backend: TritonBackend, query_lens: list[int]
) -> None:
    """Rows of several sequences in one item over their common blocks give each its own output."""
    contexts = [(-1, 0, 41), (0, 21, 40), (0, 25, 33), (1, 20, 50)]
    forest = make_forest(4, contexts=contexts, query_lens=query_lens)

    out = backend.attend(
        forest.pool, LAYER, forest.query, shared_node_plan(forest.plan(), 5), forest.scale
    )

    torch.testing.assert_close(out.double(), forest.truth(), rtol=1e-5, atol=1e-5)


def test_pieces_without_a_visible_token_merge_to_zero(
    make_forest: "MakeForest", backend: TritonBackend
) -> None:
    """If all pieces are empty the output is 0, not NaN."""
    forest = make_forest(contexts=[(-1, 0, 30)] * 3, query_lens=[2, 9, 1])
    plan = split_plan(forest.plan(), np.random.default_rng(0), share=1.0)
    work = plan.work.copy()
    work[:, BASE_POS] = 100  # every key lies in the future

    out = backend.attend(forest.pool, LAYER, forest.query, replace(plan, work=work), forest.scale)

    assert torch.equal(out, torch.zeros_like(out))


def merge(partials: Partials, lists: list[list[int]], out: Tensor) -> None:
    """Merge partials by one list a token into `out`."""
    plan = Plan(
        work=np.empty((0, 8), np.int32),
        rows=np.empty(0, np.int32),
        positions=np.zeros(len(lists), np.int32),
        blocks=np.empty(0, np.int32),
        merge_indptr=np.cumsum([0, *map(len, lists)], dtype=np.int32),
        merge_slots=np.array([slot for row in lists for slot in row], np.int32),
        num_partials=len(partials.acc),
        block_size=4,
        window=None,
    )
    tile = Tile(16, 16, 4, 2)
    merge_partials(partials, upload_plan(plan, 1, (tile, tile), torch.device("cpu")), out)


def random_partials(num_partials: int, num_heads: int = 2, head_dim: int = 24) -> Partials:
    """Partials of random weights; the last one is empty."""
    generator = torch.Generator().manual_seed(num_partials)
    acc = torch.randn(num_partials, num_heads, head_dim, generator=generator)
    peak = torch.randn(num_partials, num_heads, generator=generator) * 9
    total = torch.rand(num_partials, num_heads, generator=generator) + 0.5
    acc[-1], peak[-1], total[-1] = 0.0, -torch.inf, 0.0
    return Partials(acc, peak, total)


def merged_in_float64(partials: Partials, slots: list[int]) -> Tensor:
    """The merge by its definition."""
    acc, peak, total = (part[slots].double() for part in partials)
    weights = torch.exp2(peak - peak.amax(0))
    return (acc * weights[..., None]).sum(0) / (total * weights).sum(0)[..., None]


def test_merges_are_log_sum_exp() -> None:
    """Any list of partials gives what the definition gives, in any order up to rounding."""
    partials = random_partials(7)
    lists = [[0], [3, 1], [1, 3], [0, 1, 2, 3, 4, 5], [5, 4, 3, 2, 1, 0]]
    out = torch.empty(len(lists), 2, 24)

    merge(partials, lists, out)

    for token, slots in enumerate(lists):
        expected = merged_in_float64(partials, slots)
        torch.testing.assert_close(out[token].double(), expected, rtol=1e-5, atol=1e-6)


def test_an_empty_partial_is_the_identity() -> None:
    """Bit for bit, wherever it stands; alone or twice it gives 0."""
    partials = random_partials(4)
    out = torch.empty(6, 2, 24)

    merge(partials, [[0, 1], [3, 0, 1], [0, 3, 1], [0, 1, 3, 3], [3], [3, 3]], out)

    for token in (1, 2, 3):
        assert torch.equal(out[token], out[0])
    assert torch.equal(out[4:], torch.zeros_like(out[4:]))


def test_rows_without_partials_stay() -> None:
    """The merge writes the head's elements of its own rows and nothing beside them."""
    wide = torch.full((4, 2, 32), 77.0)

    merge(random_partials(3), [[], [0, 1], []], wide[:3, :, :24])

    assert (wide[1, :, :24] != 77.0).all()
    wide[1, :, :24] = 77.0
    assert (wide == 77.0).all()


def test_peaks_far_apart_do_not_overflow() -> None:
    """The larger one wins, as in float64."""
    partials = random_partials(3)
    partials.peak[0], partials.peak[1] = -3000.0, 3000.0
    out = torch.empty(2, 2, 24)

    merge(partials, [[0, 1], [1, 0]], out)

    expected = partials.acc[1] / partials.total[1][:, None]
    torch.testing.assert_close(out, torch.stack((expected, expected)), rtol=1e-6, atol=0)
