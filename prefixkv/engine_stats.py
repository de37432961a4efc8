"""What an engine counts, at one moment."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, get_args

from prefixkv.block import Block
from prefixkv.cache_control import MissReason
from prefixkv.histogram import Histogram
from prefixkv.lease import LeaseStats
from prefixkv.prefix_cache import CacheStats
from prefixkv.sequence import Sequence

if TYPE_CHECKING:
    from prefixkv.engine import Engine


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """Counts since the start, and how things stand.

    "Running" and "waiting" are branches: an output of a request each, of a beam search all beams.

    Attributes:
        num_requests_waiting: those that wait for another one's prefill included.
        num_requests_deferred: those alone.
        num_queried_tokens: prompt tokens that were looked for in the cache.
        num_completion_tokens: of requests that are over.
        num_generated_tokens: of all, those that run included.
        num_live_branches: those that hold blocks: they run, or are held.
        num_block_references: blocks of all live branches, a shared one counted for each.
        num_blocks_used: the same blocks, each counted once.
        num_shared_blocks: those of them that several branches have.
        misses: requests by why the reuse of their prompt stopped where it did.
        kv_cache_usage: share of the pool that cannot be had by evicting.
    """

    num_requests_running: int = 0
    num_requests_waiting: int = 0
    num_requests_deferred: int = 0
    num_branches_held: int = 0
    num_live_branches: int = 0
    num_preemptions: int = 0
    num_prompt_tokens: int = 0
    num_queried_tokens: int = 0
    num_cached_tokens: int = 0
    num_steps: int = 0
    num_computed_tokens: int = 0
    num_completion_tokens: int = 0
    num_generated_tokens: int = 0
    num_blocks: int = 0
    num_free_blocks: int = 0
    num_evicted_blocks: int = 0
    num_block_references: int = 0
    num_blocks_used: int = 0
    num_shared_blocks: int = 0
    kv_cache_usage: float = 0.0
    num_leases: int = 0
    num_leased_blocks: int = 0
    cache: CacheStats = field(default_factory=CacheStats)
    leases: LeaseStats = field(default_factory=LeaseStats)
    misses: Mapping[MissReason, int] = field(default_factory=dict)

    def numbers(self) -> dict[str, int | float]:
        """Return all by name, those of the cache and of leases among the others."""
        told: dict[str, Any] = asdict(self)
        told |= told.pop("cache")
        for name, count in told.pop("leases").items():
            told[f"{name}_leases"] = count
        for reason, count in told.pop("misses").items():
            told[f"num_misses_{reason}"] = count
        return told


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingStats:
    """What there is to know of an engine that serves, at one moment.

    Attributes:
        histograms, num_finished: as of `RequestTimes`.
        config: of the cache, as vLLM calls it.
    """

    engine: EngineStats
    histograms: Mapping[str, Histogram]
    num_finished: Mapping[str, int]
    config: Mapping[str, str]


def read_stats(engine: "Engine") -> EngineStats:
    """Count; O(blocks). Not while a step runs. Lets go of leases whose time is over."""
    scheduler, cache = engine.scheduler, engine.cache
    scheduler.leases.expire()  # an engine that idles takes no step that would
    branches = {branch.sequence for branch in scheduler.running if branch.sequence is not None}
    branches |= scheduler.held.sequences()
    num_used, num_shared = count_blocks(branches)
    return EngineStats(
        num_requests_running=len(scheduler.running),
        num_requests_waiting=scheduler.num_waiting,
        num_requests_deferred=scheduler.num_waiting - len(scheduler.waiting),
        num_branches_held=len(scheduler.held),
        num_live_branches=len(branches),
        num_preemptions=scheduler.num_preemptions,
        num_prompt_tokens=scheduler.num_prompt_tokens,
        num_queried_tokens=scheduler.num_prompt_tokens if cache.enabled else 0,
        num_cached_tokens=scheduler.num_cached_tokens,
        num_steps=engine.num_steps,
        num_computed_tokens=engine.num_computed_tokens,
        num_completion_tokens=engine.num_completion_tokens,
        num_generated_tokens=engine.num_completion_tokens + engine.num_open_completion_tokens,
        num_blocks=cache.pool.num_usable,
        num_free_blocks=len(cache.pool.free),
        num_evicted_blocks=cache.pool.num_evicted,
        num_block_references=sum(sequence.last_block.depth for sequence in branches),
        num_blocks_used=num_used,
        num_shared_blocks=num_shared,
        kv_cache_usage=cache.usage,
        num_leases=len(scheduler.leases),
        num_leased_blocks=scheduler.leases.num_blocks,
        cache=replace(cache.stats),
        leases=replace(scheduler.leases.stats),
        misses={reason: scheduler.misses[reason] for reason in get_args(MissReason)},
    )


def count_blocks(sequences: Iterable[Sequence]) -> tuple[int, int]:
    """Return how many blocks sequences have, and how many of them more than one has; O(blocks)."""
    seen: set[Block] = set()
    shared: set[Block] = set()
    for sequence in sequences:
        block: Block | None = sequence.last_block
        while block is not None and block.depth and block not in seen:
            seen.add(block)
            block = block.parent
        # what comes before a block that another sequence has, that one has too
        while block is not None and block.depth and block not in shared:
            shared.add(block)
            block = block.parent
    return len(seen), len(shared)
