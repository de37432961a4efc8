"""Each rule of the cache in the smallest case that needs it: without the rule, it fails.

The shrunk stories behind the planted bugs of tests/proof/planted_bugs.toml.
"""

import pytest
from cache_world import IDENTITIES, Stream, World
from digests import ChosenChains

from prefixkv.block import TAIL
from prefixkv.hashing import chain_digest

MODEL = IDENTITIES[0]


def small_world(digest: ChosenChains | None = None) -> World:
    """12 blocks of 2 slots."""
    return World(num_blocks=12, block_size=2, digest=digest or chain_digest)


def go_on(world: World, stream: Stream, *tokens: int) -> None:
    """Compute what is left of a stream's tokens, and some more."""
    schedule(world, stream, *tokens)
    world.run([stream])
    world.check()


def schedule(world: World, stream: Stream, *tokens: int) -> None:
    """Schedule what is left of a stream's tokens, and some more."""
    stream.tokens += tokens
    assert world.schedule(stream, len(stream.tokens) - stream.sequence.num_tokens)


def tails(world: World) -> list[int]:
    """The fill of each published tail."""
    return [len(b.tokens) // 4 for b in world.cache.pool.blocks if b.state == TAIL]


# -- digests that collide --------------------------------------------------------------------------


def test_equal_tokens_after_another_beginning_are_not_shown_though_the_digests_collide() -> None:
    """The parent is compared: a digest and the block's own tokens do not make a match."""
    mine, theirs = (0, 0, 1, 1), (1, 0, 1, 1)
    world = small_world(ChosenChains((MODEL, mine), (MODEL, theirs), block_size=2))
    world.release(world.open_and_compute([*theirs, 0]))
    world.release(world.open_and_compute([*mine[:2]]))

    stream = world.open(MODEL, [*mine, 0])

    assert stream.sequence.num_tokens == 2
    world.check()


def test_a_newcomer_does_not_give_way_to_equal_tokens_after_another_beginning() -> None:
    """The parent is compared when publishing too; the newcomer stays private, and is counted."""
    mine, theirs = (0, 0, 1, 1), (1, 0, 1, 1)
    world = small_world(ChosenChains((MODEL, mine), (MODEL, theirs), block_size=2))
    world.open_and_compute([*theirs, 0])
    world.open_and_compute([*mine, 0])

    assert world.cache.stats.num_collisions == 1
    assert world.cache.stats.num_deduplicated == 0


def test_another_tenant_is_not_shown_a_chain_whose_digest_it_has_forged() -> None:
    """Whose digest is that of another identity's chain finds nothing, and is refused the place."""
    tenant, chain = IDENTITIES[1], (0, 1)
    world = small_world(ChosenChains((tenant, chain), (MODEL, chain), block_size=2))
    world.release(world.open_and_compute([*chain, 0]))

    forged = world.open(tenant, [*chain, 0])
    assert forged.sequence.num_tokens == 0
    go_on(world, forged)

    assert world.cache.stats.num_collisions == 1
    assert world.open(MODEL, [*chain, 1]).sequence.num_tokens == 2


def test_who_lost_its_digest_stays_private_when_the_place_becomes_free() -> None:
    """A block is published when it is filled, or never; what follows it was not either."""
    world = small_world(ChosenChains((MODEL, (0, 0)), (MODEL, (1, 1)), block_size=2))
    incumbent = world.open_and_compute([1, 1])
    newcomer = world.open_and_compute([0, 0, 1])
    world.release(incumbent)
    assert world.cache.pool.reserve(world.num_available())  # evicts the incumbent
    go_on(world, newcomer, 1, 0)

    assert not world.cache.pool.index
    assert world.cache.stats.num_collisions == 1


# -- publishing ------------------------------------------------------------------------------------


def test_a_sequence_that_ends_with_a_block_moves_onto_its_incumbent() -> None:
    """Of two that fill the same block at once, both end in the one that was published."""
    world = small_world()
    first, second = (world.open(MODEL, [0, 1]) for _ in range(2))
    schedule(world, first)
    schedule(world, second)
    world.run([first, second])
    world.check()

    assert first.sequence.last_block is second.sequence.last_block
    go_on(world, second, 1)


def test_a_tail_is_not_published_before_its_copy_has_run() -> None:
    """Who ends between its write and the step leaves no empty block behind."""
    world = small_world()
    parent = world.open_and_compute([0, 1, 1])
    child = world.fork(parent)
    schedule(world, child, 0)
    world.release(child)

    assert not tails(world)
    assert not world.cache.pending_copies
    world.check()


def test_scheduled_tokens_are_not_published() -> None:
    """Who ends between its write and the step leaves the tokens that were computed, no more."""
    world = World(num_blocks=4, block_size=4)
    stream = world.open_and_compute([0])
    schedule(world, stream, 1, 1)
    world.release(stream)

    assert tails(world) == [1]
    world.check()


def test_a_step_that_was_taken_back_leaves_no_token() -> None:
    """The books forget what was scheduled, also where the block goes on to be published."""
    world = World(num_blocks=4, block_size=4)
    stream = world.open_and_compute([0])
    schedule(world, stream, 1, 1)
    stream.sequence.discard()
    del stream.tokens[1:]
    world.check()
    world.release(stream)

    assert tails(world) == [1]


def test_a_tail_that_was_taken_over_is_not_found() -> None:
    """It is private again: another continuation finds only what lies before it."""
    world = small_world()
    world.release(world.open_and_compute([0, 1, 1]))
    stream = world.open(MODEL, [0, 1, 1, 1])
    schedule(world, stream)

    assert world.cache.stats.num_takeovers == 1
    assert world.open(MODEL, [0, 1, 1, 0]).sequence.num_tokens == 2


def test_nothing_is_published_under_a_root_that_a_reset_has_closed() -> None:
    """A sequence that had computed nothing at the reset publishes nothing either."""
    world = small_world()
    stream = world.open(MODEL, [0, 1, 1])
    world.cache.reset()
    go_on(world, stream)

    assert not world.cache.pool.index
    assert world.open(MODEL, [0, 1, 1]).sequence.num_tokens == 0


def test_the_end_of_an_old_root_leaves_the_new_one() -> None:
    """After a reset an identity has another root, which outlives the old one."""
    world = small_world()
    old = world.open_and_compute([0, 1, 1])
    world.cache.reset()
    new = world.open_and_compute([0, 1, 1])
    world.release(old)

    assert world.cache.pool.roots == {MODEL.canonical: new.sequence.root}
    assert world.open(MODEL, [0, 1, 0]).sequence.num_tokens == 2


def test_a_digest_that_fails_leaves_no_root() -> None:
    """An open that is interrupted changes nothing."""
    world = small_world()

    def fail(_: bytes) -> bytes:
        raise KeyboardInterrupt

    world.cache.digest = fail
    with pytest.raises(KeyboardInterrupt):
        world.open(MODEL, [0, 1, 1])
    world.check()
    assert not world.cache.pool.roots


# -- writing ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [3, 1])
def test_a_rollback_changes_nothing_for_those_who_share(length: int) -> None:
    """Neither the cut nor the next write touches a block that the other one reads."""
    world = World(num_blocks=8, block_size=4)
    parent = world.open_and_compute([0, 1, 1, 0, 1, 1, 0])
    child = world.fork(parent)
    world.rollback(child, 4 + length - 1)
    assert child.sequence.num_computed_tokens == child.sequence.num_tokens == 4 + length - 1
    world.check()
    go_on(world, child, 1, 1)
    go_on(world, parent, 0)
    world.release(parent)
    world.check()


def test_a_rollback_into_a_published_block_copies_at_the_next_write() -> None:
    """Nobody else holds it, and still it is not written: it may be found."""
    world = small_world()
    stream = world.open_and_compute([0, 1, 1, 0])
    world.rollback(stream, 3)
    go_on(world, stream, 1)

    assert world.cache.stats.num_copies == 1
    assert world.open(MODEL, [0, 1, 1, 0, 0]).sequence.num_tokens == 4


def test_a_source_outlives_its_holders_until_it_is_copied() -> None:
    """The queued copy references its source: what is evicted meanwhile is something else."""
    world = World(num_blocks=3, block_size=2)
    parent = world.open_and_compute([0, 1, 1])
    child = world.fork(parent)
    schedule(world, child, 0)
    world.release(parent)
    assert not world.cache.pool.reserve(1)
    world.run([child])
    world.check()
    assert world.cache.pool.reserve(1)
