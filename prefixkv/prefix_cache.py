"""The prefix cache: finds what is computed already, and publishes what has been computed.

A runnable example, for people who own their model loop:

    >>> from prefixkv import ModelIdentity, PrefixCache, Sequence
    >>> cache = PrefixCache(num_blocks=16, block_size=4)
    >>> model = ModelIdentity(architecture="MyModel")
    >>> prompt = [5, 3, 8, 1, 9, 2]
    >>> seq = Sequence.open(cache, model, prompt)        # nothing is cached yet
    >>> seq.num_tokens
    0
    >>> seq.reserve(len(prompt))                         # False would mean: not now
    True
    >>> seq.write(prompt)                                # then compute K and V into the slots of
    >>> len(seq.block_table()), len(cache.take_copies()) # seq.block_table(), after the copies
    (2, 0)
    >>> seq.commit()                                     # K and V are there: publish full blocks
    >>> branch = seq.fork()                              # shares every block, copies nothing
    >>> branch.reserve(1), branch.write([7])             # the first write into a shared block...
    (True, None)
    >>> [(copy.num_slots) for copy in cache.take_copies()]      # ...moves the writer to a copy
    [2]
    >>> branch.commit(); branch.release(); seq.release()
    >>> again = Sequence.open(cache, model, prompt)      # one token is always left to compute
    >>> again.num_tokens
    5
    >>> again.release(); cache.check_invariants()
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from prefixkv.block import (
    FULL,
    PRIVATE,
    TAIL,
    Block,
    BlockCopy,
    Root,
    add_child,
    longest_common_child,
    remove_child,
)
from prefixkv.cache_control import MissReason
from prefixkv.hashing import DigestFunction, chain_digest, root_digest
from prefixkv.identity import ModelIdentity
from prefixkv.pool import BlockPool

if TYPE_CHECKING:
    from prefixkv.sequence import Sequence


@dataclass(slots=True)
class CacheStats:
    """Counts since the cache was made; they only grow."""

    num_deduplicated: int = 0
    num_collisions: int = 0
    num_takeovers: int = 0
    num_forks: int = 0
    num_copies: int = 0
    num_slots_copied: int = 0


class PrefixCache:
    """Blocks findable by content, over one `BlockPool`.

    Single-threaded: one thread owns it and all its sequences.

    Args:
        num_blocks: blocks of the pool, the reserved block 0 included.
        block_size: tokens a block.
        enabled: False makes every match a miss and publishes nothing.
        match_partial: whether a match may end inside a block.
        keep_tails: whether the half-filled last block of a finished sequence stays findable.
        digest: finds candidates; replaceable, since nothing depends on it but reuse.

    Attributes:
        earlier_roots: digests of roots before the weights changed, by key; to explain a miss.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        enabled: bool = True,
        match_partial: bool = True,
        keep_tails: bool = True,
        digest: DigestFunction = chain_digest,
    ) -> None:
        self.pool = BlockPool(num_blocks, block_size)
        self.block_size = block_size
        self.enabled = enabled
        self.match_partial = match_partial
        self.keep_tails = keep_tails and enabled
        self.digest = digest
        self.epoch = 0
        self.earlier_roots: dict[bytes, bytes] = {}
        self.stats = CacheStats()
        self.sequences: set[Sequence] = set()

    # -- finding ---------------------------------------------------------------------------------

    def root(self, identity: ModelIdentity) -> Root:
        """Return the open root of an identity under the weights of now, new if need be."""
        key = identity.canonical
        root = self.pool.roots.get(key)  # of this epoch, since a new one begins with none
        if root is None:
            digest = root_digest(identity.at_epoch(self.epoch).canonical)
            root = self.pool.roots[key] = Root(key, digest, self.epoch, identity)
        return root

    def match(self, root: Root, tokens: bytes) -> tuple[Block, int]:
        """Find the longest computed beginning of `tokens` (packed), short of the last token.

        Returns the block where it ends and its length in tokens; the block may hold more. Mutates
        nothing. Every block on the way is compared by tokens and by parent, so that the whole chain
        is verified by induction, whatever the digest does.
        """
        limit = len(tokens) - 4
        if not self.enabled or limit <= 0:
            return root, 0
        get, hashed, span = self.pool.index.get, self.digest, self.block_size * 4
        parent: Block = root
        digest = root.digest
        assert digest is not None
        start = 0
        for end in range(span, limit + 1, span):
            chunk = tokens[start:end]
            digest = hashed(digest + chunk)
            block = get(digest)
            if block is None or block.parent is not parent or block.tokens != chunk:
                break
            parent = block
            start = end
        if self.match_partial and parent.children is not None:
            child, shared = longest_common_child(parent, tokens[start : min(start + span, limit)])
            if child is not None:
                return child, (start + shared) // 4
        return parent, start // 4

    # -- publishing ------------------------------------------------------------------------------

    def publish(self, chain: list[Block], follower: Block | None) -> int | None:
        """Publish blocks that a step has filled.

        Content that is published already is not published twice: what follows moves onto the
        incumbent, and the newcomer is freed. A digest that belongs to other content makes the
        newcomer private for life, and so what follows it.

        Args:
            chain: the blocks, each the parent of the next; where an incumbent takes a place, it
                is put there.
            follower: the block after the last one; None if the sequence ends with it.

        Returns the index of the first place that was taken by an incumbent, None if there is none.
        """
        parent = chain[0].parent
        assert parent is not None
        if not self.enabled or parent.state == PRIVATE:
            return None
        hashed, setdefault, digest = self.digest, self.pool.index.setdefault, parent.digest
        assert digest is not None
        self.pool.version += 1
        moved: int | None = None
        for block in chain:
            digest = hashed(digest + block.tokens)
            incumbent = setdefault(digest, block)
            if incumbent is block:
                block.digest = digest
                block.state = FULL
                if parent.children is None:
                    parent.children = block
                else:
                    add_child(parent, block)
                parent = block
            elif incumbent.parent is parent and incumbent.tokens == block.tokens:
                i = block.depth - chain[0].depth
                self._give_way(block, incumbent, chain[i + 1] if i + 1 < len(chain) else follower)
                moved = i if moved is None else moved
                parent = chain[i] = incumbent
            else:
                self.stats.num_collisions += 1
                break
        return moved

    def _give_way(self, block: Block, incumbent: Block, follower: Block | None) -> None:
        """Move what follows `block` (a block, or the end of the sequence) onto `incumbent`."""
        self.stats.num_deduplicated += 1
        self.pool.acquire(incumbent)
        if follower is not None:
            follower.parent = incumbent
        self.pool.release(block)

    def publish_tail(self, block: Block) -> None:
        """Make the half-filled last block of a finished sequence findable, if it adds anything."""
        parent = block.parent
        assert parent is not None
        child, shared = longest_common_child(parent, block.tokens)
        if child is not None and shared == len(block.tokens):  # a beginning of a published sibling
            child.learn(block.logprobs)
            return
        block.state = TAIL
        add_child(parent, block)
        self.pool.version += 1

    def take_over(self, tail: Block) -> None:
        """Make a published tail private again, for its only holder to write on."""
        assert tail.parent is not None
        remove_child(tail.parent, tail)
        tail.state = PRIVATE
        self.stats.num_takeovers += 1

    # -- copies ----------------------------------------------------------------------------------

    @property
    def pending_copies(self) -> list[BlockCopy]:
        """Queued copies, in the order in which they have to run."""
        return list(self.pool.copies.values())

    def take_copies(self) -> list[BlockCopy]:
        """Return the queued copies and forget them; the caller runs them before anything else.

        An engine whose copies can fail reads `pending_copies` and calls `pool.finish_copies()`
        once they ran.
        """
        copies = self.pending_copies
        self.pool.finish_copies()
        return copies

    # -- starting anew ---------------------------------------------------------------------------

    def reset(self) -> None:
        """Forget everything: nothing computed so far is found again; O(blocks).

        Idle blocks are freed. Blocks in use become private and are freed when they are released.
        Sequences go on, but publish nothing more.
        """
        self._forget("reset")

    def _forget(self, why: MissReason) -> None:
        pool = self.pool
        digests = list(pool.index)
        pool.reserve(len(pool.free) + pool.num_reclaimable())
        pool.forgotten.add(digests, why)
        for block in pool.blocks:
            if block.state >= TAIL:
                block.state = PRIVATE
                block.digest = None
                block.children = None
        for root in pool.roots.values():
            root.state = PRIVATE
            root.children = None
        pool.index.clear()
        pool.roots.clear()
        pool.version += 1

    def weights_changed(self) -> None:
        """Begin a new epoch: what the old weights computed is neither found nor written on again.

        Sequences of the old epoch can only be released; opening them anew recomputes them.
        """
        earlier = {root.key: root.digest or b"" for root in self.pool.roots.values()}
        kept = [*(self.earlier_roots | earlier).items()][-len(self.pool.blocks) :]
        self.earlier_roots = dict(kept)
        self._forget("weights_changed")
        self.epoch += 1

    # -- accounts --------------------------------------------------------------------------------

    @property
    def usage(self) -> float:
        """Share of the pool that is in use, and cannot be had by evicting; O(blocks)."""
        pool = self.pool
        return 1 - (len(pool.free) + pool.num_reclaimable()) / pool.num_usable

    def check_invariants(self) -> None:
        """Recompute the books from scratch; O(blocks).

        Raises:
            InvariantViolation: naming the first invariant that does not hold.
        """
        from prefixkv.invariants import check

        check(self)
