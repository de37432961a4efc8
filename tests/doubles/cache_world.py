"""A small world around a `PrefixCache`: streams of tokens, a fake KV and a naive oracle.

The oracle keeps every stream as a plain list and knows nothing of blocks. After each operation it
recomputes what must hold and raises AssertionError if it does not.
"""

from array import array
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass

from fake_kv import Content, FakeKV, chain_of, content_identity

from prefixkv.block import FREE, FULL, PRIVATE, TAIL, Block, Root
from prefixkv.cache_control import Breakpoint, CacheControl, LeaseOutcome
from prefixkv.hashing import DigestFunction, chain_digest, pack_tokens, unpack_tokens
from prefixkv.identity import ModelIdentity
from prefixkv.invariants import check_leases
from prefixkv.lease import Lease, Leases
from prefixkv.prefix_cache import PrefixCache
from prefixkv.sequence import NO_LIMIT, Sequence

IDENTITIES = [
    ModelIdentity(architecture="m"),
    ModelIdentity(architecture="m", salt="a"),
    ModelIdentity(architecture="m", adapter_name="a"),
    # written one after the other, without tags, these two would read alike
    ModelIdentity(architecture="m", adapter_name="ab", salt="c"),
    ModelIdentity(architecture="m", adapter_name="a", salt="bc"),
]


@dataclass(eq=False)
class Stream:
    """What one sequence is meant to hold: all its tokens, computed or not."""

    identity: ModelIdentity
    tokens: list[int]
    sequence: Sequence


