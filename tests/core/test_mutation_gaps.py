"""What mutants of the cache could do unnoticed, until these tests; see docs/mutation.md."""

from array import array

import pytest
from cache_world import IDENTITIES, Stream, World

from prefixkv import PrefixCache, Sequence
from prefixkv.block import Block, common_beginning, published_children
from prefixkv.errors import InvalidRequest, StaleSequence
from prefixkv.eviction import EvictionOrder
from prefixkv.hashing import pack_tokens, root_digest
from prefixkv.identity import ModelIdentity

MODEL = IDENTITIES[0]


def go_on(world: World, stream: Stream, token: int) -> None:
    """Compute one more token of a stream."""
    stream.tokens.append(token)
    assert world.schedule(stream, 1)
    world.run([stream])
    world.check()


# -- the cache -------------------------------------------------------------------------------------


def test_every_replacement_of_the_weights_is_a_new_epoch() -> None:
    """The second one separates as the first did: old sequences are stale, roots are others."""
    cache = PrefixCache(num_blocks=8, block_size=2)
    digests = {cache.root(MODEL).digest}
    for epoch in (1, 2, 3):
        old = Sequence.open(cache, MODEL, [0, 1])
        cache.weights_changed()
        with pytest.raises(StaleSequence, match=f"epoch {epoch - 1}, now is epoch {epoch}: "):
            old.reserve(2)
        old.release()
        digests.add(cache.root(MODEL).digest)

    assert len(digests) == 4


def test_a_reset_moves_the_version() -> None:
    """It makes room, so that a head of the queue has to be looked at again."""
    world = World(num_blocks=8, block_size=2)
    for prompt in ([0, 0, 1], [1, 1, 0]):
        world.release(world.open_and_compute(prompt))
    before = world.cache.pool.version
    world.cache.reset()

    assert world.cache.pool.version > before > 1


def test_what_becomes_findable_moves_the_version() -> None:
    """A full block by its commit, a tail by its release: it only grows."""
    world = World(num_blocks=8, block_size=2)
    for prompt in ([0, 0, 1], [1, 1, 0], [1, 0, 0]):
        before = world.cache.pool.version
        stream = world.open_and_compute(prompt)
        committed = world.cache.pool.version
        world.release(stream)

        assert before < committed < world.cache.pool.version


def test_the_counters_count() -> None:
    """Every fork, copy and takeover once, however many there are."""
    world = World(num_blocks=32, block_size=4)
    parent = world.open_and_compute([0, 1, 0])
    children = [world.fork(parent) for _ in range(3)]
    for child in children[:2]:
        go_on(world, child, 1)
    world.release(parent)
    for child in children:
        world.release(child)
    for first in (2, 3):
        world.release(world.open_and_compute([first, 0]))
        world.release(world.open_and_compute([first, 0, 0, 1]))

    stats = world.cache.stats
    assert stats.num_forks == 3
    assert stats.num_copies == 2
    assert stats.num_slots_copied == 6
    assert stats.num_takeovers == 2


def test_a_discard_with_nothing_scheduled_leaves_shared_blocks_alone() -> None:
    """Neither a published block that was matched in part, nor a private one that a fork shares."""
    world = World(num_blocks=8, block_size=4)
    kept = world.open_and_compute([0, 1, 0, 1, 1, 1])
    world.release(kept)
    for length in (3, 5):  # ends inside the full block, inside the tail
        reader = world.open(MODEL, [*kept.tokens[:length], 2])
        assert reader.sequence.num_tokens == length
        reader.sequence.discard()
        world.check()
        world.release(reader)
    assert world.open(MODEL, [*kept.tokens, 0]).sequence.num_tokens == 6

    parent = world.open_and_compute([2, 2, 2])
    child = world.fork(parent)
    world.rollback(child, 1)
    child.sequence.discard()
    world.check()


def test_a_discarded_step_leaves_nothing_for_the_tail() -> None:
    """What was scheduled and never computed is not published when the sequence ends."""
    world = World(num_blocks=8, block_size=4)
    stream = world.open_and_compute([0, 1, 0, 1, 0])
    stream.tokens += [1, 1]
    assert world.schedule(stream, 2)
    stream.sequence.discard()
    world.release(stream)
    world.check()

    assert world.open(MODEL, [0, 1, 0, 1, 0, 1, 1, 0]).sequence.num_tokens == 5


def test_a_refusal_names_what_was_tried() -> None:
    """Who reads the log sees which call came between write and commit."""
    cache = PrefixCache(num_blocks=8, block_size=4)
    sequence = Sequence.open(cache, MODEL, [0, 1])
    sequence.reserve(2)
    sequence.write([0, 1])
    for name, use in [
        ("fork", sequence.fork),
        ("rollback", lambda: sequence.rollback(0)),
        ("drop_partial", sequence.drop_partial),
    ]:
        with pytest.raises(InvalidRequest, match=f"^{name} between write and commit: 2 tokens"):
            use()


