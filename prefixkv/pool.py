"""The pool: which blocks are free, who references the others, and whom to give up.

Accounting only; the tensors are in `kv_cache.py`. Block 0 is reserved: padding may point at it.

Only leaves are ever idle, so the idle count is not the room there is: giving up a leaf may make
its parent idle, and so on up the chain. `reserve` therefore walks the eviction order with a
simulated cascade first, and evicts what it found or nothing.
"""

import sys
from heapq import heappop, heappush
from typing import Final

from prefixkv.block import FREE, PRIVATE, Block, BlockCopy, Root, remove_child
from prefixkv.config import require_positive
from prefixkv.eviction import EvictionOrder, Rank, rank
from prefixkv.forgotten import Forgotten

LAST: Final[Rank] = (sys.maxsize, 0, 0, 0)


class BlockPool:
    """All blocks of one pool, with their references.

    Args:
        num_blocks: blocks in all, the reserved block 0 included.
        block_size: tokens a block.

    Attributes:
        free: blocks that nobody holds, taken from the end.
        order: the idle blocks.
        index: published full blocks by the digest of their chain.
        roots: open roots by their key.
        copies: queued copies by target, in the order of queueing.
        version: grows whenever a reference is dropped or a block becomes findable: as long as it
            stands still, a request that did not fit will not fit.
        num_evicted: blocks evicted so far.
        forgotten: digests that were in the index.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        require_positive("block_size", block_size)
        require_positive("num_blocks - 1", num_blocks - 1)
        self.block_size = block_size
        self.blocks = [Block(i) for i in range(num_blocks)]
        self.free = self.blocks[:0:-1]
        self.order = EvictionOrder()
        self.index: dict[bytes, Block] = {}
        self.roots: dict[bytes, Root] = {}
        self.copies: dict[Block, BlockCopy] = {}
        self.clock = 0
        self.version = 0
        self.num_evicted = 0
        self.forgotten = Forgotten()

    @property
    def num_usable(self) -> int:
        """Blocks that sequences can ever hold: all but the reserved one."""
        return len(self.blocks) - 1

    # -- room ------------------------------------------------------------------------------------

    def can_reserve(self, num_blocks: int) -> bool:
        """Whether `reserve` would succeed; changes nothing."""
        missing = num_blocks - len(self.free)
        return missing <= 0 or self._select(missing) is not None

    def reserve(self, num_blocks: int) -> bool:
        """Have at least `num_blocks` free, evicting idle blocks if need be.

        Returns False, and changes nothing, if that cannot be had now. Costs O(1) for each evicted
        block, plus O(log idle) for each idle chain begun.
        """
        missing = num_blocks - len(self.free)
        if missing <= 0:
            return True
        selected = self._select(missing)
        if selected is None:
            return False
        self._evict(*selected)
        return True

    def num_reclaimable(self) -> int:
        """Blocks with no sequence and no queued copy at or below them; O(blocks), for metrics."""
        left: dict[Block, int] = {}
        stack = list(self.order)
        count = 0
        while stack:
            parent = stack.pop().parent
            count += 1
            assert parent is not None
            left[parent] = left.get(parent, parent.refs) - 1
            if left[parent] == 0 and parent.block_id >= 0:
                stack.append(parent)
        return count

    def _select(self, count: int) -> tuple[list[Block], int] | None:
        """Choose the next `count` victims, and how many of them are idle already."""
        victims: list[Block] = []
        left: dict[Block, int] = {}  # references that a branching block would have left
        orphans: list[tuple[Rank, Block]] = []  # made idle by the cascade, but not first in order
        leaves = iter(self.order)
        leaf = next(leaves, None)
        num_leaves = 0
        while leaf is not None or orphans:
            if leaf is None or (orphans and orphans[0][0] < rank(leaf)):
                (_, last_use, _, _), block = heappop(orphans)
            else:
                block, last_use = leaf, leaf.last_use
                num_leaves += 1
                leaf = next(leaves, None)
            limit = rank(leaf) if leaf is not None else LAST
            if orphans:
                limit = min(limit, orphans[0][0])
            orphan = self._cascade(block, last_use, limit, count, victims, left)
            if len(victims) == count:
                return victims, num_leaves
            if orphan is not None:
                heappush(orphans, orphan)
        return None

    @staticmethod
    def _cascade(
        block: Block,
        last_use: int,
        limit: Rank,
        count: int,
        victims: list[Block],
        left: dict[Block, int],
    ) -> tuple[Rank, Block] | None:
        """Add `block` to the victims, then its ancestors while each becomes idle and comes first.

        A parent that becomes idle inherits the newer last use; if that ranks it after `limit` it is
        returned. So a whole idle chain costs O(1) a block.
        """
        append = victims.append
        limit_priority, limit_use = limit[0], limit[1]
        append(block)
        for _ in range(count - len(victims)):
            block = block.parent  # type: ignore[assignment] # only roots have none
            if block.refs != 1:
                left[block] = others = left.get(block, block.refs) - 1
                if others:
                    return None
            if block.block_id < 0:
                return None
            if block.last_use > last_use:
                last_use = block.last_use
            if last_use >= limit_use or block.priority != limit_priority:
                place = (block.priority, last_use, -block.depth, block.block_id)
                if place > limit:
                    return place, block
            append(block)
        return None

    def _evict(self, victims: list[Block], num_leaves: int) -> None:
        self.order.remove_first(num_leaves)
        index, forget = self.index, self.forgotten.evicted.append
        bereft: list[Block] = []
        above: Block | None = None  # the parent of the last victim, if that was all it had
        for block in victims:
            if above is not None and above is not block:
                bereft.append(above)
            parent: Block = block.parent  # type: ignore[assignment] # only roots have none
            digest = block.digest
            if digest is not None:
                del index[digest]
                forget(digest)
                block.digest = None
            if parent.children is block:
                parent.children = None
            else:
                remove_child(parent, block)
            block.tokens = b""
            block.parent = None
            block.state = FREE
            block.priority = 0
            block.logprobs = None
            if parent.refs == 1:
                parent.refs = 0
                above = parent
                if parent.last_use < block.last_use:
                    parent.last_use = block.last_use
            else:
                parent.refs -= 1
                above = None
        if above is not None:
            bereft.append(above)
        self.free += victims
        self.num_evicted += len(victims)
        self.forgotten.file_evicted()
        self._keep_idle(bereft)

    def _keep_idle(self, bereft: list[Block]) -> None:
        """Put into the order what eviction has made idle without taking it."""
        for block in bereft:
            if block.block_id < 0:
                self._drop_root(block)
            elif block.state != FREE:  # it may have become a victim later
                self.order.add(block)

    def _free_private(self, block: Block) -> None:
        block.tokens = b""
        block.parent = None
        block.logprobs = None
        block.state = FREE
        self.free.append(block)

    def drop_unheld(self, root: Root) -> None:
        """Forget a root that was opened for nothing."""
        if not root.refs:
            self._drop_root(root)

    def _drop_root(self, root: Block) -> None:
        assert isinstance(root, Root)
        if self.roots.get(root.key) is root:
            del self.roots[root.key]

    # -- references ------------------------------------------------------------------------------

    def acquire(self, block: Block) -> None:
        """Add a reference; an idle block leaves the eviction order."""
        if block.refs == 0 and block.block_id >= 0:
            self.order.remove(block)
        block.refs += 1

    def release(self, block: Block, *, cold: bool = False) -> None:
        """Drop a reference.

        At none left, a published block becomes idle (at the cold end of the order if `cold`), a
        private one is freed, which drops its reference on its parent in turn.
        """
        pending = [block]
        self.clock += 1
        self.version += 1
        while pending:
            block = pending.pop()
            block.refs -= 1
            assert block.refs >= 0
            if block.state != PRIVATE:
                block.last_use = self.clock  # counts even if a follower keeps it from being idle
                block.priority = -1 if cold and not block.refs else 0
            if block.refs:
                continue
            if block.block_id < 0:
                self._drop_root(block)
                continue
            if block.state != PRIVATE:
                self.order.add(block)
                continue
            copy = self.copies.pop(block, None) if self.copies else None
            if copy is not None:  # its target is gone before it ran
                pending.append(copy.source)
            assert block.parent is not None
            pending.append(block.parent)
            self._free_private(block)

    # -- writing ---------------------------------------------------------------------------------

    def extend(self, parent: Block, tokens: bytes, start: int) -> Block:
        """Let a chain of new private blocks with `tokens[start:]` follow `parent`.

        The caller's reference on `parent` passes to the first of them; the caller holds the one
        on the last, which is returned. Requires that they were reserved.
        """
        span = self.block_size * 4
        starts = range(start, len(tokens), span)
        fresh = self.free[-len(starts) :]
        del self.free[-len(starts) :]
        fresh.reverse()
        depth = parent.depth
        for block, i in zip(fresh, starts, strict=True):
            depth += 1
            block.tokens = tokens[i : i + span]
            block.parent = parent
            block.depth = depth
            block.refs = 1
            block.state = PRIVATE
            parent = block
        return parent

    def copy_on_write(self, source: Block, num_slots: int) -> Block:
        """Queue a copy of the first slots of `source` into a fresh private block.

        The caller's reference on `source` passes to the queued copy; the caller holds the one on
        the target, which is returned. Requires that one block was reserved.
        """
        parent = source.parent
        assert parent is not None
        target = self.free.pop()
        target.tokens = source.tokens[: num_slots * 4]
        target.parent = parent
        target.depth = source.depth
        target.refs = 1
        target.state = PRIVATE
        parent.refs += 1
        self.copies[target] = BlockCopy(source, target, num_slots)
        return target

    def finish_copies(self) -> None:
        """Say that all queued copies ran: their sources are no longer referenced."""
        copies, self.copies = self.copies, {}
        for copy in copies.values():
            self.release(copy.source)
