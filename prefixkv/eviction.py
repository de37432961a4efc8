"""The order in which idle blocks are given up.

Idle blocks (published, refs 0) are leaves: whatever follows a block holds a reference on it. The
order is by (priority, last use, deepest first), oldest first; it is the one place to change for
another policy.
"""

from collections.abc import Iterator

from sortedcontainers import SortedKeyList

from prefixkv.block import Block

Rank = tuple[int, int, int, int]


def rank(block: Block) -> Rank:
    """Sort key of an idle block; unique, the lowest is evicted first."""
    return (block.priority, block.last_use, -block.depth, block.block_id)


class EvictionOrder:
    """A sorted container of the idle blocks; O(log n) to add and to remove.

    A block's rank must not change while it is in here.
    """

    __slots__ = ("_blocks",)

    def __init__(self) -> None:
        self._blocks = SortedKeyList(key=rank)

    def __len__(self) -> int:
        return len(self._blocks)

    def __iter__(self) -> Iterator[Block]:
        return iter(self._blocks)

    def add(self, block: Block) -> None:
        """Put an idle block in its place."""
        self._blocks.add(block)

    def remove(self, block: Block) -> None:
        """Take a block out, since somebody needs it again.

        Raises:
            ValueError: if it is not in here.
        """
        self._blocks.remove(block)

    def remove_first(self, count: int) -> None:
        """Take out the `count` blocks that come first."""
        del self._blocks[:count]
