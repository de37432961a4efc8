"""A plan tells an attention kernel which query rows read which runs of blocks.

It is built once a step from block tables and shared by all layers and all backends. Decode,
chunked prefill, rows to verify and shared prefixes are the same thing: a set of rows times a run
of consecutive tokens. A row may appear in several work items; their partial results are merged.

    work[i]  = row_off row_cnt  blk_off tok0 tok1  dst_slot final  base_pos
               -- rows[...] --  -- blocks[...] --  - result -----  position of token 0 of the run
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Int32Array = NDArray[np.int32]
IntArray = NDArray[np.int32] | NDArray[np.int64]

# columns of Plan.work
ROW_OFF, ROW_CNT, BLK_OFF, TOK0, TOK1, DST_SLOT, FINAL, BASE_POS = range(8)


@dataclass(frozen=True, slots=True)
class Plan:
    """Work items of one step for one attention window; all arrays int32, C-contiguous.

    Item i lets the query tokens `rows[row_off : row_off + row_cnt]` attend to the tokens
    [tok0, tok1) of the run whose physical blocks start at `blocks[blk_off]`. Token n of the run
    lies in `blocks[blk_off + n // block_size]`, slot `n % block_size`, and has the absolute
    position `base_pos + n`. A row at position p sees it if p - window < base_pos + n <= p.

    A final item is all that its rows attend to, and `dst_slot` is unused. The others leave row r's
    unnormalised partial at `dst_slot + r`, and query token t's output is the log-sum-exp merge of
    the partials `merge_slots[merge_indptr[t] : merge_indptr[t + 1]]`, in that order. A partial
    without a visible token is the identity of the merge; a row that sees nothing at all gives 0.

    Attributes:
        work: [num_items, 8], columns ROW_OFF to BASE_POS.
        rows: query-token ids, indices into the step's packed tokens.
        positions: [num_tokens] absolute position of each query token.
        blocks: physical block ids of all runs.
        merge_indptr: [num_tokens + 1]; merge_slots: partial ids.
        num_partials: partials that items write.
        window: tokens that a row sees, itself included; None means all.
    """

    work: Int32Array
    rows: Int32Array
    positions: Int32Array
    blocks: Int32Array
    merge_indptr: Int32Array
    merge_slots: Int32Array
    num_partials: int
    block_size: int
    window: int | None


def build_plan(
    block_tables: Sequence[Sequence[int] | Int32Array],
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    block_size: int,
    window: int | None = None,
) -> Plan:
    """Plan one run per sequence, from the first block that any of its rows sees.

    Args:
        block_tables: physical block ids of each sequence in logical order, `array('i')` or int32.
            Entries past the context are ignored, whatever they hold.
        query_lens: query tokens of each sequence in this step, >= 1; they are packed in order.
        context_lens: tokens of each sequence, this step's query tokens included.
        block_size: tokens per block.
        window: tokens that a row sees, itself included; None means all.

    Raises: ValueError if lengths contradict each other.
    """
    queries = np.asarray(query_lens, np.int32)
    contexts = np.asarray(context_lens, np.int32)
    check_lengths(block_tables, queries, contexts, block_size, window)
    starts = contexts - queries
    first_visible = np.zeros_like(starts) if window is None else np.maximum(starts - window + 1, 0)
    first_block = first_visible // block_size
    end_block = -(-contexts // block_size)
    # slices are copies: a view would keep an array("i") from growing or shrinking later
    runs = [
        np.asarray(table[first:end], np.int32)
        for table, first, end in zip(block_tables, first_block, end_block, strict=True)
    ]
    num_tokens = int(queries.sum())
    work = np.empty((len(runs), 8), np.int32)
    work[:, ROW_OFF] = np.cumsum(queries) - queries
    work[:, ROW_CNT] = queries
    work[:, BLK_OFF] = np.cumsum(end_block - first_block) - (end_block - first_block)
    work[:, BASE_POS] = first_block * block_size
    work[:, TOK0] = first_visible - work[:, BASE_POS]
    work[:, TOK1] = contexts - work[:, BASE_POS]
    work[:, DST_SLOT] = 0
    work[:, FINAL] = 1
    rows = np.arange(num_tokens, dtype=np.int32)
    return Plan(
        work=work,
        rows=rows,
        positions=rows + np.repeat(starts - work[:, ROW_OFF], queries),
        blocks=np.concatenate(runs) if runs else np.empty(0, np.int32),
        merge_indptr=np.zeros(num_tokens + 1, np.int32),
        merge_slots=np.empty(0, np.int32),
        num_partials=0,
        block_size=block_size,
        window=window,
    )


def check_lengths(
    block_tables: Sequence[Sequence[int] | Int32Array],
    queries: IntArray,
    contexts: IntArray,
    block_size: int,
    window: int | None,
) -> None:
    """Raises: ValueError, with the numbers, if lengths contradict each other."""
    if not len(block_tables) == len(queries) == len(contexts):
        raise ValueError(
            f"{len(block_tables)} block tables, {len(queries)} query lengths, "
            f"{len(contexts)} context lengths"
        )
    if block_size < 1 or (window is not None and window < 1):
        raise ValueError(f"block_size {block_size} and window {window} must be >= 1")
    slots = np.fromiter(map(len, block_tables), np.int64, len(block_tables)) * block_size
    wrong = np.flatnonzero((queries < 1) | (queries > contexts) | (contexts > slots))
    if len(wrong):
        i = wrong[0]
        raise ValueError(
            f"sequence {i}: {queries[i]} query tokens, {contexts[i]} context tokens, "
            f"{slots[i]} slots in its block table"
        )
