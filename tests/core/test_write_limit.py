"""What a request lets others find of it: so many tokens, and not one more."""

from array import array

import pytest
from cache_world import IDENTITIES, World
from fake_executor import FakeExecutor, serial_output

from prefixkv.block import Block, BlockLogprobs
from prefixkv.cache_control import Breakpoint, CacheControl
from prefixkv.hashing import pack_tokens
from prefixkv.pool import BlockPool

TOKENS = [0, 1, 1, 0, 1, 0, 0, 1, 1, 1, 0]  # 2 blocks of 4, and 3 tokens
LIMITS = [0, 1, 3, 4, 6, 8, 10, 11, 20]


def found(world: World) -> int:
    """How many tokens a new stream finds; it leaves at once."""
    stream = world.open(IDENTITIES[0], [*TOKENS, 0])
    count = stream.sequence.num_tokens
    world.release(stream)
    return count


@pytest.mark.parametrize("limit", LIMITS)
def test_others_find_what_lies_within_the_limit_and_no_more(limit: int) -> None:
    """Whole blocks while it runs; at its end the rest up to the limit as well."""
    world = World(12, 4)
    stream = world.open(IDENTITIES[0], TOKENS, limit)
    world.schedule(stream, len(TOKENS))
    world.run([stream])
    world.check()
    assert found(world) == min(limit, 11) // 4 * 4
    world.release(stream)
    world.check()
    assert found(world) == min(limit, 11)
    world.finish()


@pytest.mark.parametrize("limit", LIMITS)
def test_the_last_of_the_branches_that_share_a_block_leaves_what_may_be_found(limit: int) -> None:
    world = World(12, 4)
    stream = world.open(IDENTITIES[0], TOKENS, limit)
    world.schedule(stream, len(TOKENS))
    world.run([stream])
    child = world.fork(stream)
    child.tokens.append(1)
    assert world.schedule(child, 1)
    world.run([child])
    for each in (stream, child):
        world.release(each)
        world.check()
    assert found(world) == min(limit, 11)
    world.finish()


@pytest.mark.parametrize("limit", LIMITS)
def test_a_limit_bounds_writing_not_reading(limit: int) -> None:
    """What others published is found beyond the limit, and is there still when the request ends."""
    world = World(12, 4)
    world.release(world.open_and_compute(TOKENS))
    reader = world.open(IDENTITIES[0], [*TOKENS, 1, 1], limit)
    assert reader.sequence.num_tokens == len(TOKENS)
    world.schedule(reader, 2)
    world.run([reader])
    world.check()
    world.release(reader)
    world.check()
    assert found(world) == len(TOKENS)
    world.finish()


def test_what_a_cut_block_knew_of_tokens_beyond_the_limit_is_forgotten() -> None:
    """Log-probabilities are kept with a block: those of tokens that nobody may find go, too."""
    world = World(12, 4)
    stream = world.open(IDENTITIES[0], TOKENS, 10)
    world.schedule(stream, len(TOKENS))
    world.run([stream])
    last = stream.sequence.last_block
    last.logprobs = BlockLogprobs(pack_tokens(TOKENS[8:]), (None, None, None), 0)
    world.release(stream)
    assert last.tokens == pack_tokens(TOKENS[8:10])
    assert not last.logprobs


# -- the scheduler ---------------------------------------------------------------------------------


def limited(limit: int, *lengths: int) -> CacheControl:
    points = tuple(Breakpoint(length, 10) for length in lengths)
    return CacheControl(write_limit=limit, breakpoints=points)


@pytest.mark.parametrize("limit", LIMITS)
def test_a_request_says_how_many_tokens_of_its_prompt_it_writes(limit: int) -> None:
    executor = FakeExecutor(20, 4)
    first = executor.add(TOKENS, 3, cache_control=limited(limit))
    executor.run()
    assert first.usage.num_cache_write_tokens == min(limit, len(TOKENS))
    second = executor.add([*TOKENS, 2, 2], 3)
    executor.run()
    assert second.usage.num_cached_tokens == min(limit, len(TOKENS))
    assert second.usage.num_cache_write_tokens == len(TOKENS) + 2 - min(limit, len(TOKENS))


def test_without_a_cache_nothing_is_written() -> None:
    executor = FakeExecutor(20, 4, enabled=False)
    request = executor.add(TOKENS, 3)
    executor.run()
    assert request.usage.num_cache_write_tokens == 0


