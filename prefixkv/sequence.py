"""A sequence: one token stream over the blocks of a `PrefixCache`.

A sequence is (last block, number of tokens, number of computed tokens). Its tokens live in the
blocks, so that fork and release touch one reference, whatever the length:

    position   0 ............... num_computed_tokens ........ num_tokens
               | K and V are there | written by the step now |
                                     (`num_scheduled_tokens`)

The last block may hold more slots than the sequence owns (a partial hit, or after `rollback`);
they are never read for it, and the first write there decides what becomes of them.
"""

import sys
from array import array
from typing import Final

from prefixkv.block import FULL, PRIVATE, TAIL, Block, Root
from prefixkv.errors import InvalidRequest, StaleSequence
from prefixkv.hashing import Tokens, pack_tokens
from prefixkv.identity import ModelIdentity
from prefixkv.prefix_cache import PrefixCache

NO_LIMIT: Final = sys.maxsize
_RELEASED: Final = Root(b"released", b"", epoch=-1)


class Sequence:
    """One token stream; made by `open` and `fork`.

    A step of it is reserve, write, (compute), commit; `discard` takes back a step that failed.

    Attributes:
        last_block: where the chain ends; the root while there is no token.
        num_tokens: tokens that the chain holds for this sequence, scheduled ones included.
        num_computed_tokens: tokens whose K and V are valid.
        write_limit: tokens that it may make findable; what lies beyond stays private. Forks have
            the same.
    """

    __slots__ = (
        "_table", "cache", "last_block", "num_computed_tokens", "num_tokens", "root", "write_limit",
    )  # fmt: skip

    def __init__(self, cache: PrefixCache, root: Root, last_block: Block, num_tokens: int) -> None:
        self.cache = cache
        self.root = root
        self.last_block = last_block
        self.num_tokens = num_tokens
        self.num_computed_tokens = num_tokens
        self.write_limit = NO_LIMIT
        self._table = array("i")
        cache.pool.acquire(last_block)
        cache.sequences.add(self)

    @classmethod
    def open(cls, cache: PrefixCache, identity: ModelIdentity, tokens: Tokens) -> "Sequence":
        """Begin a sequence with the longest computed beginning of `tokens`.

        At least the last token is left to compute, since its logits are wanted. Costs one digest
        and one comparison for each block found, O(log children) where the match ends.
        """
        packed = pack_tokens(tokens)
        root = cache.root(identity)
        try:
            block, num_tokens = cache.match(root, packed)
        except BaseException:  # a digest that fails, or an interrupt
            cache.pool.drop_unheld(root)
            raise
        return cls(cache, root, block, num_tokens)

    def __repr__(self) -> str:
        return f"<Sequence computed={self.num_computed_tokens} tokens={self.num_tokens}>"

    @property
    def num_scheduled_tokens(self) -> int:
        """Tokens written in the books whose K and V the step now computes."""
        return self.num_tokens - self.num_computed_tokens

    @property
    def is_released(self) -> bool:
        """Whether the sequence has given up its blocks."""
        return self.root is _RELEASED

    # -- a step ----------------------------------------------------------------------------------

    def num_blocks_needed(self, num_tokens: int) -> int:
        """Free blocks that writing `num_tokens` more takes, a copy-on-write included."""
        block_size = self.cache.block_size
        last = self.last_block
        room = last.depth * block_size - self.num_tokens
        if room and not self._may_write_in_place(last, block_size - room):
            return 1 - (room - num_tokens) // block_size if num_tokens > room else 1
        return -((room - num_tokens) // block_size) if num_tokens > room else 0

    def reserve(self, num_tokens: int, *, spare_blocks: int = 0) -> bool:
        """Make room for writing `num_tokens` more, evicting what is idle if need be.

        Returns False, and changes nothing, if there is no room now. The room is not held: write
        before anything else takes blocks. With `spare_blocks`, so many must be free besides.

        Raises:
            StaleSequence: if it was released, or its weights were replaced.
        """
        if self.root.epoch != self.cache.epoch:
            raise self._stale()
        last = self.last_block
        room = last.depth * self.cache.block_size - self.num_tokens
        if num_tokens <= room and last.state == PRIVATE and last.refs == 1 and not spare_blocks:
            return True  # nearly always so while decoding
        return self.cache.pool.reserve(self.num_blocks_needed(num_tokens) + spare_blocks)

    def write(self, tokens: Tokens) -> None:
        """Append tokens whose K and V the coming step computes.

        A last block that others reference, or that is published, is left as it is: the sequence
        moves to a fresh copy, which is queued and has to run before the step's writes. A published
        tail that only this sequence holds, and goes on exactly, is written on in place.

        Raises:
            StaleSequence: if it was released, or its weights were replaced.
            InvalidRequest: if `reserve` has not made room; nothing has changed then.
        """
        cache = self.cache
        if self.root.epoch != cache.epoch:
            raise self._stale()
        data = pack_tokens(tokens)
        block_size = cache.block_size
        last = self.last_block
        room = last.depth * block_size - self.num_tokens
        if len(data) <= room * 4 and last.state == PRIVATE and last.refs == 1:
            last.tokens = last.tokens[: (block_size - room) * 4] + data
            self.num_tokens += len(data) // 4
            return
        needed = self.num_blocks_needed(len(data) // 4)
        if needed > len(cache.pool.free):
            raise InvalidRequest(
                f"a write of {len(data) // 4} tokens takes {needed} free blocks, "
                f"{len(cache.pool.free)} are free: reserve first"
            )
        if room and data:
            last = self._open_last_block(last, block_size - room)
            last.tokens = last.tokens[: (block_size - room) * 4] + data[: room * 4]
        if len(data) > room * 4:
            last = cache.pool.extend(last, data, room * 4)
        self.last_block = last
        self.num_tokens += len(data) // 4

    def _may_write_in_place(self, block: Block, offset: int) -> bool:
        if block.refs != 1:
            return False
        if block.state == PRIVATE:
            return True
        # a tail that it may not publish again is left to others
        is_tail = block.state == TAIL and len(block.tokens) == offset * 4
        return is_tail and self.num_tokens <= self.write_limit

    def _open_last_block(self, block: Block, offset: int) -> Block:
        """Return the block to write into from slot `offset` on: this one, or a copy of it."""
        cache = self.cache
        if self._may_write_in_place(block, offset):
            if block.state == TAIL:
                cache.take_over(block)
            return block
        cache.stats.num_copies += 1
        cache.stats.num_slots_copied += offset
        del self._table[block.depth - 1 :]
        return cache.pool.copy_on_write(block, offset)

    def commit(self) -> None:
        """Say that K and V of the scheduled tokens are there; publish the blocks they filled."""
        block_size = self.cache.block_size
        num_published = self.num_computed_tokens // block_size
        self.num_computed_tokens = self.num_tokens
        if self.num_tokens // block_size == num_published:
            return
        num_findable = min(self.num_tokens, self.write_limit)
        if num_findable // block_size <= num_published:
            return
        block = self.last_block
        follower = None
        while block.depth * block_size > num_findable:
            follower = block
            block = _parent(block)
        chain = [block]
        for _ in range(block.depth - num_published - 1):
            block = block.parent  # type: ignore[assignment] # only roots have none
            chain.append(block)
        chain.reverse()
        moved = self.cache.publish(chain, follower)
        if moved is not None:
            del self._table[num_published + moved :]
            if follower is None:
                self.last_block = chain[-1]

    def discard(self) -> None:
        """Take the scheduled tokens back: the step did not run, or it failed."""
        self._cut_off(self.num_computed_tokens)

    # -- branching -------------------------------------------------------------------------------

    def fork(self) -> "Sequence":
        """Return a new sequence that shares every block; O(1), copies nothing.

        Raises:
            StaleSequence: if it was released, or its weights were replaced.
            InvalidRequest: if tokens are scheduled.
        """
        if self.root.epoch != self.cache.epoch:
            raise self._stale()
        self._refuse_if_scheduled("fork")
        self.cache.stats.num_forks += 1
        fork = Sequence(self.cache, self.root, self.last_block, self.num_tokens)
        fork.write_limit = self.write_limit
        return fork

    def rollback(self, num_tokens: int) -> None:
        """Cut the sequence to its first `num_tokens` tokens; others keep what they share.

        Raises:
            StaleSequence: if it was released, or its weights were replaced.
            InvalidRequest: if tokens are scheduled, or it is shorter than that.
        """
        if self.root.epoch != self.cache.epoch:
            raise self._stale()
        self._refuse_if_scheduled("rollback")
        if not 0 <= num_tokens <= self.num_tokens:
            raise InvalidRequest(f"rollback to {num_tokens} of {self.num_tokens} tokens")
        self.num_computed_tokens = num_tokens
        self._cut(num_tokens)

    def drop_partial(self) -> bool:
        """Give up the part of the last block that was matched, if that is less than all of it.

        For when the copy that a partial hit takes does not fit; returns whether anything was
        given up: nothing is where no copy is needed, as the block is its own.
        """
        extra = self.num_tokens % self.cache.block_size
        if not extra:
            return False
        self._refuse_if_scheduled("drop_partial")
        last = self.last_block
        if last.state == PRIVATE and last.refs == 1 and last not in self.cache.pool.copies:
            return False
        self.rollback(self.num_tokens - extra)
        return True

    def drop_unfindable(self) -> None:
        """Give up what lies beyond its write limit, for a sequence that is over.

        The rest of the block that holds the limit can be published as a tail then, unless others
        hold that block too.
        """
        if self.write_limit == NO_LIMIT:
            return
        self.num_computed_tokens = min(self.num_computed_tokens, self.write_limit)
        self.discard()  # so that an interrupt leaves what can be discarded
        self.last_block.forget_logprobs_beyond_tokens()

    def release(self, *, cold: bool = False) -> None:
        """Give up all blocks; what is published stays findable until it is evicted.

        Scheduled tokens are discarded. A half-filled last block is published as a tail. With
        `cold`, what becomes idle by this is the first to be evicted. A second release does nothing.
        """
        if self.root is _RELEASED:
            return
        if self.num_tokens != self.num_computed_tokens:
            self.discard()
        self.drop_unfindable()
        cache = self.cache
        last = self.last_block
        if (
            cache.keep_tails
            and last.state == PRIVATE
            and last.refs == 1
            and last.parent is not None
            and last.parent.state == FULL
            and 0 < len(last.tokens) < cache.block_size * 4
            and last not in cache.pool.copies  # its copy has not run: it holds nothing yet
        ):
            cache.publish_tail(last)
        cache.sequences.discard(self)
        self.root = _RELEASED
        self.last_block = _RELEASED
        self.num_tokens = self.num_computed_tokens = 0
        cache.pool.release(last, cold=cold)

    # -- reading ---------------------------------------------------------------------------------

    def block_table(self) -> "array[int]":
        """Return the physical ids of the blocks in logical order (typecode "i").

        The array is the sequence's own: valid until its next operation, not to be changed. Costs
        O(1) for each block that is new since the last call; O(blocks) once after a fork.
        """
        table = self._table
        depth = self.last_block.depth
        del table[depth:]
        if len(table) < depth:
            ids = []
            block = self.last_block
            for _ in range(depth - len(table)):
                ids.append(block.block_id)
                assert block.parent is not None
                block = block.parent
            table.extend(reversed(ids))
        return table

    def _cut(self, num_tokens: int) -> None:
        block_size = self.cache.block_size
        before = last = self.last_block
        while last.depth > 0 and (last.depth - 1) * block_size >= num_tokens:
            last = _parent(last)
        if last is not before:
            last.refs += 1  # what follows holds one, so it is not idle
        self.last_block = last
        self.num_tokens = num_tokens
        del self._table[last.depth :]
        if last is not before:
            self.cache.pool.release(before)

    def _cut_off(self, num_tokens: int) -> None:
        """Cut the sequence, and its last block too if nobody else holds that."""
        self._cut(num_tokens)
        last = self.last_block
        if last.state == PRIVATE and last.refs == 1 and last.block_id >= 0:
            offset = self.num_tokens - (last.depth - 1) * self.cache.block_size
            last.tokens = last.tokens[: offset * 4]

    def _refuse_if_scheduled(self, what: str) -> None:
        if self.num_tokens != self.num_computed_tokens:
            raise InvalidRequest(
                f"{what} between write and commit: {self.num_scheduled_tokens} tokens are scheduled"
            )

    def _stale(self) -> StaleSequence:
        if self.root is _RELEASED:
            return StaleSequence("the sequence was released")
        return StaleSequence(
            f"the sequence was computed by the weights of epoch {self.root.epoch}, "
            f"now is epoch {self.cache.epoch}: release it and open it again"
        )


def _parent(block: Block) -> Block:
    assert block.parent is not None
    return block.parent
