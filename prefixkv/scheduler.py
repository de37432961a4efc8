"""The scheduler: who computes which tokens in the next step.

A request waits, runs, may be preempted back into the queue, and ends. Each step is filled up to a
token budget: first the requests that decode (one token each), then chunks of prompts that run, then
the head of the queue.

- No room for a running request: the oldest running one is never preempted, so there is always
  progress; among the others the one that loses least gives way. Its published blocks stay findable.
- A twin, whose match would go on into what an earlier-admitted running request is about to compute,
  holds nothing and waits for that one.
- A head of the queue that found no room is tried again when the cache has changed, not before.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import groupby
from time import monotonic

from sortedcontainers import SortedKeyList

from prefixkv.block import common_beginning
from prefixkv.cache_control import MissReason
from prefixkv.config import SchedulerConfig
from prefixkv.errors import InvariantViolation, QueueFull, RequestTooLarge
from prefixkv.held_branch import HeldBranch, HeldBranches
from prefixkv.invariants import check_leases
from prefixkv.lease import Leases
from prefixkv.miss import explain
from prefixkv.prefix_cache import PrefixCache
from prefixkv.prompt_logprobs import recall
from prefixkv.request import Branch, Request
from prefixkv.sequence import Sequence


@dataclass(frozen=True, slots=True)
class ScheduledBranch:
    """One branch's share of a step: its tokens [start, start + num_tokens)."""

    branch: Branch
    sequence: Sequence
    start: int
    num_tokens: int

    @property
    def samples(self) -> bool:
        """Whether the step reaches the branch's last token, so that the next one is drawn."""
        return self.start + self.num_tokens == self.branch.num_tokens

    @property
    def num_logits(self) -> int:
        """How many of its last tokens have their logits wanted: for the draw, and for scoring."""
        request, end = self.branch.request, self.start + self.num_tokens
        if request.is_scoring:  # the value of a token comes from the one before it
            return max(0, min(self.num_tokens, end + 1 - len(request.prompt_logprobs)))
        return int(self.samples)


@dataclass(slots=True)
class Batch:
    """A step being filled.

    Attributes:
        budget: what is left of its tokens.
        scored: what is left of its tokens for requests that want log-probabilities of their prompt.
        grown: requests that took blocks.
    """

    budget: int
    scored: int
    items: dict[Branch, ScheduledBranch] = field(default_factory=dict)
    grown: set[Request] = field(default_factory=set)

    def add(self, branch: Branch, num_tokens: int) -> None:
        """Schedule the next tokens of a branch. Requires that their room is reserved."""
        sequence = branch.sequence
        assert sequence is not None
        start = sequence.num_tokens
        stats, usage = sequence.cache.stats, branch.request.usage
        copies, slots = stats.num_copies, stats.num_slots_copied
        free = len(sequence.cache.pool.free)
        sequence.write(branch.token_slice(start, start + num_tokens))
        if len(sequence.cache.pool.free) != free:
            self.grown.add(branch.request)
        usage.num_copies += stats.num_copies - copies
        usage.num_slots_copied += stats.num_slots_copied - slots
        self.items[branch] = ScheduledBranch(branch, sequence, start, num_tokens)
        self._spend(branch, num_tokens)

    def remove(self, branch: Branch) -> None:
        """Take a branch out again, if it is in; the caller takes its sequence away."""
        item = self.items.pop(branch, None)
        if item is not None:
            self._spend(branch, -item.num_tokens)

    def _spend(self, branch: Branch, num_tokens: int) -> None:
        self.budget -= num_tokens
        if branch.request.is_scoring:
            self.scored -= num_tokens

    def chunk(self, branch: Branch) -> int:
        """How many of its pending tokens a branch can have; 0 if none."""
        left = min(self.budget, self.scored) if branch.request.is_scoring else self.budget
        return min(branch.num_pending_tokens, left)