def test_packing_refuses_what_has_no_sign_to_check() -> None:
    """Unsigned ids are checked like any others; a root's digest is as long as a block's."""
    assert pack_tokens(array("I", [1, 2])) == pack_tokens([1, 2])
    with pytest.raises(InvalidRequest, match=r"^token ids must be integers in \[0, 2\*\*31\)$"):
        pack_tokens(array("I", [2**31]))
    assert len(root_digest(b"identity")) == 16


def test_the_parent_of_a_cold_leaf_comes_after_the_other_cold_leaves() -> None:
    """Being cold is not inherited, even by a parent that was used less recently."""
    world = World(num_blocks=4, block_size=2)
    for prompt in ([0, 0, 1, 1], [1, 1, 0, 0]):
        world.release(world.open_and_compute(prompt), cold=True)
    assert world.cache.pool.reserve(2)
    world.check()

    assert [world.open(MODEL, [t, t, 2]).sequence.num_tokens for t in (0, 1)] == [2, 2]


def test_evictions_are_counted_and_leave_no_trace() -> None:
    """A block begins its next life as warm as any other."""
    world = World(num_blocks=4, block_size=2)
    for evicted in (2, 4):
        world.release(world.open_and_compute([0, 0, 1, 1]), cold=True)
        assert world.cache.pool.reserve(4)
        assert world.cache.pool.num_evicted == evicted
        assert all(block.priority == 0 for block in world.cache.pool.blocks)
        assert all(block.tokens == b"" for block in world.cache.pool.blocks)


def test_of_equal_uses_the_deepest_is_given_up_first() -> None:
    """Then the one with the lowest number, so that no two blocks rank alike."""
    order = EvictionOrder()
    for block_id, depth in [(1, 1), (3, 2), (2, 2)]:
        block = Block(block_id)
        block.depth = depth
        order.add(block)

    assert [block.block_id for block in order] == [2, 3, 1]


def test_only_a_part_of_a_block_is_dropped() -> None:
    """One token of it or more; where the sequence ends with a block there is nothing to drop."""
    world = World(num_blocks=16, block_size=4)
    tokens = [0, 1, 0, 1, 1, 0, 1]
    world.release(world.open_and_compute(tokens))
    for length, left in [(4, 4), (5, 4), (6, 4), (3, 0)]:
        sequence = world.open(MODEL, [*tokens[:length], 2]).sequence
        assert sequence.num_tokens == length
        assert sequence.drop_partial() == (left < length)
        assert sequence.num_tokens == left


def test_a_release_between_write_and_commit_discards_what_was_scheduled() -> None:
    """Whoever leaves in the middle of a step leaves a tail of computed tokens only."""
    world = World(num_blocks=8, block_size=4)
    stream = world.open_and_compute([0, 1, 0, 1, 0])
    stream.tokens += [1, 1]
    assert world.schedule(stream, 2)
    world.release(stream)
    world.check()

    assert world.open(MODEL, [0, 1, 0, 1, 0, 1, 1, 0]).sequence.num_tokens == 5


def test_a_release_is_warm_unless_it_says_cold() -> None:
    """Sequences that end as usual are evicted in the order of their ends."""
    world = World(num_blocks=4, block_size=2)
    for prompt in ([0, 0, 0], [1, 1, 1]):
        stream = world.open_and_compute(prompt)
        world.streams.remove(stream)
        if prompt[0]:
            stream.sequence.release()
        else:
            stream.sequence.release(cold=False)
    assert world.cache.pool.reserve(2)

    assert world.open(MODEL, [1, 1, 1, 1]).sequence.num_tokens == 3


def test_each_block_that_collides_is_counted() -> None:
    """What follows the newcomer is private as well, and no collision of its own."""
    cache = PrefixCache(num_blocks=16, block_size=2, digest=lambda data: b"")
    for prompt, collisions in [([0, 0], 0), ([1, 1], 1), ([2, 2], 2)]:
        sequence = Sequence.open(cache, MODEL, prompt)
        assert sequence.reserve(2)
        sequence.write(prompt)
        sequence.commit()
        assert cache.stats.num_collisions == collisions
        sequence.release()
        cache.check_invariants()


def test_a_fork_that_leaves_before_its_copy_ran_gives_up_all_it_held() -> None:
    """The source of the copy and the chain above it, of which others hold a part."""
    world = World(num_blocks=8, block_size=4)
    parent = world.open_and_compute([0, 1, 0, 1, 0, 1])
    child = world.fork(parent)
    child.tokens.append(0)
    assert world.schedule(child, 1)
    assert len(world.cache.pending_copies) == 1
    world.release(child)
    world.check()

    assert not world.cache.pending_copies
    world.finish()


def test_what_a_rollback_or_a_copy_gives_up_stays_warm() -> None:
    """Only a release that says so sends blocks to the cold end."""
    world = World(num_blocks=8, block_size=2)
    stream = world.open_and_compute([0, 1, 0, 1])
    world.rollback(stream, 2)
    reader = world.open(MODEL, [0, 1, 0, 0])
    world.schedule(reader, 1)
    world.run([reader])

    assert len(world.cache.pool.order) == 1
    assert all(block.priority == 0 for block in world.cache.pool.blocks)


