"""Leases: bounded, expiring pins on chains, so that a prefix outlives the pressure of others.

A lease holds one sequence, cut to the tokens that are to stay findable; it need not end a block.
Leases never stand in the way of a request: they count against a share of the pool, and give way
where nothing else is left.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from time import monotonic

from sortedcontainers import SortedKeyList

from prefixkv.block import PRIVATE, Block, Root, longest_common_child
from prefixkv.cache_control import MAX_BREAKPOINTS, Breakpoint, CacheControl, LeaseOutcome
from prefixkv.prefix_cache import PrefixCache
from prefixkv.sequence import Sequence

Key = tuple[Block, int, str | None]
"""The last block (which belongs to one root), the length in tokens, and the session."""


@dataclass(slots=True)
class LeaseStats:
    """Counts since the start; they only grow."""

    num_granted: int = 0
    num_renewed: int = 0
    num_refused: int = 0
    num_expired: int = 0
    num_given_up: int = 0


@dataclass(eq=False, slots=True)
class Lease:
    """A pin on the chain of `sequence`.

    Attributes:
        expires_at: by the clock of `Leases`.
        number: order of granting.
    """

    sequence: Sequence
    session: str | None
    expires_at: float
    number: int

    @property
    def key(self) -> Key:
        """What a lease is renewed by."""
        return self.sequence.last_block, self.sequence.num_tokens, self.session

    def is_covered_by(self, chain: list[Block], num_tokens: int) -> bool:
        """Whether a chain holds all of its tokens, in the same blocks or in a copy of the last.

        Args:
            chain: its blocks from the root on, so that a block's depth is its place; O(1) with it.
            num_tokens: of the chain.
        """
        own, length = self.sequence.last_block, self.sequence.num_tokens
        if num_tokens < length:
            return False
        block = chain[own.depth]
        offset = length - (own.depth - 1) * self.sequence.cache.block_size
        return block is own or (
            block.parent is own.parent and block.tokens.startswith(own.tokens[: offset * 4])
        )


def _expiry_rank(lease: Lease) -> tuple[float, int]:
    return lease.expires_at, lease.number


class Leases:
    """All leases on one cache, the one that expires next first.

    Args:
        max_share: of the pool's blocks, that may be under leases; there are no more leases than
            such blocks, either.
        max_ttl_s: what a longer time is cut to.
        clock: seconds that only grow.

    Attributes:
        stats: what became of them.
        max_num_blocks: blocks that may be under leases.
    """

    def __init__(
        self,
        cache: PrefixCache,
        *,
        max_share: float = 0.5,
        max_ttl_s: float = 3600,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self.cache = cache
        self.max_num_blocks = int(cache.pool.num_usable * max_share)
        self.max_ttl_s = max_ttl_s
        self.clock = clock
        self.stats = LeaseStats()
        self._by_expiry: SortedKeyList[Lease] = SortedKeyList(key=_expiry_rank)
        self._by_key: dict[Key, Lease] = {}
        self._by_session: dict[tuple[Root, str], dict[Lease, None]] = {}
        self._holders: dict[Block, int] = {}  # leases that end there, and leased followers
        self._num_ever = 0

    def __len__(self) -> int:
        return len(self._by_key)

    def __iter__(self) -> Iterator[Lease]:
        return iter(self._by_expiry)

    @property
    def num_blocks(self) -> int:
        """Distinct blocks under leases."""
        return len(self._holders)

    def sequences(self) -> set[Sequence]:
        """The sequences that leases hold."""
        return {lease.sequence for lease in self._by_key.values()}

    # -- granting --------------------------------------------------------------------------------

    def grant(self, sequence: Sequence, control: CacheControl) -> tuple[LeaseOutcome, ...]:
        """Lease what a request asks for, out of a sequence of it that is about to be released.

        Of more than four breakpoints the longest are leased. If any is, the session's earlier
        leases that the longest of them covers, and outlives, are released. Costs O(blocks) for
        each breakpoint, and O(leases of the session).

        Args:
            sequence: all computed; a half-filled last block of it may get published.
        """
        assert not sequence.num_scheduled_tokens
        self.expire()
        points = control.breakpoints
        num_left_out = max(0, len(points) - MAX_BREAKPOINTS)
        outcomes = [
            self._refuse(point, f"more than {MAX_BREAKPOINTS}") for point in points[:num_left_out]
        ]
        granted: list[Lease] = []
        for point in points[num_left_out:]:
            lease = self._grant(sequence, point, control.session)
            if isinstance(lease, Lease):
                granted.append(lease)
                outcomes.append(LeaseOutcome(point.num_tokens, self._applied(point)))
            else:
                outcomes.append(self._refuse(point, lease))
        if granted and control.session is not None:
            self._supersede(granted, sequence.root, control.session)
        return tuple(outcomes)

    def _applied(self, point: Breakpoint) -> float:
        return min(point.ttl_s, self.max_ttl_s)

    def _refuse(self, point: Breakpoint, why: str) -> LeaseOutcome:
        self.stats.num_refused += 1
        return LeaseOutcome(point.num_tokens, self._applied(point), why)

    def _grant(self, sequence: Sequence, point: Breakpoint, session: str | None) -> Lease | str:
        """Grant or renew one lease, or say why not, and change nothing."""
        end = self._find_end(sequence, point.num_tokens)
        if isinstance(end, str):
            return end
        expires_at = self.clock() + self._applied(point)
        lease = self._by_key.get((end, point.num_tokens, session))
        if lease is not None:
            self._renew(lease, expires_at)
            return lease
        refusal = self._find_no_room(end)
        if refusal is not None:
            return refusal
        if end.state == PRIVATE:
            self.cache.publish_tail(end)
        pin = Sequence(self.cache, sequence.root, end, point.num_tokens)
        return self._add(Lease(pin, session, expires_at, self._num_ever))

    def _find_end(self, sequence: Sequence, num_tokens: int) -> Block | str:
        """Find the block that a lease is to end in: published, or fit to become a tail."""
        if not self.cache.enabled:
            return "the cache is disabled"
        if num_tokens > sequence.write_limit:
            return f"{num_tokens} tokens, {sequence.write_limit} may be found"
        if num_tokens > sequence.num_computed_tokens:
            return f"{num_tokens} tokens, {sequence.num_computed_tokens} are computed"
        block_size = self.cache.block_size
        block = sequence.last_block
        while (block.depth - 1) * block_size >= num_tokens:
            assert block.parent is not None
            block = block.parent
        if block.state != PRIVATE:
            return block
        parent = block.parent
        assert parent is not None
        if parent.state == PRIVATE:
            return "its blocks cannot be published"
        start = parent.depth * block_size
        own = block.tokens[: (num_tokens - start) * 4]
        sibling, shared = longest_common_child(parent, own)
        if sibling is not None and shared == len(own):
            return sibling
        may_be_found = start + len(block.tokens) // 4 <= sequence.write_limit
        is_whole = len(block.tokens) == block_size * 4
        if is_whole or not may_be_found or block in self.cache.pool.copies:
            return "its last block cannot be published"
        return block

    def _find_no_room(self, end: Block) -> str | None:
        """Say why a chain may not be leased besides what is; None if it may."""
        if len(self) >= self.max_num_blocks:
            return f"{len(self)} of {self.max_num_blocks} leases are granted"
        needed = 0
        block = end
        while block.depth and block not in self._holders:
            needed += 1
            assert block.parent is not None
            block = block.parent
        if self.num_blocks + needed <= self.max_num_blocks:
            return None
        return f"needs {needed} blocks more, {self.num_blocks} of {self.max_num_blocks} leased"

    def _supersede(self, granted: list[Lease], root: Root, session: str) -> None:
        longest = granted[-1]
        num_tokens, block = longest.sequence.num_tokens, longest.sequence.last_block
        chain = [block]
        while block.parent is not None:
            block = block.parent
            chain.append(block)
        chain.reverse()
        for lease in list(self._by_session[root, session]):
            outlives = lease.expires_at > longest.expires_at
            if lease not in granted and not outlives and lease.is_covered_by(chain, num_tokens):
                self._release(lease)

    def _renew(self, lease: Lease, expires_at: float) -> None:
        self.stats.num_renewed += 1
        self._by_expiry.remove(lease)
        lease.expires_at = max(lease.expires_at, expires_at)
        self._by_expiry.add(lease)

    # -- books -----------------------------------------------------------------------------------

    def _add(self, lease: Lease) -> Lease:
        self.stats.num_granted += 1
        self._num_ever += 1
        self._by_key[lease.key] = lease  # first: `recover` knows the rest from here
        self._by_expiry.add(lease)
        if lease.session is not None:
            leases = self._by_session.setdefault((lease.sequence.root, lease.session), {})
            leases[lease] = None
        self._hold(lease.sequence.last_block)
        return lease

    def _hold(self, block: Block) -> None:
        """Count a holder of a block, and of those before it that had none; O(those)."""
        holders = self._holders
        while block.depth:
            holders[block] = count = holders.get(block, 0) + 1
            if count > 1:
                return
            assert block.parent is not None
            block = block.parent

    def _let_go(self, block: Block) -> None:
        """Undo `_hold`."""
        holders = self._holders
        while block.depth:
            holders[block] -= 1
            if holders[block]:
                return
            del holders[block]
            assert block.parent is not None
            block = block.parent

    def _release(self, lease: Lease) -> None:
        del self._by_key[lease.key]
        self._by_expiry.remove(lease)
        if lease.session is not None:
            session = (lease.sequence.root, lease.session)
            del self._by_session[session][lease]
            if not self._by_session[session]:
                del self._by_session[session]
        self._let_go(lease.sequence.last_block)
        lease.sequence.release()

    def recover(self) -> None:
        """Put the books in order after an interrupt: those that are found by key are there."""
        leases = sorted(self._by_key.values(), key=lambda lease: lease.number)
        self._by_expiry.clear()
        self._by_session.clear()
        self._holders.clear()
        self._by_key.clear()
        granted = self.stats.num_granted
        for lease in leases:
            if not lease.sequence.is_released:
                self._add(lease)
        self.stats.num_granted = granted

    # -- ending ----------------------------------------------------------------------------------

    def expire(self) -> bool:
        """Release those whose time is over; whether there were any."""
        if not self._by_expiry:
            return False
        now, before = self.clock(), len(self)
        while self._by_expiry and self._by_expiry[0].expires_at <= now:
            self._release(self._by_expiry[0])
        self.stats.num_expired += before - len(self)
        return len(self) < before

    def give_way(self, num_blocks: int = 1) -> bool:
        """Release those nearest to their expiry, until so many blocks are under none any more.

        Returns False if there is none to release.
        """
        kept = self.num_blocks - max(1, num_blocks)
        gave_way = bool(self._by_expiry)
        while self._by_expiry and self.num_blocks > kept:
            self._release(self._by_expiry[0])
            self.stats.num_given_up += 1
        return gave_way

    def release_all(self) -> None:
        """Release all: what they pin is to be forgotten."""
        while self._by_expiry:
            self._release(self._by_expiry[0])
