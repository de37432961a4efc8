"""Which nodes of a prefix tree are worth reading together, and the runs that follow.

Where a node is kept, its members read its tokens once for each tile of their rows, and every
member's results end in one partial more. Where it is not, its tokens fall to its members: to kept
nodes inside it, which then begin earlier, and to single sequences. So every row reads
its sequence from the front in one chain of runs, kept nodes first and its own rest last.
"""

from typing import NamedTuple

import numpy as np

from prefixkv.kernels.jit import jit
from prefixkv.kernels.prefix_tree import END, FIRST, LAST, Int64Array, Integer

# columns of runs: sequence whose table holds the run, rows, tokens from the sequence's first on
SEQUENCE, RUN_ROW, RUN_ROWS, RUN_BEGIN, RUN_END, SHARED = range(6)


class Spans(NamedTuple):
    """What each sequence's rows read in one window; int64 [num_seqs] each, in tokens.

    `first_row` is the first query token, packed. Some row sees the tokens [begin, end); all rows
    see those from `seen_by_all` on that lie before the first row, a multiple of the granule.
    """

    first_row: Int64Array
    num_rows: Int64Array
    begin: Int64Array
    end: Int64Array
    seen_by_all: Int64Array


class Costs(NamedTuple):
    """`PlanOptions` as numba takes them; without splits, `chunk` is beyond every context.

    A sequence of more than `whole_rows` query tokens is neither split nor grouped.
    """

    token_bytes: int
    partial_bytes: int
    tile_rows: int
    whole_rows: int
    chunk: int


# columns of units: the parts of a node that read on their own, kept nodes and single sequences;
# the unit that begins at place p of the order is units[p]: the place after its last member, its
# tiles, those that its members have alone, its rows, and the first token that all its members see
LAST_MEMBER, TILES, OWN_TILES, ROWS, SEES = range(5)


@jit()
def _saved_tokens(
    node: Int64Array, sees: Integer, units: Int64Array, end: Integer, num_tiles: Integer
) -> Integer:
    """Reads of a token by a tile that keeping a node spares its units.

    From the first token that is seen on: no outer node is kept yet, so what lies before the node
    is read by the same units.
    """
    saved: Integer = -(end - sees) * num_tiles
    p = node[FIRST]
    while p < node[LAST]:
        saved += (end - units[p, SEES]) * units[p, TILES]
        # a window may start the node later than the unit; its members read what is between alone
        saved -= (sees - units[p, SEES]) * units[p, OWN_TILES]
        p = units[p, LAST_MEMBER]
    return saved


@jit()
def _added_partials(
    node: Int64Array,
    sees: Integer,
    units: Int64Array,
    members: Int64Array,
    spans: Spans,
    end: Integer,
    chunk: int,
) -> Integer:
    """Partials that keeping a node adds, at its end and where a window makes it begin.

    A row's first cut makes two, as its result was final without; a cut between chunks makes none,
    as it is there anyway.
    """
    added = np.int64(0)
    end_cuts = np.int64(end % chunk != 0)
    p = node[FIRST]
    while p < node[LAST]:
        is_single = units[p, LAST_MEMBER] == p + 1
        added += units[p, ROWS] * end_cuts
        for i in members[p - node[FIRST] : units[p, LAST_MEMBER] - node[FIRST]]:
            if sees == 0 and not is_single:
                break  # no window, so nothing but the end
            cuts = np.int64(sees > spans.begin[i] and sees % chunk != 0)
            if is_single:
                is_split = (spans.end[i] - 1) // chunk > spans.begin[i] // chunk
                cuts += np.int64(not is_split and cuts + end_cuts > 0)
            else:
                cuts -= np.int64(units[p, SEES] > spans.begin[i] and units[p, SEES] % chunk != 0)
            added += spans.num_rows[i] * cuts
        p = units[p, LAST_MEMBER]
    return added