def test_a_released_sequence_is_empty() -> None:
    """It keeps no block and no token, whoever still looks at it."""
    world = World(num_blocks=8, block_size=2)
    stream = world.open_and_compute([0, 1, 0])
    world.release(stream)
    sequence = stream.sequence

    assert sequence.block_table() == array("i")
    assert (sequence.num_tokens, sequence.num_computed_tokens) == (0, 0)


@pytest.mark.parametrize("bit", range(31))
def test_tokens_that_differ_in_any_one_bit_are_two(bit: int) -> None:
    """A difference in the highest bit of an id ends the common beginning before it, not after."""
    for shared in range(3):
        ids = [7] * shared
        a, b = pack_tokens([*ids, 0, 1]), pack_tokens([*ids, 1 << bit, 1])
        assert common_beginning(a, b) == 4 * shared


@pytest.mark.parametrize(("prompt", "found"), [([0, 1, 2, 3, 9], 4), ([0, 1, 9], 0)])
def test_whole_blocks_are_found_to_the_last_one_without_partial_matching(
    prompt: list[int], found: int
) -> None:
    """Also one that ends right before the last token; and no part of one."""
    cache = PrefixCache(num_blocks=8, block_size=4, match_partial=False)
    first = Sequence.open(cache, MODEL, [0, 1, 2, 3])
    first.reserve(4)
    first.write([0, 1, 2, 3])
    first.commit()

    assert Sequence.open(cache, MODEL, prompt).num_tokens == found
    assert first.block_table().typecode == "i"  # as the kernels take it


@pytest.mark.parametrize("num_new", [1, 6, 7, 8, 15])
def test_a_write_fills_the_last_block_to_its_end_and_no_further(num_new: int) -> None:
    """Also where blocks are larger than in most tests: 6 slots are left, the rest follows."""
    world = World(num_blocks=8, block_size=8)
    stream = world.open_and_compute([0, 1])
    stream.tokens += [1] * num_new
    assert world.schedule(stream, num_new)
    world.run([stream])
    world.check()

    assert len(stream.sequence.block_table()) == -(-(2 + num_new) // 8)
    assert all(len(block.tokens) <= 8 * 4 for block in world.cache.pool.blocks)


@pytest.mark.parametrize("end", [[2], [2, 2, 2, 2, 2, 2]])
def test_what_was_rolled_back_is_written_over(end: list[int]) -> None:
    """The block keeps none of it, whether the new end lies in it or behind it."""
    world = World(num_blocks=8, block_size=8)
    stream = world.open_and_compute([0, 1, 1, 1, 1, 1])
    world.rollback(stream, 3)
    stream.tokens += end
    assert world.schedule(stream, len(end))
    world.run([stream])
    world.check()
    world.release(stream)

    held = b"".join(block.tokens for block in world.cache.pool.blocks)
    assert held == pack_tokens([0, 1, 1, *end])


def test_spare_blocks_are_asked_for_while_decoding_in_place() -> None:
    """A private block with room takes none itself; what others were promised still counts."""
    sequence = World(num_blocks=4, block_size=4).open_and_compute([0, 1]).sequence

    assert sequence.reserve(2, spare_blocks=3)
    assert not sequence.reserve(2, spare_blocks=4)
    with pytest.raises(InvalidRequest, match=r"^a write of 15 tokens takes 4 free blocks, 3 are"):
        sequence.write([0] * 15)


def test_a_copy_takes_one_block_and_what_follows_takes_its_own() -> None:
    """Room is asked for exactly: no more, or others are evicted for nothing."""
    world = World(num_blocks=8, block_size=4)
    parent = world.open_and_compute([0, 1, 0, 1, 0])
    child = world.fork(parent)

    needed = [child.sequence.num_blocks_needed(n) for n in (1, 3, 4, 7, 8)]
    assert needed == [1, 1, 2, 2, 3]


def test_a_tail_is_kept_beside_one_that_begins_alike() -> None:
    """Only what adds nothing to a published sibling is not published."""
    world = World(num_blocks=16, block_size=4)
    beginning = [0, 0, 0, 0]
    for end in ([1, 1], [1, 2], [1]):
        world.release(world.open_and_compute(beginning + end))
        world.check()

    for end in ([1, 1], [1, 2]):
        assert world.open(MODEL, [*beginning, *end, 0]).sequence.num_tokens == 6
    (first_block,) = world.cache.pool.index.values()
    assert len(published_children(first_block)) == 2


def test_any_text_is_a_salt() -> None:
    """What came through JSON with half a surrogate pair is a salt like any other."""
    salts = ["\ud800", "\ud801", "\udc00", "?"]
    encoded = {ModelIdentity(architecture="m", salt=salt).canonical for salt in salts}
    assert len(encoded) == 4
