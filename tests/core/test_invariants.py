"""The checker itself: each invariant, broken once on purpose in a healthy state, must be named."""

from collections.abc import Callable

import pytest
from cache_world import IDENTITIES, World

from prefixkv.block import FREE, FULL, PRIVATE, TAIL, Block, add_child
from prefixkv.errors import InvariantViolation

Corruption = Callable[[World], None]


def healthy_world() -> World:
    """Two branches of a published chain, an idle chain with a tail, a queued copy, free blocks."""
    world = World(num_blocks=16, block_size=2)
    first = world.open(IDENTITIES[0], [0, 1, 1, 0, 1])
    world.schedule(first, 5)
    world.run([first])
    world.fork(first)
    idle = world.open(IDENTITIES[0], [1, 1, 1, 1, 0])
    world.schedule(idle, 5)
    world.run([idle])
    world.release(idle)
    first.tokens.append(1)
    world.schedule(first, 1)  # queues a copy of the shared last block
    world.check()
    return world


def find(world: World, state: int, *, idle: bool | None = None) -> Block:
    for block in world.cache.pool.blocks:
        if block.state == state and (idle is None or idle == (block.refs == 0)):
            return block
    raise AssertionError("the healthy world lacks such a block")


def free_a_block_twice(world: World) -> None:
    world.cache.pool.free.append(world.cache.pool.free[0])


def free_the_reserved_block(world: World) -> None:
    world.cache.pool.free.append(world.cache.pool.blocks[0])


def lose_a_block(world: World) -> None:
    world.cache.pool.free.pop()


def free_a_block_in_use(world: World) -> None:
    world.cache.pool.free.append(find(world, PRIVATE))


def count_a_reference_too_many(world: World) -> None:
    find(world, FULL).refs += 1


def forget_the_reference_of_a_copy(world: World) -> None:
    world.cache.pending_copies[0].source.refs -= 1


def keep_a_root_that_nobody_holds(world: World) -> None:
    world.cache.root(IDENTITIES[1])


def leak_a_private_block(world: World) -> None:
    block = world.cache.pool.free.pop()
    parent = find(world, FULL)
    block.state, block.parent = PRIVATE, parent
    parent.refs += 1


def index_under_a_wrong_digest(world: World) -> None:
    index = world.cache.pool.index
    index[b"wrong"] = next(iter(index.values()))


def keep_an_evicted_block_in_the_index(world: World) -> None:
    world.cache.pool.index[b"gone"] = world.cache.pool.free[0]


def drop_from_the_index(world: World) -> None:
    world.cache.pool.index.popitem()


def publish_under_a_private_parent(world: World) -> None:
    block = find(world, FULL, idle=False)
    del world.cache.pool.index[block.digest or b""]
    block.state, block.digest = PRIVATE, None


def forget_a_child(world: World) -> None:
    tail = find(world, TAIL)
    assert tail.parent is not None
    tail.parent.children = None


def list_a_private_child(world: World) -> None:
    block = find(world, PRIVATE)
    assert block.parent is not None
    add_child(block.parent, block)


def shorten_a_full_block(world: World) -> None:
    world.cache.pool.order.remove(find(world, TAIL))
    block = find(world, FULL)
    block.tokens = block.tokens[:-4]


def share_a_written_block(world: World) -> None:
    world.streams[0].sequence.last_block.state = TAIL


def count_more_tokens_than_the_chain_holds(world: World) -> None:
    sequence = world.streams[1].sequence
    sequence.num_tokens = sequence.num_computed_tokens = 6


def compute_more_than_there_is(world: World) -> None:
    world.streams[1].sequence.num_computed_tokens += 1


def keep_an_old_table(world: World) -> None:
    world.streams[1].sequence.block_table()[0] += 1


def misplace_a_block(world: World) -> None:
    world.streams[1].sequence.last_block.depth += 1


def order_a_block_in_use(world: World) -> None:
    world.cache.pool.order.add(find(world, FULL, idle=False))


def forget_an_idle_block(world: World) -> None:
    world.cache.pool.order.remove(find(world, TAIL, idle=True))


def keep_tokens_of_a_free_block(world: World) -> None:
    find(world, FREE).tokens = b"left"


