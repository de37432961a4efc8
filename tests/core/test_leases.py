"""Leases: what they keep, for how long, how much of it, and that nobody has to wait for them."""

from typing import Any

import pytest
from cache_world import IDENTITIES, Stream, World
from fake_executor import IDENTITY, FakeExecutor, serial_output

from prefixkv.block import Block
from prefixkv.cache_control import Breakpoint, CacheControl, LeaseOutcome
from prefixkv.config import EngineConfig, SchedulerConfig
from prefixkv.errors import ConfigError, InvalidRequest, InvariantViolation
from prefixkv.held_branch import HeldBranch
from prefixkv.lease import Leases
from prefixkv.pool import BlockPool

TOKENS = [0, 1, 1, 0, 1, 0, 0, 1, 1, 1, 0]  # 2 blocks of 4, and 3 tokens


def leased(world: World, stream: Stream, *lengths: int, ttl_s: float = 10) -> list[str | None]:
    """Lease beginnings of a stream and end it; why each was refused."""
    outcomes = world.lease(stream, list(lengths), ttl_s, None)
    world.release(stream)
    world.check()
    return [outcome.refused for outcome in outcomes]


def found(world: World, tokens: list[int]) -> int:
    """How many tokens a new stream finds; it leaves at once."""
    stream = world.open(IDENTITIES[0], tokens)
    count = stream.sequence.num_tokens
    world.release(stream)
    return count


def press(world: World) -> None:
    """Want as many blocks as can be had."""
    assert world.cache.pool.reserve(world.num_available())
    world.check()


