"""A fake KV: each slot holds the identity and the whole token chain that it was computed for.

Reading a slot back proves where it came from, which real tensors cannot. An absent slot is "NaN".
"""

from dataclasses import dataclass, field

from prefixkv.block import FREE, Block, BlockCopy, Root
from prefixkv.prefix_cache import PrefixCache
from prefixkv.sequence import Sequence

Content = tuple[bytes, tuple[int, ...]]


@dataclass
class FakeKV:
    """Slots by (block id, offset)."""

    slots: dict[tuple[int, int], Content] = field(default_factory=dict)

    def poison(self, block: Block, block_size: int) -> None:
        """Make every slot of a block unreadable."""
        for offset in range(block_size):
            self.slots.pop((block.block_id, offset), None)

    def poison_free(self, cache: PrefixCache) -> None:
        """Make everything that is free unreadable (invariant 7)."""
        for block in cache.pool.blocks:
            if block.state == FREE:
                self.poison(block, cache.block_size)

    def copy(self, copies: list[BlockCopy]) -> None:
        """Run copies in order."""
        for copy in copies:
            for offset in range(copy.num_slots):
                source = (copy.source.block_id, offset)
                target = (copy.target.block_id, offset)
                self.slots.pop(target, None)
                if source in self.slots:
                    self.slots[target] = self.slots[source]

    def write(
        self,
        sequence: Sequence,
        tokens: list[int],
        *,
        start: int | None = None,
        failed: bool = False,
    ) -> None:
        """Compute the scheduled tokens of a sequence whose whole stream is `tokens`.

        From `start` on, if somebody else says what the step computes.
        """
        table = sequence.block_table()
        block_size = sequence.cache.block_size
        start = sequence.num_computed_tokens if start is None else start
        for position in range(start, sequence.num_tokens):
            slot = (table[position // block_size], position % block_size)
            self.slots.pop(slot, None)
            if not failed:
                self.slots[slot] = (content_identity(sequence.root), tuple(tokens[: position + 1]))

    def read(self, sequence: Sequence) -> list[Content | None]:
        """What the sequence would see at each of its computed positions."""
        table = sequence.block_table()
        block_size = sequence.cache.block_size
        return [
            self.slots.get((table[position // block_size], position % block_size))
            for position in range(sequence.num_computed_tokens)
        ]


def content_identity(root: Root) -> bytes:
    """What the KV under a root depends on, besides the tokens."""
    return root.key + b" at epoch %d" % root.epoch


def chain_of(block: Block) -> list[Block]:
    """The blocks from the first one to `block`, walked up by hand."""
    chain = []
    while block.parent is not None:
        chain.append(block)
        block = block.parent
    return chain[::-1]