@pytest.mark.parametrize(
    ("invariant", "corrupt"),
    [
        ("invariant 1 (states)", free_a_block_twice),
        ("invariant 1 (states)", free_the_reserved_block),
        ("invariant 1 (states)", lose_a_block),
        ("invariant 1 (states)", free_a_block_in_use),
        ("invariant 2 (references)", count_a_reference_too_many),
        ("invariant 2 (references)", forget_the_reference_of_a_copy),
        ("invariant 2 (references)", keep_a_root_that_nobody_holds),
        ("invariant 2 (references)", leak_a_private_block),
        ("invariant 3 (published)", index_under_a_wrong_digest),
        ("invariant 3 (published)", keep_an_evicted_block_in_the_index),
        ("invariant 3 (published)", drop_from_the_index),
        ("invariant 3 (published)", publish_under_a_private_parent),
        ("invariant 3 (published)", forget_a_child),
        ("invariant 3 (published)", list_a_private_child),
        ("invariant 3 (published)", shorten_a_full_block),
        ("invariant 3 (published)", share_a_written_block),
        ("invariant 5 (chain)", count_more_tokens_than_the_chain_holds),
        ("invariant 5 (chain)", compute_more_than_there_is),
        ("invariant 5 (chain)", keep_an_old_table),
        ("invariant 5 (chain)", misplace_a_block),
        ("invariant 6 (eviction order)", order_a_block_in_use),
        ("invariant 6 (eviction order)", forget_an_idle_block),
        ("invariant 7 (free blocks)", keep_tokens_of_a_free_block),
    ],
)
def test_a_broken_invariant_is_named(invariant: str, corrupt: Corruption) -> None:
    """The checker does not pass over a fault, and says which promise it breaks."""
    world = healthy_world()
    corrupt(world)
    with pytest.raises(InvariantViolation) as caught:
        world.cache.check_invariants()

    assert str(caught.value).startswith(invariant)


def test_a_written_block_with_two_referrers_is_named() -> None:
    """Invariant 4: the books agree otherwise, but two sequences would see the write."""
    world = healthy_world()
    writer = world.streams[0].sequence
    other = world.streams[1].sequence
    world.cache.pool.acquire(writer.last_block)
    world.cache.pool.release(other.last_block)
    other.last_block = writer.last_block
    other.num_tokens = other.num_computed_tokens = 5
    with pytest.raises(InvariantViolation, match=r"^invariant 4 \(written blocks\)"):
        world.cache.check_invariants()


def test_a_queued_copy_into_a_published_block_is_named() -> None:
    """Invariant 7: a copy must run between a resident source and a private target."""
    world = healthy_world()
    pool = world.cache.pool
    target = world.cache.pending_copies[0].target
    copy = pool.copies.pop(target)
    pool.copies[find(world, FULL, idle=False)] = copy
    object.__setattr__(copy, "target", find(world, FULL, idle=False))
    with pytest.raises(InvariantViolation, match=r"^invariant 7 \(free blocks\)"):
        world.cache.check_invariants()


def test_a_slot_with_other_content_is_named() -> None:
    """Invariant 5: the oracle sees a slot that belongs to another chain, and one never written."""
    for content in [(b"other", (0,)), None]:
        world = healthy_world()
        block_id = world.streams[1].sequence.block_table()[0]
        world.kv.slots.pop((block_id, 0))
        if content is not None:
            world.kv.slots[block_id, 0] = content
        with pytest.raises(AssertionError, match=r"invariant 5 \(content\)"):
            world.check()


def test_a_published_lie_is_named() -> None:
    """Invariant 5: what nobody holds now must be right too, since anybody may find it."""
    world = healthy_world()
    world.kv.poison(find(world, TAIL), 1)
    with pytest.raises(AssertionError, match=r"invariant 5 \(content\): published"):
        world.check()


def test_a_failed_reserve_that_changes_something_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Invariant 8: an implementation that evicts before it knows is caught."""
    world = healthy_world()
    stream = world.open(IDENTITIES[2], [0] * 40)
    reserve = world.cache.pool.reserve

    def evict_first(num_blocks: int) -> bool:
        reserve(len(world.cache.pool.free) + 1)
        return reserve(num_blocks)

    monkeypatch.setattr(world.cache.pool, "reserve", evict_first)
    with pytest.raises(AssertionError, match=r"invariant 8 \(failed operation\)"):
        world.schedule(stream, 40)


def test_the_healthy_world_is_healthy() -> None:
    """Nothing above fails for another reason than its own corruption."""
    world = healthy_world()
    world.run([world.streams[0]])
    world.check()
    world.finish()
