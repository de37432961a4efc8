"""What build_plan names, and what it refuses."""

from array import array

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixkv.kernels.plan import (
    BASE_POS,
    BLK_OFF,
    FINAL,
    ROW_CNT,
    ROW_OFF,
    TOK0,
    TOK1,
    build_plan,
)

lengths = st.lists(
    st.integers(1, 40).flatmap(lambda n: st.tuples(st.integers(1, n), st.just(n))), max_size=5
)


@given(
    lengths,
    st.sampled_from([1, 2, 4, 16]),
    st.none() | st.integers(1, 50),
    st.randoms(use_true_random=False),
)
def test_a_run_holds_exactly_what_its_rows_can_see(
    sequences: list[tuple[int, int]], block_size: int, window: int | None, random: object
) -> None:
    """Blocks, tokens and positions of every item follow from the tables; nothing more is named."""
    tables = [array("i", range(100 * i, 100 * i + 45)) for i in range(len(sequences))]
    plan = build_plan(
        tables, [q for q, _ in sequences], [n for _, n in sequences], block_size, window
    )

    assert len(plan.work) == len(sequences)
    row = 0
    for i, (item, (num_queries, context)) in enumerate(
        zip(plan.work.tolist(), sequences, strict=True)
    ):
        start = context - num_queries
        first = 0 if window is None else max(0, start - window + 1)
        rows = plan.rows[item[ROW_OFF] : item[ROW_OFF] + item[ROW_CNT]].tolist()
        assert rows == list(range(row, row + num_queries))
        assert plan.positions[rows].tolist() == list(range(start, context))
        assert item[BASE_POS] + item[TOK0] == first
        assert item[BASE_POS] + item[TOK1] == context
        assert item[BASE_POS] == first // block_size * block_size
        assert item[FINAL] == 1
        num_blocks = -(-context // block_size) - first // block_size
        blocks = plan.blocks[item[BLK_OFF] : item[BLK_OFF] + num_blocks].tolist()
        assert blocks == [100 * i + first // block_size + k for k in range(num_blocks)]
        row += num_queries
    assert len(plan.positions) == row
    assert plan.num_partials == 0
    assert len(plan.merge_indptr) == row + 1


def test_all_arrays_are_int32_and_tables_stay_free() -> None:
    """A growing array can be appended to while a plan of it lives."""
    table = array("i", [3, 1])
    plan = build_plan([table], [1], [5], 4)
    table.append(7)

    for name in ("work", "rows", "positions", "blocks", "merge_indptr", "merge_slots"):
        values = getattr(plan, name)
        assert values.dtype == np.int32
        assert values.flags.c_contiguous


@pytest.mark.parametrize(
    ("tables", "query_lens", "context_lens", "window"),
    [
        ([[1]], [1, 1], [1], None),
        ([[1]], [0], [1], None),
        ([[1]], [3], [2], None),
        ([[1]], [1], [5], None),
        ([[1]], [1], [1], 0),
    ],
)
def test_contradicting_lengths_are_refused(
    tables: list[list[int]], query_lens: list[int], context_lens: list[int], window: int | None
) -> None:
    """Lengths that cannot be are a ValueError with the numbers."""
    with pytest.raises(ValueError, match=r"sequence 0|block tables|window"):
        build_plan(tables, query_lens, context_lens, 4, window)
