"""Plans that share and split: exact coverage, fewest bytes, and what is never shared."""

from array import array
from collections import Counter, defaultdict
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from slow_planner import Batch, SlowPlanner, find_nodes, read_positions

from prefixkv.kernels.grouping import choose_nodes, list_runs
from prefixkv.kernels.plan import (
    BASE_POS,
    BLK_OFF,
    DST_SLOT,
    FINAL,
    ROW_CNT,
    ROW_OFF,
    TOK0,
    TOK1,
    Plan,
    build_plan,
)
from prefixkv.kernels.plan_items import cut_runs, list_merges
from prefixkv.kernels.plan_options import PlanOptions, plan_bytes
from prefixkv.kernels.planner import build_plans, compile_planner
from prefixkv.kernels.prefix_tree import build_tree

SMALL = PlanOptions(token_bytes=8, partial_bytes=1, tile_rows=4)


def plan_batch(batch: Batch, options: PlanOptions) -> Plan:
    """The plan of a batch for its window."""
    tables = [array("i", table) for table in batch.tables]
    lengths = (batch.query_lens, batch.context_lens, batch.block_size)
    return build_plans(tables, *lengths, [batch.window], options)[batch.window]


@st.composite
def batches(draw: st.DrawFn, most_rows: int = 6) -> Batch:
    """Forks of forks, and ids that are equal at a depth by chance behind different ones."""
    block_size = draw(st.sampled_from([1, 2, 4]))
    tables: list[list[int]] = []
    query_lens, context_lens = [], []
    for _ in range(draw(st.integers(1, 7))):
        num_blocks = draw(st.integers(1, 7))
        parent = draw(st.sampled_from([[], *tables]))
        begin = parent[: draw(st.integers(0, 7))][:num_blocks]
        rest = draw(st.lists(st.integers(1, 3), min_size=num_blocks, max_size=num_blocks))
        table = begin + rest[len(begin) :]
        context = draw(st.integers((num_blocks - 1) * block_size + 1, num_blocks * block_size))
        tables.append([*table, 10**6, -7])
        context_lens.append(context)
        query_lens.append(draw(st.integers(1, min(context, most_rows))))
    window = draw(st.none() | st.integers(1, 30))
    return Batch(tables, query_lens, context_lens, block_size, window)


@st.composite
def options_for(draw: st.DrawFn, block_size: int, share: bool = True) -> PlanOptions:
    """Costs and chunks of all kinds."""
    chunk_blocks = draw(st.none() | st.integers(1, 4))
    return PlanOptions(
        token_bytes=draw(st.integers(1, 8)),
        partial_bytes=draw(st.integers(1, 40)),
        tile_rows=draw(st.integers(1, 5)),
        chunk_tokens=None if chunk_blocks is None else chunk_blocks * block_size,
        fixed_chunks=chunk_blocks is not None and draw(st.booleans()),
        share=share,
        split_prompts=draw(st.booleans()),
    )


def items_of_slots(plan: Plan) -> dict[int, tuple[int, int, int]]:
    """(query token, begin, end) of every partial; each is written once."""
    found = {}
    for item in plan.work.tolist():
        if not item[FINAL]:
            for r in range(item[ROW_CNT]):
                slot = item[DST_SLOT] + r
                assert slot not in found
                found[slot] = (
                    int(plan.rows[item[ROW_OFF] + r]),
                    item[BASE_POS] + item[TOK0],
                    item[BASE_POS] + item[TOK1],
                )
    return found


def all_pieces(plan: Plan) -> set[tuple[int, int, int]]:
    """(query token, begin, end) of all that items read."""
    return {
        (token, item[BASE_POS] + item[TOK0], item[BASE_POS] + item[TOK1])
        for item in plan.work.tolist()
        for token in plan.rows[item[ROW_OFF] : item[ROW_OFF] + item[ROW_CNT]].tolist()
    }


@given(st.data())
def test_every_visible_token_is_read_once_from_its_own_block(data: st.DataObject) -> None:
    """Each row reads each position that it sees by one item, from the block of its table."""
    batch = data.draw(batches())
    plan = plan_batch(batch, data.draw(options_for(batch.block_size)))

    found = read_positions(plan)
    assert found == [
        {position: [block] for position, block in row.items()} for row in batch.truth()
    ]