@jit()
def choose_nodes(
    nodes: Int64Array, order: Int64Array, spans: Spans, block_size: int, costs: Costs
) -> Int64Array:
    """Indices of the kept nodes: those that save more bytes than their partials add.

    Inner nodes are judged first, each by what the whole plan saves with it: a node reads from the
    front until an outer one is kept.
    """
    kept = np.empty(len(nodes), np.int64)
    num_kept = 0
    units = np.empty((len(order), 5), np.int64)
    for p in range(len(order)):
        num_rows = spans.num_rows[order[p]]
        units[p, LAST_MEMBER] = p + 1
        units[p, TILES] = units[p, OWN_TILES] = (num_rows - 1) // costs.tile_rows + 1
        units[p, ROWS], units[p, SEES] = num_rows, spans.seen_by_all[order[p]]
    for k in range(len(nodes)):
        node = nodes[k]
        end = node[END] * block_size
        sees, num_rows, own_tiles = np.int64(0), np.int64(0), np.int64(0)
        p = node[FIRST]
        while p < node[LAST]:
            sees, num_rows = max(sees, units[p, SEES]), num_rows + units[p, ROWS]
            own_tiles += units[p, OWN_TILES]
            p = units[p, LAST_MEMBER]
        if sees >= end:
            continue
        num_tiles = (num_rows - 1) // costs.tile_rows + 1
        saved = _saved_tokens(node, sees, units, end, num_tiles)
        members = order[node[FIRST] : node[LAST]]
        added = _added_partials(node, sees, units, members, spans, end, costs.chunk)
        if saved * costs.token_bytes > added * costs.partial_bytes:
            kept[num_kept] = k
            num_kept += 1
            unit = units[node[FIRST]]
            unit[LAST_MEMBER], unit[TILES] = node[LAST], num_tiles
            unit[OWN_TILES], unit[ROWS], unit[SEES] = own_tiles, num_rows, sees
    return kept[:num_kept]


@jit()
def list_runs(
    nodes: Int64Array, kept: Int64Array, order: Int64Array, spans: Spans, block_size: int
) -> tuple[Int64Array, Int64Array]:
    """The runs of all kept nodes and of what is left to each sequence, and their rows.

    A row's runs stand in the order of their tokens. The first rows are 0, 1, 2 ...: each
    sequence's own. The rows of each node follow.
    """
    num_tokens = spans.num_rows.sum()
    num_runs, num_node_rows = len(spans.end), np.int64(0)
    for k in kept:
        num_runs += 1 + nodes[k, LAST] - nodes[k, FIRST]
        for i in order[nodes[k, FIRST] : nodes[k, LAST]]:
            num_node_rows += spans.num_rows[i]
    runs = np.empty((num_runs, 6), np.int64)
    rows = np.empty(num_tokens + num_node_rows, np.int64)
    rows[:num_tokens] = np.arange(num_tokens)
    num_runs, num_rows = 0, num_tokens
    covered = spans.begin.copy()
    for k in kept[::-1]:
        members = order[nodes[k, FIRST] : nodes[k, LAST]]
        begin, end = np.int64(0), nodes[k, END] * block_size
        for i in members:
            begin = max(begin, covered[i], spans.seen_by_all[i])
        row = num_rows
        for i in members:
            if covered[i] < begin:
                _put_own_run(runs[num_runs], i, spans, covered[i], begin)
                num_runs += 1
            covered[i] = end
            for r in range(spans.num_rows[i]):
                rows[num_rows] = spans.first_row[i] + r
                num_rows += 1
        run = runs[num_runs]
        run[SEQUENCE], run[RUN_ROW], run[RUN_ROWS] = members[0], row, num_rows - row
        run[RUN_BEGIN], run[RUN_END], run[SHARED] = begin, end, 1
        num_runs += 1
    for i in range(len(spans.end)):
        _put_own_run(runs[num_runs], i, spans, covered[i], spans.end[i])
        num_runs += 1
    return runs[:num_runs], rows


@jit()
def _put_own_run(run: Int64Array, i: Integer, spans: Spans, begin: Integer, end: Integer) -> None:
    run[SEQUENCE], run[RUN_ROW], run[RUN_ROWS] = i, spans.first_row[i], spans.num_rows[i]
    run[RUN_BEGIN], run[RUN_END], run[SHARED] = begin, end, 0
