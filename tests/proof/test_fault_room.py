"""References and room: counted twice, one short, or in the wrong order.

Kinds of faults that broke other systems; docs/faults.md lists them all.
"""

from collections.abc import Callable, Iterator

import pytest
from cache_world import IDENTITIES, Stream, World
from fake_executor import FakeExecutor
from fake_kv import chain_of

from prefixkv import PrefixCache, Sequence
from prefixkv.block import Block
from prefixkv.eviction import EvictionOrder

MODEL = IDENTITIES[0]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_two_that_computed_the_same_blocks_end_in_either_order(order: tuple[int, int]) -> None:
    """Both hold the blocks that stayed; evicting all that can be had frees nothing of the other."""
    world = World(num_blocks=12, block_size=2)
    streams = [world.open(MODEL, [0, 1, 1, 0, 1]) for _ in range(2)]
    for stream in streams:
        assert world.schedule(stream, 5)
    world.run(streams)
    world.check()
    first, second = (streams[i] for i in order)
    shared = chain_of(first.sequence.last_block)[:2]
    assert chain_of(second.sequence.last_block)[:2] == shared
    assert [block.refs for block in shared] == [1, 2]
    world.release(first)
    assert [block.refs for block in shared] == [1, 2]  # the tail that it left, and the other
    assert world.cache.pool.reserve(world.num_available())
    world.check()
    assert [block.refs for block in shared] == [1, 1]
    world.release(second)
    assert [block.refs for block in shared] == [1, 1]  # the tail
    world.finish()


@pytest.mark.parametrize(("num_tokens", "fits"), [(8, True), (9, False)])
def test_a_matched_leaf_is_not_evicted_for_what_follows_it(num_tokens: int, fits: bool) -> None:
    """Idle until it was matched, and the oldest of all: of 6 blocks 4 can be had besides it."""
    world = World(num_blocks=6, block_size=2)
    for tokens in ([0, 0, 0, 0], [1, 1, 1, 1]):
        world.release(world.open_and_compute(tokens))
    stream = world.open(MODEL, [0, 0, 0, 0, *[2] * num_tokens])
    before = world.snapshot()
    assert stream.sequence.num_tokens == 4
    assert world.schedule(stream, num_tokens) == fits
    if fits:
        world.run([stream])
        assert stream.sequence.num_computed_tokens == 12
    else:
        assert world.snapshot() == before
    world.check()
    assert world.open(MODEL, [0, 0, 0, 0, 1]).sequence.num_tokens == 4


Start = Callable[[World, int], Stream]


def alone(world: World, length: int) -> Stream:
    """A sequence that holds its last block alone."""
    return world.open_and_compute([0] * length)


def forked(world: World, length: int) -> Stream:
    """A sequence that shares its last block with a branch."""
    world.fork(world.open_and_compute([0] * length))
    return world.streams[0]


def matched(world: World, length: int) -> Stream:
    """A sequence that has just found a finished one's blocks, tail included."""
    world.release(world.open_and_compute([0] * length))
    return world.open(MODEL, [0] * length + [1])


def matched_in_part(world: World, length: int) -> Stream:
    """A sequence that has just found all but the last token of a finished one."""
    world.release(world.open_and_compute([0] * length))
    return world.open(MODEL, [0] * length)


@pytest.mark.parametrize("start", [alone, forked, matched, matched_in_part])
def test_a_write_takes_exactly_the_blocks_that_were_predicted(start: Start) -> None:
    """With just as many free it succeeds, with one less it is refused before anything changes."""
    num_cases = 0
    for length in range(1, 10):
        for num_tokens in range(1, 10):
            for missing in (0, 1):
                world = World(num_blocks=12, block_size=4)
                stream = start(world, length)
                sequence = stream.sequence
                needed = sequence.num_blocks_needed(num_tokens)
                if missing > needed:
                    continue
                room = world.num_available()
                hoard = world.open(IDENTITIES[1], [7] * 4 * (room - needed + missing))
                assert world.schedule(hoard, len(hoard.tokens))
                stream.tokens[sequence.num_tokens :] = [2] * num_tokens
                assert world.num_available() == needed - missing
                assert world.schedule(stream, num_tokens) == (not missing)
                assert world.num_available() == (needed - 1 if missing else 0)
                num_cases += 1
    assert num_cases > 120


class CountingOrder(EvictionOrder):
    """Counts the idle blocks that anybody looks at."""

    def __init__(self) -> None:
        super().__init__()
        self.num_seen = 0

    def __iter__(self) -> Iterator[Block]:
        for block in super().__iter__():
            self.num_seen += 1
            yield block


class CountingBlocks(list[Block]):
    """The blocks of a pool; counts how often anybody goes through all of them."""

    num_walks = 0

    def __iter__(self) -> Iterator[Block]:
        self.num_walks += 1
        return super().__iter__()


@pytest.mark.parametrize("num_leaves", [1_000, 4_000])
def test_an_eviction_looks_at_what_it_takes_and_no_further(num_leaves: int) -> None:
    """Whatever the number of idle leaves: those taken, and the one after them."""
    cache = PrefixCache(num_leaves + 1, block_size=1)
    order = cache.pool.order = CountingOrder()
    blocks = cache.pool.blocks = CountingBlocks(cache.pool.blocks)
    for i in range(num_leaves):
        sequence = Sequence.open(cache, MODEL, [i])
        assert sequence.reserve(1)
        sequence.write([i])
        sequence.commit()
        sequence.release()
    assert len(order) == num_leaves
    order.num_seen = blocks.num_walks = 0
    for _ in range(10):
        assert cache.pool.reserve(len(cache.pool.free) + 8)
    assert cache.pool.num_evicted == 80
    assert order.num_seen == 10 * 9
    assert blocks.num_walks == 0


def test_a_hot_prefix_survives_a_scan_if_it_is_used_meanwhile() -> None:
    """Used once in each pool's worth of other prompts it is never given up, nor while it is held.

    (Idle all through a scan larger than the pool it goes: the order is by last use.)
    """
    hot = [1] * 64  # 16 of 64 blocks
    for held in (False, True):
        executor = FakeExecutor(64, 4)
        for i in range(100):
            executor.add([*hot, 2, i % 3], 1)
            executor.run()
        holder = executor.add([*hot, 0], 150) if held else None
        for i in range(16):  # 16 prompts of 8 blocks: twice the pool
            executor.add([5 + i] * 32, 1)
            executor.step()
            if not held and i % 4 == 3:
                again = executor.add([*hot, 0, i], 1)
                executor.run()
                assert again.usage.num_cached_tokens >= 64
        last = executor.add([*hot, 0, 2], 1)
        while last.branches and not last.branches[0].num_output_tokens:
            executor.step()
        assert (holder is not None and holder.branches[0].num_output_tokens < 150) == held
        assert last.usage.num_cached_tokens >= 64
        assert executor.cache.pool.num_evicted > 64