@given(st.data())
def test_merge_lists_name_the_partials_of_a_row_in_order(data: st.DataObject) -> None:
    """A row has one final item, or merges all its partials, by position."""
    batch = data.draw(batches())
    options = data.draw(options_for(batch.block_size))
    plan = plan_batch(batch, options)

    slots = items_of_slots(plan)
    assert sorted(slots) == list(range(plan.num_partials))
    assert plan.merge_indptr[-1] == plan.num_partials == len(plan.merge_slots)
    finals = Counter(
        token
        for item in plan.work.tolist()
        if item[FINAL]
        for token in plan.rows[item[ROW_OFF] : item[ROW_OFF] + item[ROW_CNT]].tolist()
    )
    for token in range(len(plan.positions)):
        begin, end = plan.merge_indptr[token : token + 2]
        merged = [slots[slot] for slot in plan.merge_slots[begin:end].tolist()]
        assert all(piece[0] == token for piece in merged)
        assert merged == sorted(merged)
        assert finals[token] == (1 if begin == end else 0)


@given(st.data())
def test_never_more_bytes_than_ungrouped(data: st.DataObject) -> None:
    """Sharing lowers what a plan moves, or leaves the plan as it is."""
    batch = data.draw(batches())
    options = data.draw(options_for(batch.block_size))
    grouped = plan_batch(batch, options)
    plain = plan_batch(batch, replace(options, share=False))

    more, less = plan_bytes(plain, options), plan_bytes(grouped, options)
    assert less.total <= more.total
    if options.fixed_chunks:
        assert all_pieces(grouped) == all_pieces(plain)
        assert less.partials == more.partials


@given(st.data())
def test_it_groups_as_the_slow_planner_does(data: st.DataObject) -> None:
    """The nodes that are kept are those that counting whole plans keeps."""
    batch = data.draw(batches())
    # a window's front that only some rows see is judged as if all did
    assume(batch.window is None or set(batch.query_lens) == {1})
    options = data.draw(options_for(batch.block_size))
    plan = plan_batch(batch, options)

    slow = SlowPlanner(batch, options)
    assert all_pieces(plan) == slow.pieces()
    assert plan_bytes(plan, options) == slow.count(slow.kept)


def test_a_node_counts_what_an_outer_one_would_read_twice() -> None:
    """Three rows in tiles of two: the block of all three is worth reading together for two."""
    tables = [[1, 2, 3, 4, 5], [1, 2, 3, 4, 6], [1, 7]]
    batch = Batch(tables, [1, 1, 1], [5, 5, 2], 1)
    options = PlanOptions(token_bytes=8, partial_bytes=7, tile_rows=2)
    plan = plan_batch(batch, options)

    assert sorted(p for p in all_pieces(plan) if p[2] == 4) == [(0, 0, 4), (1, 0, 4)]
    assert plan_bytes(plan, options) == SlowPlanner(batch, options).count(
        [find_nodes(batch, options)[0]]
    )


@given(st.data())
def test_only_full_blocks_before_all_queries_are_shared(data: st.DataObject) -> None:
    """Rows of several sequences meet in blocks that all of them see entirely."""
    batch = data.draw(batches())
    plan = plan_batch(batch, data.draw(options_for(batch.block_size)))

    sequence_of = np.repeat(np.arange(len(batch.query_lens)), batch.query_lens)
    for item in plan.work.tolist():
        tokens = plan.rows[item[ROW_OFF] : item[ROW_OFF] + item[ROW_CNT]]
        members = set(sequence_of[tokens].tolist())
        if len(members) > 1:
            begin, end = item[BASE_POS] + item[TOK0], item[BASE_POS] + item[TOK1]
            assert begin % batch.block_size == end % batch.block_size == 0
            assert end <= min(batch.context_lens[i] - batch.query_lens[i] for i in members)
            for token in tokens.tolist():
                seen = batch.visible(int(plan.positions[token]))
                assert seen.start <= begin
                assert end <= seen.stop


@given(st.data())
def test_without_sharing_or_splits_it_is_the_plain_plan(data: st.DataObject) -> None:
    """Sequences with different first blocks and one chunk each give exactly `build_plan`'s."""
    batch = data.draw(batches())
    tables = [[100 + i, *table[1:]] for i, table in enumerate(batch.tables)]
    plan = plan_batch(replace(batch, tables=tables), SMALL)

    lengths = (batch.query_lens, batch.context_lens, batch.block_size)
    plain = build_plan(tables, *lengths, batch.window)
    for name in ("work", "rows", "positions", "blocks", "merge_indptr", "merge_slots"):
        assert np.array_equal(getattr(plan, name), getattr(plain, name))
    assert (plan.num_partials, plan.window) == (plain.num_partials, plain.window)