@pytest.mark.parametrize("length", [1, 3, 4, 6, 8, 9, 11])
def test_a_leased_prefix_survives_pressure_until_its_time_is_over(length: int) -> None:
    """Wherever in a block it ends, all of it is found, also by who then goes on differently."""
    world = World(12, 4)
    assert leased(world, world.open_and_compute(TOKENS), length) == [None]
    assert world.leases.num_blocks == -(-length // 4)
    world.now_s += 9
    world.leases.expire()
    press(world)
    assert found(world, [*TOKENS[:length], 1 - [*TOKENS, 0][length], 1, 1]) == length
    world.now_s += 1
    assert world.leases.expire()
    assert not world.leases.expire()
    press(world)
    assert found(world, [*TOKENS[:length], 0]) == 0
    assert (len(world.leases), world.leases.num_blocks) == (0, 0)
    assert world.leases.stats.num_expired == world.leases.stats.num_granted == 1


def test_a_renewed_lease_takes_no_block_and_ends_at_the_later_time() -> None:
    world = World(12, 4)
    first = world.open_and_compute(TOKENS)
    assert leased(world, first, 6, ttl_s=10) == [None]
    for ttl_s, at in ((20, 20), (5, 20)):
        again = world.open_and_compute(TOKENS)
        assert leased(world, again, 6, ttl_s=ttl_s) == [None]
        assert [lease.expires_at for lease in world.leases] == [at]
        assert world.leases.num_blocks == 2
    assert (world.leases.stats.num_granted, world.leases.stats.num_renewed) == (1, 2)


def test_a_half_filled_block_is_published_once_and_the_next_lease_finds_it() -> None:
    """The second request's own last block says nothing new; the lease goes to the one that is."""
    world = World(12, 4)
    first, second = world.open_and_compute(TOKENS), world.open_and_compute(TOKENS)
    assert leased(world, first, 10) == [None]
    assert leased(world, second, 10) == [None]
    assert world.leases.stats.num_renewed == 1
    press(world)
    assert found(world, [*TOKENS, 1]) == len(TOKENS)


def test_time_is_cut_to_the_most_that_is_allowed_and_this_is_told() -> None:
    world = World(12, 4)
    stream = world.open_and_compute(TOKENS)
    outcomes = world.lease(stream, [4, 8], 1e9, None)
    assert outcomes == (LeaseOutcome(4, 100), LeaseOutcome(8, 100))
    assert [lease.expires_at for lease in world.leases] == [100, 100]


def test_of_more_than_four_breakpoints_the_longest_are_leased() -> None:
    world = World(12, 4)
    refused = leased(world, world.open_and_compute(TOKENS), 1, 2, 4, 5, 8, 9)
    assert refused == ["more than 4", "more than 4", None, None, None, None]
    assert sorted(lease.sequence.num_tokens for lease in world.leases) == [4, 5, 8, 9]
    assert world.leases.stats.num_refused == 2


def test_no_more_blocks_than_a_share_of_the_pool_are_leased() -> None:
    """Shared ones count once; what is too much is refused with the numbers, and changes nothing."""
    world = World(8, 4)
    assert leased(world, world.open_and_compute(TOKENS), 8) == [None]
    other = world.open_and_compute([1, 1, 1, 1, 0, 0, 0, 0, 1, 1, 1, 1])
    assert leased(world, other, 8, 12) == [None, "needs 1 blocks more, 4 of 4 leased"]
    again = world.open_and_compute([*TOKENS[:8], 0, 0])
    assert leased(world, again, 4, 10) == [None, "needs 1 blocks more, 4 of 4 leased"]


def test_there_are_no_more_leases_than_blocks_for_them() -> None:
    """However many names and lengths are given to one block."""
    world = World(8, 4)
    refused = leased(world, world.open_and_compute(TOKENS), 1, 2, 3, 4)
    assert refused == [None] * 4
    refused = leased(world, world.open_and_compute(TOKENS), 5)
    assert refused == ["4 of 4 leases are granted"]


def test_what_is_not_computed_or_cannot_be_found_is_not_leased() -> None:
    world = World(12, 4)
    assert leased(world, world.open_and_compute(TOKENS), 12) == ["12 tokens, 11 are computed"]
    stream = world.open_and_compute([*TOKENS, 0])
    world.reset()
    assert leased(world, stream, 4) == ["its blocks cannot be published"]
    off = World(12, 4)
    stream = off.open_and_compute(TOKENS)
    off.cache.enabled = False
    assert leased(off, stream, 4) == ["the cache is disabled"]


def test_no_share_of_the_pool_is_no_lease() -> None:
    world = World(12, 4)
    leases = Leases(world.cache, max_share=0)
    stream = world.open_and_compute(TOKENS)
    (outcome,) = leases.grant(stream.sequence, CacheControl(breakpoints=(Breakpoint(4, 1),)))
    assert outcome.refused == "0 of 0 leases are granted"


def test_a_session_that_goes_on_gives_up_what_the_new_lease_covers() -> None:
    """In the same blocks, or where the old one's half-filled end was copied; not another name's."""
    world = World(40, 4)
    for session in ("a", "b"):
        world.lease(world.open_and_compute(TOKENS), [4, 11], 50, session)
    for stream in list(world.streams):
        world.release(stream)
    longer = world.open_and_compute([*TOKENS, 1, 0, 0])
    world.lease(longer, [14], 1, "a")
    assert len(world.leases) == 5  # the earlier ones last longer
    world.lease(longer, [14], 60, "a")
    world.check()
    kept = sorted((lease.session, lease.sequence.num_tokens) for lease in world.leases)
    assert kept == [("a", 14), ("b", 4), ("b", 11)]

    aside = world.open_and_compute([*TOKENS[:8], 0, 0, 0, 0, 0])
    world.lease(aside, [13], 1, "a")
    kept = sorted((lease.session, lease.sequence.num_tokens) for lease in world.leases)
    assert kept == [("a", 13), ("a", 14), ("b", 4), ("b", 11)]
    world.check()


def test_what_a_session_gives_up_is_found_with_one_walk(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many leases the name has: whoever sends many of them stops nobody else's steps."""
    world = World(200, 4)
    for aside in range(20):
        tokens = [int(bit) for bit in f"{aside:08b}"]
        world.lease(world.open_and_compute(tokens), [8], 50, "a")
        world.release(world.streams[0])
    longer = world.open_and_compute([0] * 4 + [1] * 156)
    control = CacheControl(breakpoints=(Breakpoint(160, 60),), session="a")
    parents, count = Block.parent, [0]  # type: ignore[misc] # the slot's descriptor

    def parent(block: Block) -> Block | None:
        count[0] += 1
        return parents.__get__(block)  # type: ignore[no-any-return,union-attr]

    with monkeypatch.context() as patch:
        patch.setattr(Block, "parent", property(parent, parents.__set__))  # type: ignore[union-attr]
        world.leases.grant(longer.sequence, control)
    assert len(world.leases) == 20, "one of them was its beginning"
    assert count[0] < 40 * 8, f"{count[0]} steps up the chain of 40 blocks"


def test_a_session_of_another_tenant_is_another_session() -> None:
    world = World(40, 4)
    for identity in IDENTITIES[:2]:
        stream = world.open_and_compute(TOKENS, identity)
        world.lease(stream, [8], 50, "a")
        world.lease(stream, [11], 50, "a")
    assert [lease.sequence.num_tokens for lease in world.leases] == [11, 11]
    world.finish()


def test_a_second_breakpoint_of_a_request_does_not_replace_the_first() -> None:
    world = World(12, 4)
    world.lease(world.open_and_compute(TOKENS), [4, 8, 11], 50, "a")
    world.lease(world.streams[0], [4, 8, 11], 50, "a")
    assert [lease.sequence.num_tokens for lease in world.leases] == [4, 8, 11]


def test_a_reset_lets_go_of_all_leases() -> None:
    world = World(12, 4)
    assert leased(world, world.open_and_compute(TOKENS), 4, 11) == [None, None]
    world.reset()
    world.check()
    assert len(world.cache.pool.free) == 12


def test_books_that_an_interrupt_left_half_done_are_put_in_order() -> None:
    world = World(12, 4)
    world.lease(world.open_and_compute(TOKENS), [4, 11], 50, "a")
    world.leases._holders.clear()
    world.leases._by_expiry.clear()
    with pytest.raises(InvariantViolation, match="invariant 9"):
        world.check()
    world.leases.recover()
    world.check()
    assert (world.leases.num_blocks, world.leases.stats.num_granted) == (3, 2)
    world.finish()


# -- the scheduler ---------------------------------------------------------------------------------


def controlled(*lengths: int, ttl_s: float = 10) -> CacheControl:
    return CacheControl(breakpoints=tuple(Breakpoint(length, ttl_s) for length in lengths))


def test_a_request_gets_its_leases_when_its_first_branch_ends() -> None:
    executor = FakeExecutor(20, 4)
    request = executor.add(TOKENS, 3, n=3, cache_control=controlled(6, 12, 20))
    executor.run()
    assert request.leases is not None
    refused = [outcome.refused for outcome in request.leases]
    assert refused == [None, None, "20 tokens, 13 are computed"]
    assert len(executor.scheduler.leases) == 2


def test_leases_give_way_before_a_request_would_wait_for_them() -> None:
    """The head of the queue does not fit and nothing runs: the one that ends first goes first."""
    executor = FakeExecutor(8, 4)
    for first, ttl_s in ((0, 20), (1, 10)):
        executor.add([first] * 8, 1, cache_control=controlled(8, ttl_s=ttl_s))
        executor.run()
    leases = executor.scheduler.leases
    assert leases.num_blocks == 4
    executor.add([2] * 20, 4)
    executor.run()
    assert (leases.stats.num_given_up, leases.num_blocks) == (1, 2)
    executor.add([0] * 9, 1)
    executor.run()
    assert executor.scheduler.misses["none"] == 1, "the other one is still found"
    executor.add([2] * 28, 5)
    executor.run()
    assert (leases.stats.num_given_up, leases.num_blocks) == (2, 0)


def test_many_leases_give_way_at_once_and_no_more_than_needed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each look for room costs O(blocks): one after each lease would stop the engine for long."""
    executor = FakeExecutor(240, 1, max_leased_share=1)
    for first in range(80):
        executor.add([first] * 3, 1, cache_control=controlled(3, ttl_s=100 + first))
        executor.run()
    select, looks = BlockPool._select, [0]

    def counted(pool: BlockPool, count: int) -> Any:
        looks[0] += 1
        return select(pool, count)

    monkeypatch.setattr(BlockPool, "_select", counted)
    executor.add([7] * 3 + [1] * 150, 1)
    executor.run()
    assert executor.scheduler.leases.stats.num_given_up == 51, "240 - 153 blocks are left to 29"
    assert looks[0] < 12, looks


def leased_and_held() -> tuple[FakeExecutor, HeldBranch]:
    """Eight blocks, four of them leased, a branch held, and nothing that runs."""
    executor = FakeExecutor(8, 4)
    executor.add([0] * 16, 1, cache_control=controlled(16))
    executor.run()
    executor.add([1] * 4, 2)
    executor.step()
    held = executor.scheduler.hold(executor.scheduler.running[0])
    executor.run()
    return executor, held


def test_held_branches_and_others_give_way_before_a_lease() -> None:
    """Two that decode, where only one fits besides the leases: one is preempted."""
    executor, held = leased_and_held()
    scheduler = executor.scheduler
    executor.add([1, 2], 12)
    executor.add([2, 1], 12)
    outputs = executor.run()
    assert outputs["2"] == serial_output([1, 2], 12)
    assert outputs["3"] == serial_output([2, 1], 12)
    assert held.sequence is None
    assert scheduler.num_preemptions > 0
    assert scheduler.leases.stats.num_given_up == 0
    assert scheduler.leases.num_blocks == 4


def test_a_lease_gives_way_to_the_only_one_that_runs() -> None:
    executor = FakeExecutor(8, 4)
    executor.add([0] * 16, 1, cache_control=controlled(16))
    executor.run()
    executor.add([1] * 2, 28)
    outputs = executor.run()
    assert outputs["1"] == serial_output([1] * 2, 28)
    assert executor.scheduler.leases.stats.num_given_up == 1


def test_who_needs_no_copy_computes_nothing_again_before_a_lease_gives_way() -> None:
    """A prompt in chunks whose room is leased meanwhile: the half of a block is its own."""
    executor = FakeExecutor(8, 4, max_prefill_chunk=5)
    leases = executor.scheduler.leases
    executor.add([1, 2], 12, cache_control=controlled(13))
    for _ in range(10):
        executor.step()
    request = executor.add([0] * 20, 1)
    executor.run()
    assert (leases.stats.num_granted, leases.stats.num_given_up) == (1, 1)
    assert request.usage.num_preemptions == 0
    assert request.usage.num_computed_tokens == 20


def test_what_has_expired_goes_before_what_has_not_and_before_a_held_branch() -> None:
    """While a step is filled time goes by."""
    executor, held = leased_and_held()
    scheduler = executor.scheduler
    times = iter([0.0])
    scheduler.leases.clock = lambda: next(times, 100.0)
    executor.add([2] * 16, 1)
    executor.run()
    assert held.sequence is not None
    assert scheduler.leases.stats.num_expired == 1


def test_a_failed_request_gets_no_lease() -> None:
    executor = FakeExecutor(8, 4)
    request = executor.add([0] * 8, 1, cache_control=controlled(8))
    executor.step("forward")
    assert request.leases is None
    assert len(executor.scheduler.leases) == 0


def test_leased_blocks_that_are_not_counted_are_named() -> None:
    executor = FakeExecutor(8, 4)
    executor.add([0] * 8, 1, IDENTITY, cache_control=controlled(8))
    executor.run()
    executor.scheduler.leases.max_num_blocks = 1
    with pytest.raises(InvariantViolation, match="2 blocks of at most 1"):
        executor.scheduler.check_invariants()
    executor.scheduler.leases.max_num_blocks = 4
    executor.scheduler.leases._holders.popitem()
    with pytest.raises(InvariantViolation, match="1 blocks counted, 2 leased"):
        executor.scheduler.check_invariants()


# -- what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize(("num_tokens", "ttl_s"), [(0, 1), (1, 0), (1, -1), (1, float("inf"))])
def test_a_breakpoint_that_means_nothing_is_refused(num_tokens: int, ttl_s: float) -> None:
    with pytest.raises(InvalidRequest, match="breakpoint"):
        Breakpoint(num_tokens, ttl_s)


def test_breakpoints_stand_shortest_first() -> None:
    with pytest.raises(InvalidRequest, match=r"\[5, 4\] tokens: shortest first"):
        controlled(5, 4)
    controlled(4, 4, 5)
    with pytest.raises(InvalidRequest, match="write_limit is -1"):
        CacheControl(write_limit=-1)


@pytest.mark.parametrize("config", [EngineConfig, SchedulerConfig])
def test_bounds_that_bound_nothing_are_refused(config: type[EngineConfig]) -> None:
    for share in (-0.1, 1.1):
        with pytest.raises(ConfigError, match="max_leased_share"):
            config(max_leased_share=share)
    for ttl_s in (0, float("inf")):
        with pytest.raises(ConfigError, match="max_lease_ttl_s"):
            config(max_lease_ttl_s=ttl_s)
