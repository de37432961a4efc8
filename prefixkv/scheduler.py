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

from collections.abc import Iterator
from dataclasses import dataclass, field

from sortedcontainers import SortedKeyList

from prefixkv.block import common_beginning
from prefixkv.config import SchedulerConfig
from prefixkv.errors import InvariantViolation, QueueFull, RequestTooLarge
from prefixkv.prefix_cache import PrefixCache
from prefixkv.request import Request
from prefixkv.sequence import Sequence


@dataclass(frozen=True, slots=True)
class ScheduledRequest:
    """One request's share of a step: its tokens [start, start + num_tokens)."""

    request: Request
    sequence: Sequence
    start: int
    num_tokens: int

    @property
    def samples(self) -> bool:
        """Whether the step reaches the request's last token, so that the next one is drawn."""
        return self.start + self.num_tokens == len(self.request.tokens)


@dataclass(slots=True)
class Batch:
    """A step being filled; `budget` is what is left of its tokens."""

    budget: int
    items: dict[Request, ScheduledRequest] = field(default_factory=dict)

    def add(self, request: Request, num_tokens: int) -> None:
        """Schedule the next tokens of a request. Requires that their room is reserved."""
        sequence = request.sequence
        assert sequence is not None
        start = sequence.num_tokens
        sequence.write(request.tokens[start : start + num_tokens])
        self.items[request] = ScheduledRequest(request, sequence, start, num_tokens)
        self.budget -= num_tokens

    def remove(self, request: Request) -> None:
        """Take a request out again, if it is in; the caller takes its sequence away."""
        item = self.items.pop(request, None)
        if item is not None:
            self.budget += item.num_tokens