@given(st.data())
def test_without_sharing_it_is_the_split_plan(data: st.DataObject) -> None:
    """Also where long contexts are split: not an item, partial or launch more."""
    batch = data.draw(batches())
    options = data.draw(options_for(batch.block_size))
    apart = replace(batch, tables=[[100 + i, *t[1:]] for i, t in enumerate(batch.tables)])
    plan, split = (plan_batch(apart, replace(options, share=share)) for share in (True, False))

    for name in ("work", "rows", "positions", "blocks", "merge_indptr", "merge_slots"):
        assert np.array_equal(getattr(plan, name), getattr(split, name))
    assert plan.num_partials == split.num_partials


@given(st.data())
def test_arrays_are_as_kernels_take_them(data: st.DataObject) -> None:
    """All int32 and contiguous; no item has more rows than a tile, save a long prompt's own."""
    batch = data.draw(batches())
    options = data.draw(options_for(batch.block_size))
    plan = plan_batch(batch, options)

    for name in ("work", "rows", "positions", "blocks", "merge_indptr", "merge_slots"):
        values = getattr(plan, name)
        assert values.dtype == np.int32
        assert values.flags.c_contiguous
    for item in plan.work.tolist():
        assert 0 <= item[TOK0] < item[TOK1]
        assert item[BLK_OFF] + -(-item[TOK1] // batch.block_size) <= len(plan.blocks)
        assert item[FINAL] or item[ROW_CNT] <= options.tile_rows


def reads_of_blocks(plan: Plan, tile_rows: int) -> dict[int, int]:
    """How often each block is read, once for each tile of an item's rows."""
    reads: dict[int, int] = defaultdict(int)
    for item in plan.work.tolist():
        for n in range(item[TOK0] // plan.block_size, -(-item[TOK1] // plan.block_size)):
            reads[int(plan.blocks[item[BLK_OFF] + n])] += -(-item[ROW_CNT] // tile_rows)
    return reads


GPU = PlanOptions.for_heads(32, 8, 128, 2, tile_rows=128 // 4, chunk_tokens=1024)


def test_a_shared_prompt_is_read_once() -> None:
    """32 sequences that share 4,096 of 4,224 tokens read every block once in all."""
    tables = [[*range(256), *range(1000 * (i + 1), 1000 * (i + 1) + 8)] for i in range(32)]
    batch = Batch(tables, [1] * 32, [4224] * 32, 16)
    plan = plan_batch(batch, GPU)

    reads = reads_of_blocks(plan, GPU.tile_rows)
    assert len(reads) == 256 + 32 * 8
    assert set(reads.values()) == {1}
    shared = plan.work[plan.work[:, ROW_CNT] > 1]
    assert shared[:, ROW_CNT].tolist() == [32] * 4  # one node, whose rows fit a tile, in 4 chunks
    assert shared[:, [TOK0, TOK1]].tolist() == [[t, t + 1024] for t in range(0, 4096, 1024)]
    moved = plan_bytes(plan, GPU)
    unique = len(reads) * 16 * GPU.token_bytes
    assert moved.kv == unique
    assert moved.partials <= 0.2 * unique
    assert plan_bytes(plan_batch(batch, replace(GPU, share=False)), GPU).kv > 7 * moved.kv


def test_beams_of_beams_are_read_once() -> None:
    """32 branches of 4 branches of a prompt: three levels, each block read once."""
    tables = [
        [*range(64), *range(100 * (1 + i // 8), 100 * (1 + i // 8) + 32), 1000 + i, 2000 + i]
        for i in range(32)
    ]
    batch = Batch(tables, [1] * 32, [16 * 98 - 3] * 32, 16)
    plan = plan_batch(batch, GPU)

    reads = reads_of_blocks(plan, GPU.tile_rows)
    assert len(reads) == 64 + 4 * 32 + 32 * 2
    assert set(reads.values()) == {1}
    row_counts = Counter(plan.work[:, ROW_CNT].tolist())
    assert row_counts == {32: 1, 8: 4, 1: 32}


def test_rows_of_several_tiles_read_a_node_once_a_tile() -> None:
    """80 rows in tiles of 32 read the shared blocks three times, by items of one tile."""
    tables = [[*range(64), 1000 + i] for i in range(80)]
    plan = plan_batch(Batch(tables, [1] * 80, [16 * 65] * 80, 16), GPU)

    reads = reads_of_blocks(plan, GPU.tile_rows)
    assert {reads[block] for block in range(64)} == {3}
    assert max(plan.work[:, ROW_CNT]) == 32


def test_a_short_common_beginning_goes_to_the_groups_behind_it() -> None:
    """One block before two long groups is read by each group: its partials would cost more."""
    tables = [[1, *range(100 + 100 * (i % 2), 140 + 100 * (i % 2)), 1000 + i] for i in range(20)]
    plan = plan_batch(Batch(tables, [1] * 20, [16 * 42] * 20, 16), GPU)

    shared = plan.work[plan.work[:, ROW_CNT] > 1]
    assert shared[:, ROW_CNT].tolist() == [10, 10]
    assert shared[:, BASE_POS].tolist() == [0, 0]
    assert reads_of_blocks(plan, GPU.tile_rows)[1] == 2


def test_a_long_prompt_stays_alone_beside_rows_that_share() -> None:
    """Decode rows share a prefix that a long chunk of a prompt, with tiles enough, reads itself."""
    tables = [[*range(64), *range(1000 * i, 1000 * i + 20)] for i in range(1, 6)]
    plan = plan_batch(Batch(tables, [1, 1, 200, 1, 3], [1030, 1040, 1300, 1041, 1100], 16), GPU)

    assert plan.work[plan.work[:, FINAL] != 0][:, ROW_CNT].tolist() == [200]
    together = plan.work[plan.work[:, ROW_CNT] == 6]
    assert together[:, [TOK0, TOK1]].tolist() == [[0, 1024]]
    assert set(plan.rows[together[0, ROW_OFF] :][:6].tolist()) == {0, 1, 202, 203, 204, 205}


def test_windows_share_what_all_members_see() -> None:
    """A window cuts the node where its last member begins to see; the rest is read alone."""
    tables = [[*range(64), 1000 + i, 2000 + i] for i in range(8)]
    batch = Batch(tables, [1] * 8, [1025 + i for i in range(8)], 16, window=500)
    plan = plan_batch(batch, GPU)

    together = plan.work[plan.work[:, ROW_CNT] == 8]
    begins, ends = (
        together[:, BASE_POS] + together[:, TOK0],
        together[:, BASE_POS] + together[:, TOK1],
    )
    assert (begins.min(), ends.max()) == (544, 1024)
    assert min(plan.blocks) >= 525 // 16


def test_one_tree_serves_all_windows() -> None:
    """Every distinct window has its plan, each as if alone."""
    tables = [[*range(64), 1000 + i] for i in range(8)]
    lengths = ([1] * 8, [1030] * 8, 16)
    plans = build_plans(tables, *lengths, [None, 500, None, 4], GPU)

    assert set(plans) == {None, 500, 4}
    for window, plan in plans.items():
        alone = build_plans(tables, *lengths, [window], GPU)[window]
        assert np.array_equal(plan.work, alone.work)
        assert plan.window == window


def test_no_sequences_make_an_empty_plan() -> None:
    """A step without sequences has a plan without items."""
    assert len(build_plans([], [], [], 16, [None], GPU)[None].work) == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"token_bytes": 0}, "token_bytes 0"),
        ({"tile_rows": 0}, "tile_rows 0"),
        ({"chunk_tokens": 0}, "chunk_tokens 0"),
        ({"chunk_tokens": None, "fixed_chunks": True}, "fixed_chunks"),
    ],
)
def test_options_that_cannot_be_are_refused(change: dict[str, Any], message: str) -> None:
    """Every option out of range is named."""
    with pytest.raises(ValueError, match=message):
        replace(GPU, **change)


def test_one_compilation_serves_all_plans() -> None:
    """After `compile_planner` no plan compiles anything, whatever its tables and windows."""
    compile_planner()
    kernels: list[Any] = [build_tree, choose_nodes, list_runs, cut_runs, list_merges]
    before = [len(kernel.signatures) for kernel in kernels]
    tables = [np.array([1, 2, 3, 4 + i, 5], np.int32) for i in range(3)]
    for chunk in (None, 16, 32):
        for fixed_chunks in (False, chunk is not None):
            options = replace(GPU, chunk_tokens=chunk, fixed_chunks=fixed_chunks)
            build_plans(tables, [1, 2, 3], [70, 75, 80], 16, [None, 40], options)

    assert before == [1] * len(kernels)
    assert [len(kernel.signatures) for kernel in kernels] == before


def test_chunks_are_whole_blocks() -> None:
    """A chunk that would end inside a block is refused, as are lengths that cannot be."""
    with pytest.raises(ValueError, match="multiple of block_size 24"):
        build_plans([[1]], [1], [1], 24, [None], GPU)
    with pytest.raises(ValueError, match="sequence 0"):
        build_plans([[1]], [1], [17], 16, [None], GPU)
