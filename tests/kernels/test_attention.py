"""Every backend against brute force, on pools where a stray read shows."""

from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor

from prefixkv.kernels.backend import BackendName, get_backend

if TYPE_CHECKING:
    from tests.kernels.conftest import MakeForest

LAYER = 1
BACKENDS: list[tuple[BackendName, torch.dtype]] = [
    ("cpu", torch.float32),
    ("cpu", torch.bfloat16),
    ("reference", torch.float64),
    ("reference", torch.float32),
    ("reference", torch.bfloat16),
]
TOLERANCE = {torch.float64: 1e-13, torch.float32: 3e-6, torch.bfloat16: 8e-3}
backends = pytest.mark.parametrize(("name", "dtype"), BACKENDS)
both = pytest.mark.parametrize("name", ["cpu", "reference"])


def error(found: Tensor, expected: Tensor) -> float:
    """Relative error in the Euclidean norm; NaN stays NaN."""
    return float((found.double() - expected).norm() / expected.norm())


@backends
@pytest.mark.parametrize(
    ("group", "num_kv_heads", "head_dim", "block_size"),
    [
        (1, 1, 8, 1),
        (2, 2, 24, 2),
        (3, 3, 64, 16),
        (4, 1, 80, 4),
        (7, 2, 96, 16),
        (8, 2, 128, 32),
        (9, 1, 64, 32),
        (16, 1, 24, 4),
        (32, 1, 8, 16),
    ],
)
def test_forests_attend_as_brute_force_does(
    make_forest: "MakeForest",
    name: BackendName,
    dtype: torch.dtype,
    group: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
) -> None:
    """Shared, copied and permuted blocks give what the sequences alone would give."""
    forest = make_forest(
        group,
        num_heads=group * num_kv_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        dtype=dtype,
    )
    backend = get_backend(name, dtype)
    for window in (None, 1, block_size + 1):
        out = backend.attend(forest.pool, LAYER, forest.query, forest.plan(window), forest.scale)

        assert out.dtype == dtype
        assert error(out, forest.truth(window)) < TOLERANCE[dtype]


@backends
@pytest.mark.parametrize("query_len", [1, 2, 5, 15, 16, 17])
def test_each_row_attends_to_exactly_its_window(
    make_forest: "MakeForest", name: BackendName, dtype: torch.dtype, query_len: int
) -> None:
    """With equal scores and one-hot values, the output is the set of attended positions."""
    block_size, head_dim = 4, 32
    lengths = [n for n in (1, 3, 4, 5, 7, 8, 9, 16, 17, 24, 31) if n >= query_len]
    forest = make_forest(
        num_kv_heads=1,
        head_dim=head_dim,
        dtype=dtype,
        contexts=[(-1, 0, n) for n in lengths],
        query_lens=[query_len] * len(lengths),
    )
    forest.show_positions()
    positions = torch.cat([torch.arange(n - query_len, n) for n in lengths])[:, None]
    columns = torch.arange(head_dim)
    for window in (None, 1, block_size - 1, block_size, block_size + 1, 16, 64):
        plan = forest.plan(window)
        out = get_backend(name, dtype).attend(forest.pool, LAYER, forest.query, plan, 1.0)
        expected = (columns <= positions) & (columns > positions - (window or 64))

        assert torch.equal(out > 0, expected[:, None].expand_as(out))


@both
@pytest.mark.parametrize("window", [None, 9])
def test_long_chunks_over_a_cached_beginning(
    make_forest: "MakeForest", name: BackendName, window: int | None
) -> None:
    """A chunk of several tiles sees what lies before it and nothing behind it."""
    forest = make_forest(
        3,
        block_size=16,
        contexts=[(-1, 0, 50), (0, 37, 390), (1, 200, 201)],
        query_lens=[16, 300, 1],
    )

    out = get_backend(name, torch.float32).attend(
        forest.pool, LAYER, forest.query, forest.plan(window), forest.scale
    )

    assert error(out, forest.truth(window)) < 3e-6


@backends
@pytest.mark.parametrize("seed", range(6))
def test_unwritten_slots_are_never_read(
    make_forest: "MakeForest", name: BackendName, dtype: torch.dtype, seed: int
) -> None:
    """Pools that differ in their unwritten slots only give the same bits."""
    outputs = []
    for fill in (torch.nan, 0.0, 1e4):
        forest = make_forest(seed, dtype=dtype, fill=fill)
        plan = forest.plan(window=(None, 6)[seed % 2])
        backend = get_backend(name, dtype)
        outputs.append(backend.attend(forest.pool, LAYER, forest.query, plan, forest.scale))

    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])