class World:
    """Operations on streams, each followed by nothing; call `check` after each.

    Attributes:
        seen: how often each situation came up that a test may want to be sure of.
    """

    def __init__(
        self, num_blocks: int, block_size: int, digest: DigestFunction = chain_digest
    ) -> None:
        self.cache = PrefixCache(num_blocks + 1, block_size, digest=digest)
        self.has_good_digest = digest is chain_digest
        self.kv = FakeKV()
        self.streams: list[Stream] = []
        self.now_s = 0
        self.leases = Leases(self.cache, max_ttl_s=100, clock=self.clock)
        self.leased: dict[Lease, tuple[ModelIdentity, list[int]]] = {}
        self.may_be_found: set[Content] = set()
        self.seen: Counter[str] = Counter()

    def clock(self) -> float:
        """Seconds, as leases see them."""
        return self.now_s

    # -- operations ------------------------------------------------------------------------------

    def open(
        self, identity: ModelIdentity, tokens: list[int], write_limit: int = NO_LIMIT
    ) -> Stream:
        """Open a stream; its match must be as long as the oracle finds one."""
        longest = self.longest_published(identity, tokens)
        stream = Stream(identity, list(tokens), Sequence.open(self.cache, identity, tokens))
        stream.sequence.write_limit = write_limit
        found = stream.sequence.num_tokens
        assert found == longest, f"{found} tokens were found of {longest}"
        self.seen["whole blocks found"] += found >= self.cache.block_size
        self.seen["part of a block found"] += found % self.cache.block_size > 0
        self.streams.append(stream)
        return stream

    def schedule(self, stream: Stream, num_tokens: int) -> bool:
        """Reserve and write the next tokens; on refusal nothing may have changed."""
        sequence = stream.sequence
        needed = sequence.num_blocks_needed(num_tokens)
        expected = self.num_available() >= needed
        assert self.cache.pool.can_reserve(needed) == expected
        before = self.snapshot()
        free = self.free_after_evicting(needed)
        reserved = sequence.reserve(num_tokens)
        assert reserved == expected
        if not reserved:
            assert self.snapshot() == before, "invariant 8 (failed operation): it changed something"
            self.seen["refused for want of room"] += 1
            return False
        assert set(self.cache.pool.free) == free
        self.kv.poison_free(self.cache)  # evicted just now
        self._note_what_a_write_meets(sequence)
        start = sequence.num_tokens
        sequence.write(stream.tokens[start : start + num_tokens])
        taken = len(free) - len(self.cache.pool.free)
        assert taken == needed, f"the predictor said {needed} blocks, the write took {taken}"
        return True

    def _note_what_a_write_meets(self, sequence: Sequence) -> None:
        last = sequence.last_block
        end_of_fill = (last.depth - 1) * self.cache.block_size + len(last.tokens) // 4
        if last.state == TAIL and end_of_fill == sequence.num_tokens:
            rivals = sum(other.last_block is last for other in self.cache.sequences) - 1
            self.seen["takeover wanted by several" if rivals else "takeover"] += 1

    def open_and_compute(
        self, tokens: list[int], identity: ModelIdentity = IDENTITIES[0]
    ) -> Stream:
        """Open a stream and compute all its tokens, in one step that must find room."""
        stream = self.open(identity, tokens)
        assert self.schedule(stream, len(tokens) - stream.sequence.num_tokens)
        self.run([stream])
        self.check()
        return stream

    def run_copies(self) -> None:
        """Run the queued copies."""
        self.seen["several copies in a step"] += len(self.cache.pool.copies) > 1
        self.kv.copy(self.cache.pending_copies)
        self.cache.pool.finish_copies()

    def run(self, streams: list[Stream], *, fail_copies: bool = False, fail: bool = False) -> None:
        """Run the step that computes what is scheduled, or let it fail on the way."""
        if fail_copies:
            for stream in streams:
                stream.sequence.discard()
            return
        self.run_copies()
        self.compute(streams, not_finite=streams if fail else ())

    def compute(self, streams: list[Stream], *, not_finite: Collection[Stream] = ()) -> None:
        """Write the scheduled slots and commit; those of `not_finite` are taken back."""
        for stream in streams:
            self.kv.write(stream.sequence, stream.tokens, failed=stream in not_finite)
        for stream in streams:
            if stream in not_finite:
                stream.sequence.discard()
            else:
                self._commit(stream)

    def _commit(self, stream: Stream) -> None:
        """Commit; collisions are counted exactly, and a good digest has none."""
        sequence, stats = stream.sequence, self.cache.stats
        block_size = self.cache.block_size
        before = sequence.num_computed_tokens // block_size
        collisions, deduplicated = stats.num_collisions, stats.num_deduplicated
        sequence.commit()
        num_findable = min(sequence.num_tokens, sequence.write_limit)
        identity, tokens = content_identity(sequence.root), stream.tokens[:num_findable]
        self.may_be_found |= {(identity, tuple(tokens[: i + 1])) for i in range(num_findable)}
        filled = chain_of(sequence.last_block)[before : num_findable // block_size]
        refused = [b for b in filled if b.state == PRIVATE and b.parent and b.parent.state == FULL]
        assert stats.num_collisions - collisions == len(refused)
        assert not (refused and self.has_good_digest)
        self.seen["collision"] += len(refused)
        self.seen["published by another before"] += stats.num_deduplicated - deduplicated

    def release(self, stream: Stream, *, cold: bool = False) -> None:
        """End a stream."""
        self.streams.remove(stream)
        stream.sequence.release(cold=cold)

    def fork(self, stream: Stream) -> Stream:
        """Fork a stream; no block may change hands."""
        free = len(self.cache.pool.free)
        child = Stream(stream.identity, list(stream.tokens), stream.sequence.fork())
        assert len(self.cache.pool.free) == free
        self.streams.append(child)
        return child

    def rollback(self, stream: Stream, num_tokens: int) -> None:
        """Cut a stream to a shorter length."""
        stream.sequence.rollback(num_tokens)
        del stream.tokens[num_tokens:]

    def preempt(self, stream: Stream) -> None:
        """Release, whatever is scheduled, and open anew."""
        limit = stream.sequence.write_limit
        stream.sequence.release()
        self.kv.poison_free(self.cache)
        stream.sequence = Sequence.open(self.cache, stream.identity, stream.tokens or [0])
        stream.sequence.write_limit = limit
        stream.tokens = stream.tokens or [0]

    def lease(
        self, stream: Stream, lengths: list[int], ttl_s: float, session: str | None
    ) -> tuple[LeaseOutcome, ...]:
        """Lease beginnings of a stream; what is refused changes nothing."""
        self.leases.expire()
        points = tuple(Breakpoint(length, ttl_s) for length in sorted(lengths))
        control = CacheControl(breakpoints=points, session=session)
        before = self.snapshot()
        outcomes = self.leases.grant(stream.sequence, control)
        if all(outcome.refused for outcome in outcomes):
            assert self.snapshot() == before, "invariant 8 (failed operation): it changed something"
        for lease in self.leases:
            tokens = stream.tokens[: lease.sequence.num_tokens]
            self.leased.setdefault(lease, (stream.identity, tokens))
        for outcome in outcomes:
            self.seen["lease refused" if outcome.refused else "lease granted"] += 1
        return outcomes

    def reset(self) -> None:
        """Forget what is published, leases included."""
        self.leases.release_all()
        self.cache.reset()

    def weights_changed(self) -> None:
        """Replace the weights; every stream is preempted."""
        self.leases.release_all()
        self.cache.weights_changed()
        self.check()
        for stream in self.streams:
            self.preempt(stream)
            assert stream.sequence.num_tokens == 0, "KV of the old weights was found"

    # -- oracle ----------------------------------------------------------------------------------

    def num_available(self) -> int:
        """Blocks that are free, or have neither sequence nor queued copy at or below them."""
        pool = self.cache.pool
        held: set[Block] = set()
        for sequence in self.cache.sequences:
            held.update(chain_of(sequence.last_block))
        for copy in pool.copies.values():
            held.update(chain_of(copy.source))
            held.update(chain_of(copy.target))
        return pool.num_usable - len(held)

    def free_after_evicting(self, needed: int) -> set[Block]:
        """What is free once `needed` blocks are, evicting one at a time by the rules."""
        free = set(self.cache.pool.free)
        blocks = [b for b in self.cache.pool.blocks if b.state >= TAIL]
        refs = {b: b.refs for b in blocks}
        last_use = {b: b.last_use for b in blocks}
        while len(free) < needed:
            idle = [b for b in blocks if refs[b] == 0 and b not in free]
            if not idle:
                break
            victim = min(idle, key=lambda b: (b.priority, last_use[b], -b.depth, b.block_id))
            free.add(victim)
            parent = victim.parent
            if parent in refs:
                refs[parent] -= 1
                last_use[parent] = max(last_use[parent], last_use[victim])
        return free

    def longest_published(self, identity: ModelIdentity, tokens: list[int]) -> int:
        """The longest beginning of tokens[:-1] that any published chain holds."""
        root = self.cache.pool.roots.get(identity.canonical)
        best = 0
        for block in self.cache.pool.blocks:
            if block.state < TAIL:
                continue
            chain = chain_of(block)
            if chain[0].parent is not root:
                continue
            held = [t for b in chain for t in unpack_tokens(b.tokens)]
            shared = 0
            for ours, theirs in zip(tokens[:-1], held, strict=False):
                if ours != theirs:
                    break
                shared += 1
            best = max(best, shared)
        return best

    def snapshot(self) -> object:
        """Everything that a failed operation must leave alone."""
        pool = self.cache.pool
        blocks = tuple(
            (b.tokens, b.parent, b.refs, b.state, b.digest, b.depth, b.last_use, b.priority)
            for b in pool.blocks
        )
        sequences = {s: (s.last_block, s.num_tokens) for s in self.cache.sequences}
        books = (list(pool.free), list(pool.order), dict(pool.index), dict(pool.copies))
        return blocks, sequences, books, dict(self.kv.slots)

    def check(self) -> None:
        """All invariants, those of the content included."""
        cache = self.cache
        self.kv.poison_free(cache)
        cache.check_invariants()
        check_leases(self.leases)
        owned = [*(s.sequence for s in self.streams), *self.leases.sequences()]
        assert Counter(owned) == Counter(cache.sequences)
        for lease in self.leases:
            tenant, tokens = self.leased[lease]
            assert lease.sequence.num_tokens == len(tokens)
            assert self.longest_published(tenant, [*tokens, 0]) == len(tokens), "a lease is lost"
        assert cache.pool.num_reclaimable() == self.num_available() - len(cache.pool.free)
        kv = FakeKV(dict(self.kv.slots))
        kv.copy(cache.pending_copies)  # what will run before anything is read
        for stream in self.streams:
            identity = content_identity(stream.sequence.root)
            for position, content in enumerate(kv.read(stream.sequence)):
                expected = (identity, tuple(stream.tokens[: position + 1]))
                assert content == expected, f"invariant 5 (content): position {position}"
        self._check_published(kv)

    def _check_published(self, kv: FakeKV) -> None:
        """What is published holds exactly what it says."""
        for block in self.cache.pool.blocks:
            if block.state < TAIL:
                continue
            chain = chain_of(block)
            root = chain[0].parent
            tokens = tuple(t for b in chain for t in unpack_tokens(b.tokens))
            start = (block.depth - 1) * self.cache.block_size
            for offset in range(len(block.tokens) // 4):
                content = kv.slots.get((block.block_id, offset))
                assert isinstance(root, Root)
                expected = (content_identity(root), tokens[: start + offset + 1])
                assert content == expected, f"invariant 5 (content): published {block} lies"
                assert content in self.may_be_found, f"{block} shows what is beyond a write limit"

    def finish(self) -> None:
        """Release everything, evict everything: the pool must be as at the start."""
        for stream in list(self.streams):
            self.release(stream)
        self.leases.release_all()
        self.check()
        pool = self.cache.pool
        assert pool.reserve(pool.num_usable)
        assert len(pool.free) == pool.num_usable
        assert not pool.index
        assert not pool.roots
        assert not pool.copies
        assert all(b.state == FREE and b.refs == 0 for b in pool.blocks)
        self.cache.check_invariants()


def packed(*tokens: int) -> bytes:
    """Packed token ids."""
    return pack_tokens(array("i", tokens))