class Scheduler:
    """Decides each step over a `PrefixCache`; pure bookkeeping.

    Attributes:
        waiting: the queue, by (priority, arrival, index).
        running: branches that hold a sequence, by the first admission of their request.
        num_prompt_tokens, num_cached_tokens: of all requests admitted so far, each counted once.
        held: branches that neither wait nor run; they give way to those that do.
        leases: pins on prefixes; they give way where nothing else is left.
        misses: of all requests admitted so far, by reason.
        twins: who waits for a running branch, with the number of tokens it must have computed.
    """

    def __init__(
        self,
        cache: PrefixCache,
        config: SchedulerConfig,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self.cache = cache
        self.config = config
        self.waiting: SortedKeyList[Branch] = SortedKeyList(key=lambda b: b.queue_rank)
        self.running: SortedKeyList[Branch] = SortedKeyList(key=lambda b: b.running_rank)
        self.twins: dict[Branch, list[tuple[int, Branch]]] = {}
        self.held = HeldBranches()
        self.leases = Leases(
            cache,
            max_share=config.max_leased_share,
            max_ttl_s=config.max_lease_ttl_s,
            clock=clock,
        )
        self.misses: Counter[MissReason] = Counter()
        self.num_admissions = 0
        self.num_preemptions = 0
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0

    # -- coming and going ------------------------------------------------------------------------

    @property
    def num_waiting(self) -> int:
        """Branches that hold nothing yet, twins included."""
        return len(self.waiting) + sum(map(len, self.twins.values()))

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self.waiting or self.running)

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            RequestTooLarge: if the pool, or a step, can never hold it.
            QueueFull: if too many requests wait.
        """
        self._refuse_if_too_large(request)
        limit = self.config.max_num_waiting
        if limit is not None and self.num_waiting >= limit:
            raise QueueFull(f"{self.num_waiting} requests are waiting, the limit is {limit}")
        self.waiting.update(request.branches)

    def _refuse_if_too_large(self, request: Request) -> None:
        block_size, usable = self.cache.block_size, self.cache.pool.num_usable
        needed = request.num_blocks_at_most(block_size)
        width = request.params.n if request.in_lockstep else 1
        if needed > usable:
            each = f" in each of {width} beams" if request.in_lockstep else ""
            raise RequestTooLarge(
                f"{request.num_prompt_tokens} prompt tokens and {request.max_tokens} output tokens"
                f"{each} need {needed} blocks of {block_size} tokens, the pool has {usable}"
            )
        at_once = min(self.config.max_num_seqs, self.config.max_num_batched_tokens)
        if width > at_once:
            raise RequestTooLarge(f"{width} beams step together, {at_once} branches can at most")

    def finish(self, request: Request) -> None:
        """End a request, wherever its branches are; what it published stays findable."""
        for branch in list(request.branches):
            self.finish_branch(branch)

    def hold(self, branch: Branch) -> HeldBranch:
        """Hold a fork of a branch: all its tokens, and the blocks of those that are computed."""
        sequence = branch.sequence.fork() if branch.sequence is not None else None
        request = branch.request
        return self.held.hold(request.identity, branch.tokens[:], sequence, request.write_limit)

    def lease(self, branch: Branch) -> None:
        """Lease what a request asks for, from the first of its branches that ends well."""
        request = branch.request
        if request.leases is None and branch.sequence is not None:
            branch.sequence.drop_unfindable()
            request.leases = self.leases.grant(branch.sequence, request.cache_control)

    def release_pins(self) -> None:
        """Let go of all that is held or leased: the cache is about to forget."""
        self.held.give_all_up()
        self.leases.release_all()

    def finish_branch(self, branch: Branch, *, cold: bool = False) -> None:
        """End one branch; with `cold`, what becomes idle by it is the first to be evicted."""
        if branch.sequence is not None:
            self._stop_running(branch, cold=cold)
        else:
            for leader, twins in list(self.twins.items()):
                self._keep_twins(leader, [twin for twin in twins if twin[1] is not branch])
            self.waiting.discard(branch)
        branch.request.branches.remove(branch)

    def fork(self, branch: Branch, index: int) -> Branch:
        """Add a branch that goes on from where `branch` is, sharing all its blocks.

        It runs if there is a place; else it waits, and is matched like any other.
        """
        child = branch.fork(index)
        if len(self.running) < self.config.max_num_seqs:
            self.running.add(child)
            return child
        assert child.sequence is not None
        child.sequence.release()
        child.sequence = None
        self.waiting.add(child)
        return child

    def branch_out(self, request: Request, goes_on: Iterable[tuple[int, int]]) -> None:
        """Let the beams of a request go on: each from a beam of now, by one token.

        A beam that goes on once is not forked; one that does not is released, cold. O(width).

        Args:
            goes_on: (position in `request.branches`, token id) of each beam to be.
        """
        parents, chosen = list(request.branches), list(goes_on)
        children: list[Branch] = []
        first_child: dict[int, int] = {}
        for i, (place, _) in enumerate(chosen):
            if first_child.setdefault(place, i) == i:
                children.append(parents[place])
            else:
                children.append(parents[place].fork(0))
                request.branches.append(children[-1])  # so that `restart` finds it, come what may
        for place, beam in enumerate(parents):
            if place in first_child:
                self.running.remove(beam)
            else:
                self._stop_running(beam, cold=True)
        for i, (child, (_, token_id)) in enumerate(zip(children, chosen, strict=True)):
            child.index = i
            child.append(token_id)
        self.running.update(children)
        request.branches = children

    def restart(self, request: Request) -> None:
        """Take everything from a request that runs in lockstep, and queue it from its beginning.

        For a step that was interrupted: nothing is taken for granted about who runs.
        """
        others = [branch for branch in self.running if branch.request is not request]
        self.running.clear()
        self.running.update(others)
        for branch in request.branches:
            self.waiting.update(twin for _, twin in self.twins.pop(branch, ()))
            if branch.sequence is not None:
                branch.sequence.release()
                branch.sequence = None
        request.restart()
        self.waiting.update(request.branches)

    def recover(self, branches: Iterable[Branch]) -> None:
        """Put the books in order after `schedule` was interrupted, wherever that was.

        Who holds a sequence keeps what is computed and runs; all others wait. Nothing that was
        scheduled counts.

        Args:
            branches: all that are not over.
        """
        self.running.clear()
        self.waiting.clear()
        self.twins.clear()
        requests = dict.fromkeys(branch.request for branch in branches)
        for request in requests:
            runs = [branch.sequence in self.cache.sequences for branch in request.branches]
            if request.admission is None or (request.in_lockstep and not all(runs)):
                request.restart()
                runs = [False]
            for branch, does_run in zip(request.branches, runs, strict=True):
                if does_run and branch.sequence is not None:
                    branch.sequence.discard()
                    self.running.add(branch)
                else:
                    branch.sequence = None
                    self.waiting.add(branch)
        self.release_unowned()

    def release_unowned(self) -> None:
        """Release the sequences that an interrupt left with nobody."""
        self.leases.recover()
        owned = {branch.sequence for branch in self.running}
        owned |= self.held.sequences() | self.leases.sequences()
        unowned = self.cache.sequences - owned
        # in an order that does not depend on addresses: who is released last is evicted last
        for sequence in sorted(unowned, key=lambda s: (s.last_block.block_id, s.num_tokens)):
            sequence.release()

    def committed(self, branch: Branch) -> None:
        """Let go on who waited for tokens that `branch` has now computed."""
        twins = self.twins.get(branch)
        if twins is None:
            return
        assert branch.sequence is not None
        computed = branch.sequence.num_computed_tokens
        self.waiting.update(twin for needed, twin in twins if needed <= computed)
        self._keep_twins(branch, [(needed, twin) for needed, twin in twins if needed > computed])

    def preempt_all(self) -> None:
        """Send every running branch back into the queue."""
        while self.running:
            self._preempt(self._unit_of(self.running[0]))

    def _keep_twins(self, leader: Branch, twins: list[tuple[int, Branch]]) -> None:
        if twins:
            self.twins[leader] = twins
        else:
            self.twins.pop(leader, None)

    def _stop_running(self, branch: Branch, *, cold: bool = False) -> None:
        assert branch.sequence is not None
        self.running.discard(branch)  # it may be gone, if this was interrupted and is run again
        branch.sequence.release(cold=cold)
        branch.sequence = None
        self.waiting.update(twin for _, twin in self.twins.pop(branch, ()))

    def _preempt(self, unit: list[Branch]) -> None:
        """Take the blocks away; beams then begin their search anew."""
        for branch in unit:
            self._stop_running(branch)
        request = unit[0].request
        request.usage.num_preemptions += 1
        self.num_preemptions += 1
        if request.in_lockstep:
            request.restart()
            unit = request.branches
        self.waiting.update(unit)

    # -- a step ----------------------------------------------------------------------------------

    def schedule(self) -> list[ScheduledBranch]:
        """Fill the next step; blocks are taken, tokens are written in the books.

        The caller computes, then either commits each sequence and calls `committed`, or discards.
        """
        self.leases.expire()
        batch = Batch(self.config.max_num_batched_tokens, self.config.max_num_scored_tokens)
        preempted_before = self.num_preemptions
        for unit in self._decoding_first():
            if batch.budget < len(unit):
                break
            if unit[0].sequence is None:
                continue  # preempted a moment ago, for one that comes before it
            num_tokens = self._chunk(unit[0], batch)
            if num_tokens and self._make_room(unit, num_tokens, batch):
                for branch in unit:
                    batch.add(branch, num_tokens)
        if self.num_preemptions == preempted_before:
            self._admit(batch)
        for request in batch.grown:
            request.note_blocks(self.cache.block_size)
        return list(batch.items.values())

    def _decoding_first(self) -> list[list[Branch]]:
        units = [list(group) for _, group in groupby(self.running, key=_unit_key)]
        return sorted(units, key=lambda unit: unit[0].num_pending_tokens > 1)

    def _unit_of(self, branch: Branch) -> list[Branch]:
        """Who steps, and is preempted, together with a running branch; itself included."""
        if not branch.request.in_lockstep:
            return [branch]
        return [other for other in branch.request.branches if other.sequence is not None]

    def _chunk(self, branch: Branch, batch: Batch) -> int:
        limit, left = self.config.max_prefill_chunk, batch.chunk(branch)
        return left if limit is None else min(left, limit)

    def _make_room(self, unit: list[Branch], num_tokens: int, batch: Batch) -> bool:
        """Reserve for who steps together, preempting others; False if they gave way themselves."""
        while True:
            if self._reserve(unit, num_tokens):
                return True
            if self.leases.expire() or self.held.give_way():
                continue
            others = [b for b in self.running if _unit_key(b) is not _unit_key(self.running[0])]
            if not others:
                # It ends inside a published block (a token that was taken back, or a partial hit
                # that was not written yet): the copy does not fit, so that part is computed again.
                sequence = unit[0].sequence
                drops = len(unit) == 1 and sequence is not None and sequence.drop_partial()
                missing = self._num_missing(_num_blocks_needed(unit, num_tokens))
                drops = drops or self.leases.give_way(missing)
                assert drops, f"no room for the only one that runs, {unit[0]}"
                continue
            victims = self._unit_of(min(others, key=self._loss))
            for victim in victims:
                batch.remove(victim)
            self._preempt(victims)
            if unit[0] in victims:
                return False

    def _num_missing(self, num_blocks: int) -> int:
        """Blocks that leases must give up, at least, for so many to be had; O(blocks).

        They then give way at once: to try after each of them would cost O(blocks) each time.
        """
        pool = self.cache.pool
        missing = num_blocks - len(pool.free) - pool.num_reclaimable()
        return missing - 2  # a copy and its source may become needless

    def _reserve(self, unit: list[Branch], num_tokens: int) -> bool:
        if len(unit) == 1:
            assert unit[0].sequence is not None
            return unit[0].sequence.reserve(num_tokens)
        return self.cache.pool.reserve(_num_blocks_needed(unit, num_tokens))

    def _loss(self, branch: Branch) -> tuple[int, int, int]:
        """What preempting would put at stake: blocks that nobody else keeps; the youngest first."""
        assert branch.sequence is not None
        block = branch.sequence.last_block
        depth = block.depth
        while block.parent is not None and block.refs == 1:
            block = block.parent
        admission, index = branch.running_rank
        return (depth - block.depth, -admission, -index)

    def _admit(self, batch: Batch) -> None:
        """Admit from the head of the queue while budget, places and room last.

        Room is asked for the whole prompt, besides what the prompts that run still need: else many
        would be admitted against the same free blocks, only to preempt each other.
        """
        if not self.waiting or self.waiting[0].not_before == self.cache.pool.version:
            return
        promised = sum(map(self._promised_to, self.running))
        places = self.config.max_num_seqs - sum(map(_places_of, self.running))
        while batch.budget > 0:
            branch = self._next_waiting(batch)
            if branch is None or _places_of(branch) > places:
                return
            if branch.not_before == self.cache.pool.version:
                return
            sequence = self._open(branch)
            leader = self._find_leader(branch, sequence)
            if leader is not None:
                sequence.release()
                self.waiting.remove(branch)
                self.twins.setdefault(leader[0], []).append((leader[1], branch))
                continue
            if not self._reserve_all(branch, sequence, promised):
                needed = sequence.num_blocks_needed(branch.num_tokens - sequence.num_tokens)
                missing = 0 if self.running else self._num_missing(needed)
                sequence.release()
                if self.leases.expire() or self.held.give_way():
                    continue
                if not self.running and self.leases.give_way(missing):
                    continue
                branch.not_before = self.cache.pool.version
                return
            self.waiting.remove(branch)
            self._start(branch, sequence)
            batch.add(branch, self._chunk(branch, batch))
            promised += self._promised_to(branch)
            places -= _places_of(branch)

    def _next_waiting(self, batch: Batch) -> Branch | None:
        """The head of the queue; of those that are not scored if the step scores no more tokens."""
        if batch.scored:
            return self.waiting[0] if self.waiting else None
        return next((branch for branch in self.waiting if not branch.request.is_scoring), None)

    def _open(self, branch: Branch) -> Sequence:
        """Begin with what is cached, or held by the branch that it goes on from.

        While its prompt is scored, that ends before the first missing value.
        """
        request, origin = branch.request, branch.request.origin
        sequence = Sequence.open(self.cache, request.identity, branch.tokens)
        if origin is not None and origin.num_computed_tokens > sequence.num_tokens:
            assert origin.sequence is not None
            sequence.release()
            sequence = origin.sequence.fork()
            sequence.rollback(min(sequence.num_tokens, branch.num_tokens - 1))
            self.held.used(origin)
        sequence.write_limit = min(sequence.write_limit, request.write_limit)
        if request.is_scoring:
            known = request.prompt_logprobs
            recall(sequence, request.prompt, known, request.num_top_prompt_logprobs)
            if request.is_scoring:
                sequence.rollback(min(sequence.num_tokens, len(known) - 1))
        return sequence

    def _promised_to(self, branch: Branch) -> int:
        """Blocks that a running branch still takes: for its prompt, or for a search to its end."""
        request = branch.request
        if not request.in_lockstep:
            return _blocks_still_needed(branch)
        if branch is not request.branches[0]:
            return 0
        at_most = request.num_blocks_at_most(self.cache.block_size)
        return max(0, at_most - request.num_blocks_held)

    def _reserve_all(self, branch: Branch, sequence: Sequence, promised: int) -> bool:
        """Reserve for all tokens; without the copy of a partial hit if that does not fit."""
        size = branch.num_tokens
        block_size = self.cache.block_size
        if branch.request.in_lockstep:
            promised += branch.request.num_blocks_at_most(block_size) - -(-size // block_size)
        if sequence.reserve(size - sequence.num_tokens, spare_blocks=promised):
            return True
        return sequence.drop_partial() and sequence.reserve(
            size - sequence.num_tokens, spare_blocks=promised
        )

    def _start(self, branch: Branch, sequence: Sequence) -> None:
        request = branch.request
        branch.sequence = sequence
        branch.not_before = None
        if request.admission is None:
            request.admission = self.num_admissions
            self.num_admissions += 1
            request.usage.num_cached_tokens = sequence.num_tokens
            self.num_cached_tokens += sequence.num_tokens
            self.num_prompt_tokens += request.num_prompt_tokens
            self._explain_miss(request, sequence)
        self.running.add(branch)

    def _explain_miss(self, request: Request, sequence: Sequence) -> None:
        request.miss = explain(
            sequence,
            request.prompt,
            looks_at_other_salts=request.cache_control.looks_at_other_salts,
        )
        self.misses[request.miss.reason] += 1
        if self.cache.enabled:
            num_findable = min(request.num_prompt_tokens, sequence.write_limit)
            request.usage.num_cache_write_tokens = max(0, num_findable - sequence.num_tokens)

    def _find_leader(self, branch: Branch, sequence: Sequence) -> tuple[Branch, int] | None:
        """Find the running branch worth waiting for, and how far it must have computed.

        Only whole blocks count, as only those are published while the other runs. What was
        preempted does not wait for those admitted after it.
        """
        if not self.cache.enabled:
            return None
        found = sequence.num_tokens
        next_token = branch.tokens[found]
        block_size = self.cache.block_size
        packed: bytes | None = None
        best: tuple[Branch, int] | None = None
        for other in self._admitted_before(branch):
            assert other.sequence is not None
            if other.sequence.root is not sequence.root or len(other.tokens) <= found:
                continue
            if other.tokens[found] != next_token:
                continue
            packed = packed or branch.tokens.tobytes()
            shared = common_beginning(packed, other.tokens.tobytes()) // 4
            shared = min(shared, other.sequence.write_limit)
            if branch.request.is_scoring:
                shared = min(shared, other.request.num_scored_for(branch.request))
            target = shared // block_size * block_size
            gain = min(target, branch.num_tokens - 1) - found
            worth = gain > 0 and target > other.sequence.num_computed_tokens
            if worth and (best is None or target > best[1]):
                best = (other, target)
        return best

    def _admitted_before(self, branch: Branch) -> Iterator[Branch]:
        admission = branch.request.admission
        for other in self.running:
            if admission is None or other.running_rank < (admission, branch.index):
                yield other

    def check_invariants(self) -> None:
        """Check the cache's books, and that exactly the running branches hold sequences."""
        self.cache.check_invariants()
        running = {branch.sequence for branch in self.running}
        check_leases(self.leases)
        held, leased = self.held.sequences(), self.leases.sequences()
        if running | held | leased != self.cache.sequences:
            raise InvariantViolation(
                f"scheduler: {len(running)} branches run, {len(held)} are held, "
                f"{len(leased)} are leased, {len(self.cache.sequences)} sequences live"
            )


def _num_blocks_needed(unit: list[Branch], num_tokens: int) -> int:
    """Blocks that who steps together takes for so many tokens each."""
    needed = 0
    for branch in unit:
        assert branch.sequence is not None
        needed += branch.sequence.num_blocks_needed(num_tokens)
    return needed


def _unit_key(branch: Branch) -> object:
    """Equal for those that step together."""
    return branch.request if branch.request.in_lockstep else branch


def _places_of(branch: Branch) -> int:
    """Places that a branch takes among those that run; the first of some beams, those of all."""
    request = branch.request
    if not request.in_lockstep:
        return 1
    return request.params.n if branch is request.branches[0] else 0


def _blocks_still_needed(branch: Branch) -> int:
    """Blocks that the tokens of a running branch take which are not scheduled yet."""
    assert branch.sequence is not None
    num_pending = branch.num_pending_tokens
    return branch.sequence.num_blocks_needed(num_pending) if num_pending else 0