@backends
def test_a_decode_row_does_not_depend_on_its_batch(
    make_forest: "MakeForest", name: BackendName, dtype: torch.dtype
) -> None:
    """A row decoded alone has the bits that it has beside others, in any order."""
    forest = make_forest(5, dtype=dtype, query_lens=[1] * 6, longest=200)
    backend = get_backend(name, dtype)
    together = backend.attend(forest.pool, LAYER, forest.query, forest.plan(), forest.scale)
    order = [4, 2, 0, 5, 1, 3]
    shuffled = make_forest(5, dtype=dtype, query_lens=[1] * 6, longest=200)
    shuffled.tables = [forest.tables[i] for i in order]
    shuffled.keys = [forest.keys[i] for i in order]
    out = backend.attend(forest.pool, LAYER, forest.query[order], shuffled.plan(), forest.scale)

    assert torch.equal(together[order], out)
    for i in range(6):
        shuffled.tables, shuffled.keys = [forest.tables[i]], [forest.keys[i]]
        shuffled.query_lens = [1]
        query = forest.query[i : i + 1]
        alone = backend.attend(forest.pool, LAYER, query, shuffled.plan(), forest.scale)

        assert torch.equal(together[i : i + 1], alone)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_number_of_threads_changes_nothing(
    make_forest: "MakeForest", dtype: torch.dtype
) -> None:
    """Work is shared out between threads in whole units, so outputs are equal to the bit."""
    forest = make_forest(7, num_heads=9, num_kv_heads=3, dtype=dtype, query_lens=[1] * 6)
    backend = get_backend("cpu", dtype)
    outputs = []
    for num_threads in (1, 2, 3):
        torch.set_num_threads(num_threads)
        outputs.append(
            backend.attend(forest.pool, LAYER, forest.query, forest.plan(), forest.scale)
        )

    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])


@both
@pytest.mark.parametrize("query_len", [2, 20])
def test_not_a_number_stays_visible(
    make_forest: "MakeForest", name: BackendName, query_len: int
) -> None:
    """A written NaN or infinity in K or V reaches the rows that see it, and no other sequence."""
    for k_or_v in (0, 1):
        for value in (torch.nan, torch.inf):
            forest = make_forest(contexts=[(-1, 0, 30), (-1, 0, 30)], query_lens=[query_len] * 2)
            block = forest.tables[0][2]
            forest.pool[block, LAYER, k_or_v, :, 1] = value
            out = get_backend(name, torch.float32).attend(
                forest.pool, LAYER, forest.query.abs(), forest.plan(), forest.scale
            )
            finite = torch.isfinite(out).flatten(1)

            assert not finite[:query_len].all(dim=1).any()
            assert finite[query_len:].all()


@both
def test_large_scores_do_not_overflow(make_forest: "MakeForest", name: BackendName) -> None:
    """Scores in the thousands pick the largest, as in float64."""
    forest = make_forest(1, longest=150)
    forest.scale = 300.0

    out = get_backend(name, torch.float32).attend(
        forest.pool, LAYER, forest.query, forest.plan(), forest.scale
    )

    assert error(out, forest.truth()) < 1e-3


def test_a_float32_query_reads_a_bfloat16_pool(make_forest: "MakeForest") -> None:
    """The output has the dtype of the query, whatever the pool's."""
    forest = make_forest(2, dtype=torch.bfloat16, query_lens=[1] * 6)
    forest.query = torch.randn(forest.query.shape)

    out = get_backend("cpu", torch.bfloat16).attend(
        forest.pool, LAYER, forest.query, forest.plan(), forest.scale
    )

    assert out.dtype == torch.float32
    assert error(out, forest.truth()) < 3e-6


def test_a_block_id_outside_the_pool_is_refused(make_forest: "MakeForest") -> None:
    """The cpu backend raises instead of reading foreign memory."""
    forest = make_forest()
    forest.tables[0][0] = len(forest.pool)

    with pytest.raises(IndexError, match="outside the pool"):
        get_backend("cpu", torch.float32).attend(
            forest.pool, LAYER, forest.query, forest.plan(), forest.scale
        )
