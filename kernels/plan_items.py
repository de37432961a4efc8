"""Cuts runs into work items: at chunks, and by tiles of rows; and lists what each row merges."""

import numpy as np

from prefixkv.kernels.grouping import (
    RUN_BEGIN,
    RUN_END,
    RUN_ROW,
    RUN_ROWS,
    SEQUENCE,
    SHARED,
    Costs,
    Spans,
)
from prefixkv.kernels.jit import jit
from prefixkv.kernels.plan import (
    BASE_POS,
    BLK_OFF,
    DST_SLOT,
    FINAL,
    ROW_CNT,
    ROW_OFF,
    TOK0,
    TOK1,
    Int32Array,
)
from prefixkv.kernels.prefix_tree import Int64Array, Integer


@jit()
def _size(runs: Int64Array, block_size: int, costs: Costs) -> tuple[Integer, Integer, Integer]:
    """The most items and partials that the runs can make, and exactly how many block ids."""
    num_items, num_partials, num_blocks = np.int64(0), np.int64(0), np.int64(0)
    for run in runs:
        num_pieces = (run[RUN_END] - 1) // costs.chunk - run[RUN_BEGIN] // costs.chunk + 1
        num_items += num_pieces * ((run[RUN_ROWS] - 1) // costs.tile_rows + 1)
        if run[RUN_ROWS] <= costs.whole_rows or run[SHARED] != 0:
            num_partials += num_pieces * run[RUN_ROWS]
        num_blocks += (run[RUN_END] - 1) // block_size - run[RUN_BEGIN] // block_size + 1
    return num_items, num_partials, num_blocks


@jit()
def _seeing_rows(
    run: Int64Array, begin: Integer, end: Integer, spans: Spans, window: int
) -> tuple[Integer, Integer]:
    """The half-open range of a run's rows that see any of the tokens [begin, end)."""
    if run[SHARED] != 0:
        return np.int64(0), run[RUN_ROWS]
    i = run[SEQUENCE]
    first_position = spans.end[i] - spans.num_rows[i]
    last_seeing = end + window - 2
    return (
        max(np.int64(0), begin - first_position),
        min(spans.num_rows[i], last_seeing - first_position + 1),
    )


@jit()
def cut_runs(
    runs: Int64Array,
    rows: Int64Array,
    tables: tuple[Int32Array, Int64Array],
    spans: Spans,
    block_size: int,
    window: int,
    costs: Costs,
) -> tuple[Int32Array, Int32Array, Int32Array, Int32Array]:
    """Turn runs into `Plan.work` and `Plan.blocks`; and the query token of each partial.

    Partials are numbered along the runs, hence each row's in the order of their tokens.

    Args:
        tables: all block tables, one after the other, and where each begins.
    """
    all_blocks, offsets = tables
    most_items, most_partials, num_blocks = _size(runs, block_size, costs)
    work = np.empty((most_items, 8), np.int32)
    blocks = np.empty(num_blocks, np.int32)
    tokens = np.empty(most_partials, np.int32)
    num_items, num_partials, num_blocks = np.int64(0), np.int64(0), np.int64(0)
    row: Integer
    for run in runs:
        i, begin = run[SEQUENCE], run[RUN_BEGIN]
        first_block, end_block = begin // block_size, (run[RUN_END] - 1) // block_size + 1
        base = first_block * block_size
        run_blocks = num_blocks
        num_blocks += end_block - first_block
        table = all_blocks[offsets[i] :]
        blocks[run_blocks:num_blocks] = table[first_block:end_block]
        is_whole = run[SHARED] == 0 and run[RUN_ROWS] > costs.whole_rows
        while begin < run[RUN_END]:
            end = min(run[RUN_END], (begin // costs.chunk + 1) * costs.chunk)
            if is_whole:
                end = run[RUN_END]
            final = begin == spans.begin[i] and end == spans.end[i]
            row, end_row = np.int64(0), run[RUN_ROWS]
            if not final:
                row, end_row = _seeing_rows(run, begin, end, spans, window)
            while row < end_row:
                num_rows = end_row - row
                if not is_whole:
                    num_rows = min(num_rows, costs.tile_rows)
                item = work[num_items]
                item[ROW_OFF], item[ROW_CNT] = run[RUN_ROW] + row, num_rows
                item[BLK_OFF], item[BASE_POS] = run_blocks, base
                item[TOK0], item[TOK1] = begin - base, end - base
                item[DST_SLOT], item[FINAL] = num_partials, np.int32(final)
                if final:
                    item[DST_SLOT] = 0
                else:
                    for r in range(num_rows):
                        tokens[num_partials] = rows[item[ROW_OFF] + r]
                        num_partials += 1
                num_items += 1
                row += num_rows
            begin = end
    return work[:num_items], blocks, tokens[:num_partials], rows.astype(np.int32)


@jit()
def list_merges(tokens: Int32Array, num_tokens: int) -> tuple[Int32Array, Int32Array]:
    """`Plan.merge_indptr` and `Plan.merge_slots`, from the query token of each partial."""
    indptr = np.zeros(num_tokens + 1, np.int32)
    for token in tokens:
        indptr[token + 1] += 1
    for t in range(num_tokens):
        indptr[t + 1] += indptr[t]
    slots = np.empty(len(tokens), np.int32)
    filled = indptr[:-1].copy()
    for slot in range(len(tokens)):
        slots[filled[tokens[slot]]] = slot
        filled[tokens[slot]] += 1
    return indptr, slots
