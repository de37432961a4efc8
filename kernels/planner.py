"""Plans of a step: sequences that share blocks read them together, long ones in chunks.

The tree of shared runs comes from the block tables alone (`prefix_tree.py`), the bytes decide which
of its nodes pay (`grouping.py`), and the runs are cut into work items (`plan_items.py`).
"""

from array import array
from collections.abc import Iterable, Sequence

import numpy as np

from prefixkv.kernels.grouping import Costs, Spans, choose_nodes, list_runs
from prefixkv.kernels.plan import Int32Array, Plan, build_plan, check_lengths
from prefixkv.kernels.plan_items import cut_runs, list_merges
from prefixkv.kernels.plan_options import PlanOptions
from prefixkv.kernels.prefix_tree import Int64Array, build_tree

_UNBOUNDED = 2**31 - 1
BlockTables = Sequence[Sequence[int] | Int32Array]


def build_plans(
    block_tables: BlockTables,
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    block_size: int,
    windows: Iterable[int | None],
    options: PlanOptions | None = None,
) -> dict[int | None, Plan]:
    """Plan a step for each distinct window; without options, one run per sequence.

    Only full blocks before all query tokens of all members are read together, so that no row of a
    group needs a causal mask and none sees a block that another sequence may still write.
    A plan never moves more bytes (`plan_bytes`) than it would with `share=False`. Where nothing is
    shared and nothing is longer than a chunk, it is the plan of `build_plan`.

    Args: see `build_plan`.

    Raises: ValueError if lengths contradict each other, or chunks do not consist of whole blocks.
    Source: docs/kernels.md, "The plan".
    """
    lengths = (query_lens, context_lens, block_size)
    if options is None:
        return {window: build_plan(block_tables, *lengths, window) for window in set(windows)}
    if options.chunk_tokens is not None and options.chunk_tokens % block_size:
        raise ValueError(
            f"chunk_tokens {options.chunk_tokens} is not a multiple of block_size {block_size}"
        )
    queries, contexts = np.asarray(query_lens, np.int64), np.asarray(context_lens, np.int64)
    check_lengths(block_tables, queries, contexts, block_size, None)
    tables = _join_tables(block_tables, -(-contexts // block_size))
    whole_rows = _UNBOUNDED if options.split_prompts else options.tile_rows
    may_share = options.share & (queries <= whole_rows)
    num_shareable = np.where(may_share, (contexts - queries) // block_size, 0)
    granule = _granule(options, block_size)
    order, nodes = _find_shared(tables, num_shareable, granule // block_size)
    costs = Costs(
        options.token_bytes,
        options.partial_bytes,
        options.tile_rows,
        whole_rows,
        options.chunk_tokens or _UNBOUNDED,
    )
    plans = {}
    for window in set(windows):
        spans = _spans(queries, contexts, window, granule)
        first_chunk, last_chunk = spans.begin // costs.chunk, (contexts - 1) // costs.chunk
        is_split = (queries <= whole_rows) & (first_chunk < last_chunk)
        is_tiled = options.split_prompts & (queries > options.tile_rows)
        if len(nodes) or is_split.any() or is_tiled.any():
            plans[window] = _plan_runs(tables, (order, nodes), spans, block_size, window, costs)
        else:
            plans[window] = build_plan(block_tables, *lengths, window)
    return plans


def compile_planner() -> None:
    """Compile the planner's kernels now, rather than in the first step that shares.

    Takes several seconds once; the result is cached on disk, see `prefixkv.kernels.jit`.
    """
    options = PlanOptions(token_bytes=1, partial_bytes=1, tile_rows=2)
    build_plans([[1, 2], [1, 3]], [1, 1], [2, 2], 1, [None], options)


def _plan_runs(
    tables: tuple[Int32Array, Int64Array],
    tree: tuple[Int64Array, Int64Array],
    spans: Spans,
    block_size: int,
    window: int | None,
    costs: Costs,
) -> Plan:
    order, nodes = tree
    kept = choose_nodes(nodes, order, spans, block_size, costs)
    runs, rows = list_runs(nodes, kept, order, spans, block_size)
    bounded = _UNBOUNDED if window is None else window
    work, blocks, tokens, rows32 = cut_runs(runs, rows, tables, spans, block_size, bounded, costs)
    num_tokens = int(spans.num_rows.sum())
    merge_indptr, merge_slots = list_merges(tokens, num_tokens)
    first_position = spans.end - spans.num_rows
    shift = np.repeat(first_position - spans.first_row, spans.num_rows)
    return Plan(
        work=work,
        rows=rows32,
        positions=(np.arange(num_tokens) + shift).astype(np.int32),
        blocks=blocks,
        merge_indptr=merge_indptr,
        merge_slots=merge_slots,
        num_partials=len(tokens),
        block_size=block_size,
        window=window,
    )


def _find_shared(
    tables: tuple[Int32Array, Int64Array], num_shareable: Int64Array, granule: int
) -> tuple[Int64Array, Int64Array]:
    """The prefix tree, see `build_tree`; found out quickly if there is none."""
    blocks, offsets = tables
    first_blocks = blocks[offsets[num_shareable >= granule]].tolist()
    if len(set(first_blocks)) == len(first_blocks):
        return np.empty(0, np.int64), np.empty((0, 4), np.int64)
    return build_tree(blocks, offsets, num_shareable, granule)


def _granule(options: PlanOptions, block_size: int) -> int:
    """Shared runs begin and end at multiples of as many tokens."""
    if options.fixed_chunks and options.chunk_tokens is not None:
        return options.chunk_tokens
    return block_size


def _spans(queries: Int64Array, contexts: Int64Array, window: int | None, granule: int) -> Spans:
    begin = seen_by_all = np.zeros_like(contexts)
    if window is not None:
        begin = np.maximum(contexts - queries - window + 1, 0)
        seen_by_all = -(-np.maximum(contexts - window, 0) // granule) * granule
    return Spans(np.cumsum(queries) - queries, queries, begin, contexts, seen_by_all)


def _join_tables(
    block_tables: BlockTables, num_blocks: Int64Array
) -> tuple[Int32Array, Int64Array]:
    """All tables' first num_blocks[i] ids, one after the other, and where each begins."""
    parts: list[array[int] | Int32Array] = []
    for table, end in zip(block_tables, num_blocks.tolist(), strict=True):
        # slices are copies: a view would keep an array("i") from growing or shrinking later
        part = table if len(table) == end else table[:end]
        parts.append(part if isinstance(part, array) else np.ascontiguousarray(part, np.int32))
    joined = np.frombuffer(bytearray().join(parts), np.int32)  # type: ignore[arg-type] # buffers
    return joined, np.cumsum(num_blocks) - num_blocks
