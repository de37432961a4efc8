"""Triton attention against brute force, on pools where a stray read shows."""

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from general_plans import make_far_pool
from interpreter_guard import guarded
from torch import Tensor
from triton.runtime.errors import InterpreterError

from prefixkv.kernels import triton_backend
from prefixkv.kernels.plan import BASE_POS, Plan, build_plan
from prefixkv.kernels.plan_options import PlanOptions
from prefixkv.kernels.triton_attention import attend_items, empty_partials
from prefixkv.kernels.triton_backend import TritonBackend
from prefixkv.kernels.triton_plan import upload_plan
from prefixkv.kernels.triton_tiles import Tile

if TYPE_CHECKING:
    from tests.kernels.conftest import Forest, MakeForest

LAYER = 1
TOLERANCE = {torch.float32: 3e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
SMALL_TILES = (Tile(16, 16, 4, 2), Tile(32, 16, 4, 2))  # several iterations in short contexts
CPU = torch.device("cpu")


def error(found: Tensor, expected: Tensor) -> float:
    """Relative error in the Euclidean norm; NaN stays NaN."""
    return float((found.double() - expected).norm() / expected.norm())


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of 16 tokens, whatever the sizes of the model."""
    monkeypatch.setattr(triton_backend, "choose_tiles", lambda *_: SMALL_TILES)


@pytest.mark.parametrize(
    ("group", "num_kv_heads", "head_dim", "block_size", "dtype"),
    [
        (1, 1, 8, 4, torch.float32),
        (2, 2, 64, 16, torch.bfloat16),
        (3, 3, 64, 16, torch.float32),
        (4, 1, 80, 4, torch.float16),
        (5, 2, 96, 32, torch.bfloat16),
        (7, 1, 128, 16, torch.float32),
        (8, 1, 128, 64, torch.bfloat16),
        (16, 1, 192, 16, torch.bfloat16),
        (17, 1, 24, 128, torch.float32),
        (32, 1, 256, 32, torch.float16),
    ],
)
def test_forests_attend_as_brute_force_does(
    make_forest: "MakeForest",
    backend: TritonBackend,
    group: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
) -> None:
    """Shared, copied and permuted blocks give what the sequences alone would give."""
    forest = make_forest(
        group,
        num_heads=group * num_kv_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        dtype=dtype,
        num_seqs=4,
        longest=40 if block_size < 32 else 90,
    )
    for window in (None, block_size + 1):
        out = backend.attend(forest.pool, LAYER, forest.query, forest.plan(window), forest.scale)

        assert out.dtype == dtype
        assert error(out, forest.truth(window)) < TOLERANCE[dtype]


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("block_size", [4, 16])
def test_several_tiles_of_tokens_and_rows(
    make_forest: "MakeForest", backend: TritonBackend, seed: int, block_size: int
) -> None:
    """Running maxima and sums carry over, whichever way block ids are read."""
    group = (1, 3, 5)[seed % 3]
    forest = make_forest(seed, num_heads=2 * group, block_size=block_size, num_seqs=3, longest=80)
    window = (None, 21)[seed % 2]

    out = backend.attend(forest.pool, LAYER, forest.query, forest.plan(window), forest.scale)

    assert error(out, forest.truth(window)) < 3e-6


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("query_len", [1, 5, 16, 17])
@pytest.mark.parametrize("block_size", [4, 16])
def test_each_row_attends_to_exactly_its_window(
    make_forest: "MakeForest", backend: TritonBackend, block_size: int, query_len: int
) -> None:
    """With equal scores and one-hot values, the output is the set of attended positions."""
    head_dim = 64
    borders = {k * 16 + d for k in (1, 2, 3) for d in (-1, 0, 1)} | {1, 3, 4, 5, 64}
    lengths = sorted(n for n in borders if n >= query_len)
    forest = make_forest(
        num_heads=2,
        num_kv_heads=1,
        head_dim=head_dim,
        block_size=block_size,
        contexts=[(-1, 0, n) for n in lengths],
        query_lens=[query_len] * len(lengths),
    )
    forest.show_positions()
    positions = torch.cat([torch.arange(n - query_len, n) for n in lengths])[:, None]
    columns = torch.arange(head_dim)
    for window in (None, 1, block_size - 1, block_size, block_size + 1, 64):
        out = backend.attend(forest.pool, LAYER, forest.query, forest.plan(window), 1.0)
        expected = (columns <= positions) & (columns > positions - (window or 99))

        assert torch.equal(out > 0, expected[:, None].expand_as(out))


@pytest.mark.parametrize("num_rows", [4, 5, 6, 20, 21, 22, 43])
def test_row_counts_around_a_tile(
    make_forest: "MakeForest", backend: TritonBackend, num_rows: int
) -> None:
    """With 3 heads a group a tile of 16 holds 5 tokens, one of 64 holds 21."""
    forest = make_forest(
        num_rows,
        num_heads=3,
        num_kv_heads=1,
        dtype=torch.bfloat16,
        contexts=[(-1, 0, num_rows + 9)],
        query_lens=[num_rows],
    )

    out = backend.attend(forest.pool, LAYER, forest.query, forest.plan(), forest.scale)

    assert error(out, forest.truth()) < 8e-3


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("scale", [0.2, 400.0])
@pytest.mark.parametrize("window", [None, 7])
def test_soft_capped_scores(
    make_forest: "MakeForest", backend: TritonBackend, scale: float, window: int | None
) -> None:
    """Scores are softcap * tanh(score / softcap), also where exp(score) would overflow."""
    forest = make_forest(3, num_seqs=4)
    forest.scale = scale

    out = backend.attend(forest.pool, LAYER, forest.query, forest.plan(window), scale, softcap=5.0)

    assert error(out, forest.truth(window, softcap=5.0)) < 1e-5


def test_large_scores_do_not_overflow(make_forest: "MakeForest", backend: TritonBackend) -> None:
    """Scores in the thousands pick the largest, as in float64."""
    forest = make_forest(1, num_seqs=3)
    forest.scale = 300.0

    out = backend.attend(forest.pool, LAYER, forest.query, forest.plan(), forest.scale)

    assert error(out, forest.truth()) < 1e-3


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("window", [None, 6])
def test_unwritten_slots_are_never_read(
    make_forest: "MakeForest", backend: TritonBackend, window: int | None
) -> None:
    """Pools that differ in their unwritten slots only give the same bits."""
    outputs = []
    for fill in (torch.nan, 0.0, 1e4):
        forest = make_forest(5, dtype=torch.bfloat16, fill=fill, num_seqs=4, longest=40)
        plan = forest.plan(window)
        outputs.append(backend.attend(forest.pool, LAYER, forest.query, plan, forest.scale))

    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])


def views_of_same_data(pool: Tensor) -> list[Tensor]:
    """The pool block-major, layer-major, by token before head, K and V interleaved, and padded."""
    orders = [(1, 0, 2, 3, 4, 5), (0, 1, 2, 4, 3, 5), (0, 1, 3, 4, 2, 5), (2, 1, 0, 4, 3, 5)]
    views = [pool]
    for order in orders:
        back = [order.index(i) for i in range(6)]
        views.append(pool.permute(*order).contiguous().permute(*back))
    wide = pool.new_full((*pool.shape[:5], pool.shape[5] + 16), torch.nan)
    wide[..., : pool.shape[5]] = pool
    return [*views, wide[..., : pool.shape[5]]]


@pytest.mark.usefixtures("small_tiles")
def test_strides_change_nothing(make_forest: "MakeForest", backend: TritonBackend) -> None:
    """Every layout of the same data gives the same bits, for strided queries too."""
    forest = make_forest(2, dtype=torch.float16, num_seqs=4, longest=40)
    plan = forest.plan()
    wide = torch.stack((forest.query, forest.query + 1), dim=1)
    expected = backend.attend(forest.pool, LAYER, forest.query, plan, forest.scale)
    for pool in views_of_same_data(forest.pool):
        for query in (wide[:, 0], forest.query.mT.contiguous().mT):
            out = backend.attend(pool, LAYER, query, plan, forest.scale)

            assert torch.equal(out, expected)


def test_a_row_does_not_depend_on_its_batch(
    make_forest: "MakeForest", backend: TritonBackend
) -> None:
    """A sequence alone has the bits that it has beside others, in any order of programs."""
    forest = make_forest(5, num_seqs=4, longest=50)
    together = backend.attend(forest.pool, LAYER, forest.query, forest.plan(), forest.scale)
    ends = np.cumsum(forest.query_lens)
    for i in (0, 3):
        rows = slice(ends[i] - forest.query_lens[i], ends[i])
        plan = build_plan([forest.tables[i]], [forest.query_lens[i]], [forest.context_lens[i]], 4)
        with guarded(i):
            out = backend.attend(forest.pool, LAYER, forest.query[rows], plan, forest.scale)

        assert torch.equal(out, together[rows])


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_with_one_tile_grouping_changes_no_bit(
    make_forest: "MakeForest", dtype: torch.dtype
) -> None:
    """Fixed chunks, and nodes whose rows would take another tile than a row alone."""
    backend = TritonBackend(batch_invariant=True)
    options = PlanOptions(
        token_bytes=1000, partial_bytes=1, tile_rows=16, chunk_tokens=16, fixed_chunks=True
    )
    forest = make_forest(1, dtype=dtype, num_seqs=10, longest=90, query_lens=[1] * 10)
    for window in (None, 37):  # with a window runs do not begin at multiples of a tile
        together, alone = (
            backend.attend(forest.pool, LAYER, forest.query, forest.plan(window, one), forest.scale)
            for one in (options, replace(options, share=False))
        )
        assert torch.equal(together, alone)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, for inf - inf
@pytest.mark.parametrize("k_or_v", [0, 1])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_not_a_number_stays_visible(
    make_forest: "MakeForest", backend: TritonBackend, k_or_v: int, value: float
) -> None:
    """A written NaN or infinity reaches the rows that see it, and no other sequence."""
    forest = make_forest(contexts=[(-1, 0, 30), (-1, 0, 30)], query_lens=[2, 2])
    forest.pool[forest.tables[0][2], LAYER, k_or_v, :, 1] = value

    out = backend.attend(forest.pool, LAYER, forest.query.abs(), forest.plan(), forest.scale)

    finite = torch.isfinite(out).flatten(1)
    assert not finite[:2].all(dim=1).any()
    assert finite[2:].all()


def test_a_row_that_sees_nothing_gives_zero(
    make_forest: "MakeForest", backend: TritonBackend
) -> None:
    """A final item without a visible token gives 0, not NaN."""
    forest = make_forest(contexts=[(-1, 0, 30)] * 3, query_lens=[2, 17, 1])
    plan = forest.plan()
    work = plan.work.copy()
    work[:, BASE_POS] = 100  # every key lies in the future

    out = backend.attend(forest.pool, LAYER, forest.query, replace(plan, work=work), forest.scale)

    assert torch.equal(out, torch.zeros_like(out))


def run_kernel(forest: "Forest", plan: Plan, out: Tensor, pool: Tensor | None = None) -> None:
    """The kernel itself into `out`, without the backend around it."""
    group = forest.query.shape[1] // forest.pool.shape[3]
    device_plan = upload_plan(plan, group, SMALL_TILES, CPU)
    layer_pool = (forest.pool if pool is None else pool)[:, LAYER]
    partials = empty_partials(plan.num_partials, forest.query)
    attend_items(forest.query, layer_pool, device_plan, forest.scale, None, out, partials)


def test_what_surrounds_the_output_stays(make_forest: "MakeForest") -> None:
    """Padding of the head, the token behind the last and rows of no item keep their bytes."""
    forest = make_forest(head_dim=24, num_seqs=3)
    plan = forest.plan()
    num_tokens = len(forest.query)
    wide = torch.full((num_tokens + 1, 4, 32), 77.0)
    skipped = int(plan.work[1, 1])
    kept = replace(plan, work=np.delete(plan.work, 1, axis=0))

    run_kernel(forest, kept, wide[:num_tokens, :, :24])

    rows = torch.ones(num_tokens + 1, dtype=torch.bool)
    first = int(plan.work[1, 0])
    rows[first : first + skipped] = False
    rows[num_tokens] = False
    assert error(wide[rows, :, :24], forest.truth()[rows[:num_tokens]]) < 3e-6
    wide[rows, :, :24] = 77.0
    assert (wide == 77.0).all()


@pytest.mark.parametrize("block_size", [4, 16])
def test_offsets_beyond_int32(make_forest: "MakeForest", block_size: int) -> None:
    """Blocks 2^31 elements and more into the pool are found; no page between is touched."""
    forest = make_forest(num_seqs=2, longest=20, block_size=block_size)
    out = torch.empty_like(forest.query)

    run_kernel(forest, forest.plan(), out, make_far_pool(forest.pool))

    assert error(out, forest.truth()) < 3e-6


def test_a_block_id_outside_the_pool_is_refused(
    make_forest: "MakeForest", backend: TritonBackend
) -> None:
    """The backend raises; the kernel without it runs into the guard."""
    forest = make_forest()
    forest.tables[0][0] = len(forest.pool)
    with pytest.raises(IndexError, match="outside the pool"):
        backend.attend(forest.pool, LAYER, forest.query, forest.plan(), forest.scale)
    forest.tables[0][0] = 10**7  # far away: just behind the pool may lie another argument
    with pytest.raises(InterpreterError, match="out of bounds"):
        run_kernel(forest, forest.plan(), torch.empty_like(forest.query))


def test_a_float32_query_reads_a_bfloat16_pool(
    make_forest: "MakeForest", backend: TritonBackend
) -> None:
    """The output has the dtype of the query, computed in the wider of both."""
    forest = make_forest(2, dtype=torch.bfloat16, query_lens=[1] * 3, num_seqs=3)
    forest.query = torch.randn(forest.query.shape, generator=torch.Generator().manual_seed(1))

    out = backend.attend(forest.pool, LAYER, forest.query, forest.plan(), forest.scale)

    assert out.dtype == torch.float32
    assert error(out, forest.truth()) < 3e-6