@pytest.mark.parametrize("limit", [0, 3, 4, 8, 11])
def test_nobody_waits_for_what_will_not_be_published(limit: int) -> None:
    """A twin waits for the whole blocks that the other lets it find, if there are any."""
    executor = FakeExecutor(20, 4, max_prefill_chunk=2)
    executor.add(TOKENS, 3, cache_control=limited(limit))
    twin = executor.add(TOKENS, 3)
    executor.step()
    waits = bool(executor.scheduler.twins)
    assert waits == (limit >= 4)
    executor.run()
    assert twin.usage.num_cached_tokens == (limit // 4 * 4 if waits else 0)


@pytest.mark.parametrize("limit", LIMITS)
def test_a_preempted_request_keeps_its_limit(limit: int) -> None:
    executor = FakeExecutor(20, 4)
    request = executor.add(TOKENS, 6, n=2, cache_control=limited(limit))
    executor.step()
    executor.step()
    executor.scheduler.preempt_all()
    outputs = executor.run()
    assert outputs["0"] == serial_output(TOKENS, 6)
    full = [*TOKENS, *outputs["0"], 0]
    assert len(request.prompt) == len(TOKENS)
    again = executor.add(full, 1)
    executor.run()
    assert again.usage.num_cached_tokens == min(limit, len(full) - 2)


def test_who_goes_on_from_a_held_branch_shows_no_more_of_it_than_it_would() -> None:
    executor = FakeExecutor(20, 4)
    request = executor.add(TOKENS, 2, cache_control=limited(5))
    executor.step()
    held = executor.scheduler.hold(request.branches[0])
    executor.run()
    after = executor.add(held.tokens.tolist(), 6, origin=held)
    executor.run()
    assert after.usage.num_cached_tokens == len(TOKENS)
    assert after.usage.num_cache_write_tokens == 0
    held.release()
    again = executor.add([*TOKENS, 0], 1)
    executor.run()
    assert again.usage.num_cached_tokens == 5
    assert executor.cache.usage == 0


@pytest.mark.parametrize("length", [2, 4, 6])
def test_a_lease_at_the_limit_keeps_what_may_be_found(length: int) -> None:
    """The rest of the block goes, so that the beginning can be published."""
    executor = FakeExecutor(20, 4)
    request = executor.add(TOKENS, 3, cache_control=limited(length, length))
    executor.run()
    assert request.leases is not None
    assert [outcome.refused for outcome in request.leases] == [None]
    assert executor.cache.pool.reserve(20 - executor.scheduler.leases.num_blocks)
    again = executor.add(TOKENS, 1)
    executor.run()
    assert again.usage.num_cached_tokens == length


def test_what_lies_beyond_the_limit_is_not_leased() -> None:
    executor = FakeExecutor(20, 4)
    request = executor.add(TOKENS, 3, cache_control=limited(4, 4, 6))
    executor.run()
    assert request.leases is not None
    refused = [outcome.refused for outcome in request.leases]
    assert refused == [None, "6 tokens, 4 may be found"]


def test_a_block_that_others_hold_too_is_not_cut_for_a_lease() -> None:
    """The first of two branches ends while the other reads all of the block."""
    executor = FakeExecutor(20, 4)
    request = executor.add(TOKENS, 3, n=2, cache_control=limited(6, 4, 6))
    executor.run()
    assert request.leases is not None
    refused = [outcome.refused for outcome in request.leases]
    assert refused == [None, "its last block cannot be published"]
    again = executor.add(array("i", TOKENS).tolist(), 1)
    executor.run()
    assert again.usage.num_cached_tokens == 6, "the last branch to end leaves it, without a lease"


@pytest.mark.parametrize("gives_way", [False, True])
@pytest.mark.parametrize("is_known", [False, True])
def test_who_goes_on_from_a_held_branch_has_its_limit(gives_way: bool, is_known: bool) -> None:
    """Also if the branch, or a fork of it, gave way, or the cache holds as much as the branch."""
    executor = FakeExecutor(20, 4)
    scheduler = executor.scheduler
    executor.add(TOKENS, 4, cache_control=limited(4))
    executor.step()
    held = scheduler.hold(scheduler.running[0]).fork()
    executor.run()
    past = held.tokens.tolist()
    if is_known:
        executor.add(past, 1)
        executor.run()
    if gives_way:
        scheduler.held.give_all_up()
    executor.add([*past, 2, 2, 2, 2, 2], 1, origin=held)
    executor.run()
    again = executor.add([*past, 2, 2, 2, 2, 2], 1)
    executor.run()
    assert again.usage.num_cached_tokens == (len(past) if is_known else 4)


@pytest.mark.parametrize("moment", range(3))
def test_an_end_that_is_interrupted_leaves_no_tokens_without_blocks(
    moment: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A preemption is interrupted (Ctrl-C): who is taken for running reads what it has."""
    world = World(12, 4)
    sequence = world.open(IDENTITIES[0], TOKENS, 0).sequence
    assert sequence.reserve(len(TOKENS))
    sequence.write(TOKENS)
    sequence.commit()
    free, calls = BlockPool._free_private, iter(range(moment))

    def interrupted(pool: BlockPool, block: Block) -> None:
        if next(calls, None) is None:
            raise KeyboardInterrupt
        free(pool, block)

    with monkeypatch.context() as patch:
        patch.setattr(BlockPool, "_free_private", interrupted)
        with pytest.raises(KeyboardInterrupt):
            sequence.release()
    sequence.discard()  # as `Scheduler.recover` does
    assert sequence.num_tokens == sequence.num_computed_tokens == 0
    assert sequence.block_table().tolist() == []
