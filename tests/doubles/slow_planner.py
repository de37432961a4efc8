"""A planner that is slow and plain: the oracle of `build_plans`."""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from prefixkv.kernels.plan import BASE_POS, BLK_OFF, ROW_CNT, ROW_OFF, TOK0, TOK1, Plan
from prefixkv.kernels.plan_options import PlanBytes, PlanOptions


@dataclass(frozen=True)
class Batch:
    """What a step's planner is given; lengths in tokens."""

    tables: list[list[int]]
    query_lens: list[int]
    context_lens: list[int]
    block_size: int
    window: int | None = None

    def tokens(self, i: int) -> range:
        """The packed query tokens of sequence i."""
        first = sum(self.query_lens[:i])
        return range(first, first + self.query_lens[i])

    def visible(self, position: int) -> range:
        """The positions that a row at `position` sees."""
        return range(0 if self.window is None else max(0, position - self.window + 1), position + 1)

    def truth(self) -> list[dict[int, int]]:
        """For each query token the block of each position that it sees."""
        return [
            {n: table[n // self.block_size] for n in self.visible(position)}
            for table, num_rows, context in zip(
                self.tables, self.query_lens, self.context_lens, strict=True
            )
            for position in range(context - num_rows, context)
        ]


@dataclass(frozen=True)
class Node:
    """Sequences that read the tokens [begin, end) together, or as much as all of them see."""

    members: frozenset[int]
    begin: int
    end: int


Piece = tuple[int, int, int]  # query token, first token read, end


def read_positions(plan: Plan) -> list[dict[int, list[int]]]:
    """For each query token the blocks from which each position that it sees is read."""
    found: list[dict[int, list[int]]] = [defaultdict(list) for _ in plan.positions]
    for item in plan.work.tolist():
        for token in plan.rows[item[ROW_OFF] : item[ROW_OFF] + item[ROW_CNT]].tolist():
            position = int(plan.positions[token])
            for n in range(item[TOK0], item[TOK1]):
                key = item[BASE_POS] + n
                if key <= position and (plan.window is None or key > position - plan.window):
                    block = int(plan.blocks[item[BLK_OFF] + n // plan.block_size])
                    found[token][key].append(block)
    return found


def whole_rows(options: PlanOptions) -> float:
    """Sequences of more query tokens are read as a whole."""
    return math.inf if options.split_prompts else options.tile_rows


def find_nodes(batch: Batch, options: PlanOptions) -> list[Node]:
    """All shared runs, inner ones first: sequences with equal block ids at the front."""
    granule = batch.block_size
    if options.fixed_chunks and options.chunk_tokens is not None:
        granule = options.chunk_tokens
    ends: dict[frozenset[int], list[int]] = defaultdict(list)
    for end in range(granule, max(batch.context_lens, default=0) + 1, granule):
        groups: dict[tuple[int, ...], set[int]] = defaultdict(set)
        for i, table in enumerate(batch.tables):
            first_row = batch.context_lens[i] - batch.query_lens[i]
            if options.share and batch.query_lens[i] <= whole_rows(options) and end <= first_row:
                groups[tuple(table[: end // batch.block_size])].add(i)
        for members in groups.values():
            if len(members) > 1:
                ends[frozenset(members)].append(end)
    nodes = [Node(members, min(at) - granule, max(at)) for members, at in ends.items()]
    return sorted(nodes, key=lambda node: len(node.members))


class SlowPlanner:
    """Keeps a node where the whole plan, counted anew, has fewer bytes with it than without."""

    def __init__(self, batch: Batch, options: PlanOptions) -> None:
        """Plan a batch."""
        self.batch = batch
        self.options = options
        self.kept: list[Node] = []
        for node in find_nodes(batch, options):
            if self._begin(node, [0]) < node.end:
                more = [*self.kept, node]
                if self.count(more).total < self.count(self.kept).total:
                    self.kept = more

    def pieces(self) -> set[Piece]:
        """(query token, begin, end) of all that is read."""
        return {
            (token, begin, end)
            for members, begin, end in self._reads(self.kept)
            for i in members
            for token in self.batch.tokens(i)
            if self._sees(token, begin, end)
        }

    def count(self, kept: list[Node]) -> PlanBytes:
        """The bytes of a plan that keeps these nodes."""
        num_reads = 0
        pieces: dict[int, int] = defaultdict(int)
        for members, begin, end in self._reads(kept):
            seeing = [
                token
                for i in members
                for token in self.batch.tokens(i)
                if self._sees(token, begin, end)
            ]
            num_reads += -(-len(seeing) // self.options.tile_rows) * (end - begin)
            for i in members:
                pieces[i] += 1
        num_partials = sum(
            sum(self._sees(token, begin, end) for token in self.batch.tokens(i))
            for members, begin, end in self._reads(kept)
            for i in members
            if pieces[i] > 1
        )
        return PlanBytes(
            num_reads * self.options.token_bytes, num_partials * self.options.partial_bytes
        )

    def _sees(self, token: int, begin: int, end: int) -> bool:
        i = next(i for i in range(len(self.batch.tables)) if token in self.batch.tokens(i))
        position = self.batch.context_lens[i] - self.batch.tokens(i).stop + token
        seen = self.batch.visible(position)
        return seen.start < end and begin < seen.stop

    def _first(self, i: int) -> int:
        return self.batch.visible(self.batch.context_lens[i] - self.batch.query_lens[i]).start

    def _begin(self, node: Node, covered: Sequence[int]) -> int:
        """The first token that all members see and nobody has read yet, on a granule."""
        options = self.options
        granule = (options.fixed_chunks and options.chunk_tokens) or self.batch.block_size
        last_rows = (self.batch.context_lens[i] - 1 for i in node.members)
        seen_by_all = max(self.batch.visible(position).start for position in last_rows)
        return max(-(-seen_by_all // granule) * granule, *covered, 0)

    def _reads(self, kept: list[Node]) -> Iterator[tuple[frozenset[int], int, int]]:
        """(members, begin, end) of every piece, outer nodes first."""
        covered = [self._first(i) for i in range(len(self.batch.tables))]
        for node in sorted(kept, key=lambda node: -len(node.members)):
            begin = self._begin(node, [covered[i] for i in node.members])
            for i in node.members:
                yield from self._cut(frozenset([i]), covered[i], begin)
                covered[i] = node.end
            yield from self._cut(node.members, begin, node.end)
        for i, context in enumerate(self.batch.context_lens):
            yield from self._cut(frozenset([i]), covered[i], context)

    def _cut(
        self, members: frozenset[int], begin: int, end: int
    ) -> Iterator[tuple[frozenset[int], int, int]]:
        chunk = self.options.chunk_tokens
        if len(members) == 1:
            (i,) = members
            if self.batch.query_lens[i] > whole_rows(self.options):
                chunk = None
        while begin < end:
            piece_end = end if chunk is None else min(end, (begin // chunk + 1) * chunk)
            yield members, begin, piece_end
            begin = piece_end
