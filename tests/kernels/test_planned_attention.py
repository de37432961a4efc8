"""Attention over plans that share and split, on pools where a stray read shows."""

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from prefixkv.kernels.backend import BackendName, get_backend
from prefixkv.kernels.plan import DST_SLOT, FINAL, ROW_CNT
from prefixkv.kernels.plan_options import PlanOptions

if TYPE_CHECKING:
    from tests.kernels.conftest import Forest, MakeForest

LAYER = 1
both = pytest.mark.parametrize("name", ["cpu", "reference"])
# partials cost next to nothing, so that all that can be shared is
EAGER = PlanOptions(token_bytes=1000, partial_bytes=1, tile_rows=15)


def attend(
    forest: "Forest", name: BackendName, options: PlanOptions | None, window: int | None
) -> torch.Tensor:
    """The forest's attention by a plan under these options."""
    plan = forest.plan(window, options)
    backend = get_backend(name, forest.pool.dtype)
    return backend.attend(forest.pool, LAYER, forest.query, plan, forest.scale)


@both
@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("chunk_blocks", [None, 1, 3])
def test_planned_forests_attend_as_brute_force_does(
    make_forest: "MakeForest", name: BackendName, seed: int, chunk_blocks: int | None
) -> None:
    """Forks of forks, decode rows beside chunks of prompts, windows: all give the truth."""
    rng = np.random.default_rng(seed)
    block_size = (1, 2, 4)[seed % 3]
    forest = make_forest(
        seed, block_size=block_size, num_seqs=10, longest=40 * block_size, head_dim=16
    )
    if seed % 2:
        forest = make_forest(
            seed, block_size=block_size, num_seqs=10, longest=60, query_lens=[1] * 10
        )
    for window in (None, int(rng.integers(1, 60))):
        for fixed_chunks in (False, True):
            options = replace(
                EAGER,
                tile_rows=int(rng.integers(1, 16)),
                chunk_tokens=chunk_blocks and chunk_blocks * block_size,
                fixed_chunks=fixed_chunks and chunk_blocks is not None,
            )
            out = attend(forest, name, options, window)

            torch.testing.assert_close(out.double(), forest.truth(window), rtol=1e-5, atol=1e-5)


@both
def test_there_is_something_to_share(make_forest: "MakeForest", name: BackendName) -> None:
    """Three levels of forks in one plan, over shared, copied and half-filled blocks."""
    contexts = [(-1, 0, 90), (0, 70, 80), (0, 70, 75), (1, 78, 79), (1, 77, 95), (0, 33, 60)]
    forest = make_forest(3, contexts=contexts, query_lens=[1, 3, 1, 1, 2, 1])
    plan = forest.plan(None, EAGER)

    assert sorted(plan.work[plan.work[:, FINAL] == 0, ROW_CNT].tolist())[-3:] == [6, 8, 9]
    out = attend(forest, name, EAGER, None)
    torch.testing.assert_close(out.double(), forest.truth(), rtol=1e-5, atol=1e-5)


@both
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seed", range(8))
def test_fixed_chunks_give_the_same_bits_grouped_or_not(
    make_forest: "MakeForest", name: BackendName, dtype: torch.dtype, seed: int
) -> None:
    """With fixed chunks the grouping decides who reads together, and changes no bit."""
    forest = make_forest(seed, dtype=dtype, num_seqs=10, longest=150)
    for window in (None, 37):
        for tile_rows in (3, 15):
            options = replace(EAGER, tile_rows=tile_rows, chunk_tokens=16, fixed_chunks=True)
            grouped = attend(forest, name, options, window)
            alone = attend(forest, name, replace(options, share=False), window)

            assert torch.equal(grouped, alone)


@both
def test_with_fixed_chunks_a_row_does_not_depend_on_its_batch(
    make_forest: "MakeForest", name: BackendName
) -> None:
    """A row decoded alone has the bits that it has in a group, whatever its group."""
    options = replace(EAGER, chunk_tokens=16, fixed_chunks=True)
    contexts = [(-1, 0, 90), (0, 70, 80), (0, 70, 75), (1, 78, 79), (1, 77, 95), (0, 33, 60)]
    forest = make_forest(3, contexts=contexts, query_lens=[1] * 6)
    together = attend(forest, name, options, None)
    for i in range(6):
        one = replace(
            forest,
            tables=[forest.tables[i]],
            keys=[forest.keys[i]],
            query_lens=[1],
            query=forest.query[i : i + 1],
        )
        assert torch.equal(attend(one, name, options, None), together[i : i + 1])


def test_a_single_partial_merges_to_what_is_final(make_forest: "MakeForest") -> None:
    """A row whose one partial is merged has the bits of a row that needs no merge."""
    forest = make_forest(1, query_lens=[1] * 6)
    plan = forest.plan()
    work = plan.work.copy()
    work[:, FINAL], work[:, DST_SLOT] = 0, range(6)
    partial = replace(
        plan,
        work=work,
        merge_indptr=np.arange(7, dtype=np.int32),
        merge_slots=np.arange(6, dtype=np.int32),
        num_partials=6,
    )
    backend = get_backend("cpu", torch.float32)
    outputs = [
        backend.attend(forest.pool, LAYER, forest.query, p, forest.scale) for p in (plan, partial)
    ]
    assert torch.equal(*outputs)