class Scheduler:
    """Decides each step over a `PrefixCache`; pure bookkeeping.

    Attributes:
        waiting: the queue, by (priority, arrival).
        running: requests that hold a sequence, by first admission.
        num_prompt_tokens, num_cached_tokens: of all requests admitted so far, each counted once.
        twins: who waits for a running request, with the number of tokens it must have computed.
    """

    def __init__(self, cache: PrefixCache, config: SchedulerConfig) -> None:
        self.cache = cache
        self.config = config
        self.waiting: SortedKeyList[Request] = SortedKeyList(key=lambda r: r.queue_rank)
        self.running: SortedKeyList[Request] = SortedKeyList(key=lambda r: r.admission)
        self.twins: dict[Request, list[tuple[int, Request]]] = {}
        self.num_admissions = 0
        self.num_preemptions = 0
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0

    # -- coming and going ------------------------------------------------------------------------

    @property
    def num_waiting(self) -> int:
        """Requests that hold nothing yet, twins included."""
        return len(self.waiting) + sum(map(len, self.twins.values()))

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self.waiting or self.running)

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            RequestTooLarge: if the pool can never hold it.
            QueueFull: if too many requests wait.
        """
        block_size = self.cache.block_size
        num_tokens = request.num_prompt_tokens + request.max_tokens - 1  # the last is not written
        needed = -(-num_tokens // block_size)
        usable = self.cache.pool.num_usable
        if needed > usable:
            raise RequestTooLarge(
                f"{request.num_prompt_tokens} prompt tokens and {request.max_tokens} output tokens "
                f"need {needed} blocks of {block_size} tokens, the pool has {usable}"
            )
        limit = self.config.max_num_waiting
        if limit is not None and self.num_waiting >= limit:
            raise QueueFull(f"{self.num_waiting} requests are waiting, the limit is {limit}")
        self.waiting.add(request)

    def finish(self, request: Request) -> None:
        """End a request, wherever it is; what it published stays findable."""
        if request.sequence is not None:
            self._stop_running(request)
            return
        for leader, twins in list(self.twins.items()):
            self._keep_twins(leader, [twin for twin in twins if twin[1] is not request])
        self.waiting.discard(request)

    def committed(self, request: Request) -> None:
        """Let go on who waited for tokens that `request` has now computed."""
        twins = self.twins.get(request)
        if twins is None:
            return
        assert request.sequence is not None
        computed = request.sequence.num_computed_tokens
        self.waiting.update(twin for needed, twin in twins if needed <= computed)
        self._keep_twins(request, [(needed, twin) for needed, twin in twins if needed > computed])

    def preempt_all(self) -> None:
        """Send every running request back into the queue."""
        for request in list(self.running):
            self._preempt(request)

    def _keep_twins(self, leader: Request, twins: list[tuple[int, Request]]) -> None:
        if twins:
            self.twins[leader] = twins
        else:
            self.twins.pop(leader, None)

    def _stop_running(self, request: Request) -> None:
        assert request.sequence is not None
        self.running.remove(request)
        request.sequence.release()
        request.sequence = None
        self.waiting.update(twin for _, twin in self.twins.pop(request, ()))

    def _preempt(self, request: Request) -> None:
        self._stop_running(request)
        request.usage.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting.add(request)

    # -- a step ----------------------------------------------------------------------------------

    def schedule(self) -> list[ScheduledRequest]:
        """Fill the next step; blocks are taken, tokens are written in the books.

        The caller computes, then either commits each sequence and calls `committed`, or discards.
        """
        batch = Batch(self.config.max_num_batched_tokens)
        preempted_before = self.num_preemptions
        for request in self._decoding_first():
            if batch.budget <= 0:
                break
            if request.sequence is None:
                continue  # preempted a moment ago, for one that comes before it
            num_tokens = self._chunk(request.num_pending_tokens, batch.budget)
            if self._make_room(request, num_tokens, batch):
                batch.add(request, num_tokens)
        if self.num_preemptions == preempted_before:
            self._admit(batch)
        return list(batch.items.values())

    def _decoding_first(self) -> list[Request]:
        return sorted(self.running, key=lambda r: r.num_pending_tokens > 1)

    def _chunk(self, num_pending: int, budget: int) -> int:
        limit = self.config.max_prefill_chunk
        return min(num_pending, budget, limit if limit is not None else budget)

    def _make_room(self, request: Request, num_tokens: int, batch: Batch) -> bool:
        """Reserve for a running request, preempting others; False if it gave way itself."""
        while True:
            assert request.sequence is not None
            if request.sequence.reserve(num_tokens):
                return True
            assert len(self.running) > 1, f"no room for the only running request, {request}"
            victim = min(self.running[1:], key=self._loss)
            batch.remove(victim)
            self._preempt(victim)
            if victim is request:
                return False

    def _loss(self, request: Request) -> tuple[int, int]:
        """What preempting would put at stake: blocks that nobody else keeps; the youngest first."""
        assert request.sequence is not None
        assert request.admission is not None
        block = request.sequence.last_block
        depth = block.depth
        while block.parent is not None and block.refs == 1:
            block = block.parent
        return (depth - block.depth, -request.admission)

    def _admit(self, batch: Batch) -> None:
        """Admit from the head of the queue while budget, places and room last.

        Room is asked for the whole prompt, besides what the prompts that run still need: else many
        would be admitted against the same free blocks, only to preempt each other.
        """
        if not self.waiting or self.waiting[0].not_before == self.cache.pool.version:
            return
        promised = sum(map(_blocks_still_needed, self.running))
        while batch.budget > 0 and self.waiting and len(self.running) < self.config.max_num_seqs:
            request = self.waiting[0]
            if request.not_before == self.cache.pool.version:
                return
            sequence = Sequence.open(self.cache, request.identity, request.tokens)
            leader = self._find_leader(request, sequence)
            if leader is not None:
                sequence.release()
                del self.waiting[0]
                self.twins.setdefault(leader[0], []).append((leader[1], request))
                continue
            if not self._reserve_all(request, sequence, promised):
                sequence.release()
                request.not_before = self.cache.pool.version
                return
            del self.waiting[0]
            self._start(request, sequence)
            batch.add(request, self._chunk(request.num_pending_tokens, batch.budget))
            promised += _blocks_still_needed(request)

    @staticmethod
    def _reserve_all(request: Request, sequence: Sequence, promised: int) -> bool:
        """Reserve for all tokens; without the copy of a partial hit if that does not fit."""
        size = len(request.tokens)
        if sequence.reserve(size - sequence.num_tokens, spare_blocks=promised):
            return True
        return sequence.drop_partial() and sequence.reserve(
            size - sequence.num_tokens, spare_blocks=promised
        )

    def _start(self, request: Request, sequence: Sequence) -> None:
        request.sequence = sequence
        request.not_before = None
        if request.admission is None:
            request.admission = self.num_admissions
            self.num_admissions += 1
            request.usage.num_cached_tokens = sequence.num_tokens
            self.num_cached_tokens += sequence.num_tokens
            self.num_prompt_tokens += request.num_prompt_tokens
        self.running.add(request)

    def _find_leader(self, request: Request, sequence: Sequence) -> tuple[Request, int] | None:
        """Find the running request worth waiting for, and how far it must have computed.

        Only whole blocks count, as only those are published while the other runs. A request that
        was preempted does not wait for those admitted after it.
        """
        if not self.cache.enabled:
            return None
        found = sequence.num_tokens
        next_token = request.tokens[found]
        block_size = self.cache.block_size
        packed: bytes | None = None
        best: tuple[Request, int] | None = None
        for other in self._admitted_before(request):
            assert other.sequence is not None
            if other.sequence.root is not sequence.root or len(other.tokens) <= found:
                continue
            if other.tokens[found] != next_token:
                continue
            packed = packed or request.tokens.tobytes()
            shared = common_beginning(packed, other.tokens.tobytes()) // 4
            target = shared // block_size * block_size
            gain = min(target, len(request.tokens) - 1) - found
            worth = gain > 0 and target > other.sequence.num_computed_tokens
            if worth and (best is None or target > best[1]):
                best = (other, target)
        return best

    def _admitted_before(self, request: Request) -> Iterator[Request]:
        admission = request.admission
        for other in self.running:
            assert other.admission is not None
            if admission is None or other.admission < admission:
                yield other

    def check_invariants(self) -> None:
        """Check the cache's books, and that exactly the running requests hold sequences."""
        self.cache.check_invariants()
        held = {request.sequence for request in self.running}
        if held != self.cache.sequences:
            raise InvariantViolation(
                f"scheduler: {len(held)} requests run, {len(self.cache.sequences)} sequences live"
            )


def _blocks_still_needed(request: Request) -> int:
    """Blocks that the tokens of a running request take which are not scheduled yet."""
    assert request.sequence is not None
    num_pending = request.num_pending_tokens
    return request.sequence.num_blocks_needed(num_pending) if num_pending else 0
