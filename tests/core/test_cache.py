"""What the cache promises, case by case: the stories behind the state machine."""

import doctest
from array import array

import pytest
from cache_world import IDENTITIES, World
from digests import DIGESTS
from hypothesis import given
from hypothesis import strategies as st

from prefixkv import PrefixCache, Sequence, prefix_cache
from prefixkv.block import (
    Block,
    add_child,
    common_beginning,
    has_child,
    longest_common_child,
    published_children,
    remove_child,
)
from prefixkv.errors import ConfigError, InvalidRequest, StaleSequence
from prefixkv.hashing import pack_tokens

MODEL = IDENTITIES[0]


def test_the_example_of_the_docstring_runs() -> None:
    """What people copy from the documentation works."""
    result = doctest.testmod(prefix_cache)
    assert result.attempted > 10
    assert result.failed == 0


def test_a_match_leaves_one_token_to_compute() -> None:
    """The logits of the last token are wanted, so it is never taken from the cache."""
    for length in range(1, 14):
        world = World(num_blocks=16, block_size=4)
        tokens = [i % 3 for i in range(length)]
        world.open_and_compute(tokens)
        world.release(world.streams[0])
        assert world.open(MODEL, tokens).sequence.num_tokens == length - 1


def test_the_same_blocks_after_another_beginning_do_not_match() -> None:
    """AB and CB share nothing: a block is found by its whole chain."""
    world = World(num_blocks=16, block_size=2)
    world.open_and_compute([1, 1, 0, 0])
    world.open_and_compute([2, 2, 0, 0])
    assert world.open(MODEL, [3, 3, 0, 0, 1]).sequence.num_tokens == 0
    assert len(world.cache.pool.index) == 4


def test_no_collision_exposes_anything() -> None:
    """With a constant digest answers stay right; the collisions are counted."""
    world = World(num_blocks=16, block_size=2, digest=DIGESTS["constant"])
    world.open_and_compute([1, 1, 0, 0, 1])
    world.open_and_compute([2, 2, 0, 0, 1])
    world.finish()
    assert world.cache.stats.num_collisions > 0


def test_a_fork_shares_and_the_first_write_copies() -> None:
    """Nothing is copied at the fork; the first to write moves, the last one stays in place."""
    world = World(num_blocks=16, block_size=4)
    world.open_and_compute([0, 1, 0, 1, 0, 1])
    parent = world.streams[0]
    child = world.fork(parent)
    assert parent.sequence.block_table() == child.sequence.block_table()
    for stream in (child, parent):
        stream.tokens.append(len(stream.tokens))
        world.schedule(stream, 1)
        world.run([stream])
        world.check()
    assert world.cache.stats.num_copies == 1
    assert world.cache.stats.num_slots_copied == 2
    assert parent.sequence.block_table() == array("i", [1, 2])
    assert child.sequence.block_table()[0] == 1


@pytest.mark.parametrize("parent_first", [False, True])
def test_forks_may_end_in_any_order(parent_first: bool) -> None:
    """Who is released first does not matter; each gives up only what it holds."""
    world = World(num_blocks=16, block_size=4)
    world.open_and_compute([0, 1, 0, 1, 0, 1])
    parent = world.streams[0]
    child = world.fork(parent)
    for stream in (parent, child) if parent_first else (child, parent):
        world.release(stream)
        world.check()
    world.finish()


def test_chained_copies_of_one_step_run_in_order() -> None:
    """A copy of a copy that has not run yet reads what the first one writes."""
    world = World(num_blocks=16, block_size=4)
    world.open_and_compute([0, 1, 0, 1, 0, 1])
    parent = world.streams[0]
    child = world.fork(parent)
    child.tokens.append(0)
    world.schedule(child, 1)
    child.sequence.discard()
    grandchild = world.fork(child)
    grandchild.tokens.append(1)
    world.schedule(grandchild, 1)
    first, second = world.cache.pending_copies
    assert first.target is second.source
    world.run([grandchild])
    world.check()


def test_a_tail_is_taken_over_where_it_lies_only_by_its_exact_continuation() -> None:
    """Who goes on after all its tokens writes in place; who needs less of it copies."""
    for cut, copies in [(7, 0), (6, 1)]:
        world = World(num_blocks=16, block_size=4)
        world.open_and_compute([0, 1, 0, 1, 0, 1, 0])
        world.release(world.streams[0])
        tokens = [*[0, 1, 0, 1, 0, 1, 0][:cut], 2, 2]
        stream = world.open(MODEL, tokens)
        assert stream.sequence.num_tokens == cut
        world.schedule(stream, 2)
        assert world.cache.stats.num_copies == copies
        assert world.cache.stats.num_takeovers == 1 - copies
        world.run([stream])
        world.check()


def test_two_continuations_of_one_tail_both_find_it() -> None:
    """A tail that two hold is nobody's to write on: both copy, and it stays findable."""
    world = World(num_blocks=16, block_size=4)
    world.open_and_compute([0, 1, 0, 1, 0, 1])
    world.release(world.streams[0])
    streams = [world.open(MODEL, [0, 1, 0, 1, 0, 1, last, 0]) for last in (0, 1)]
    assert [stream.sequence.num_tokens for stream in streams] == [6, 6]
    for stream in streams:
        world.schedule(stream, 2)
    world.run(streams)
    world.check()
    assert world.cache.stats.num_takeovers == 0
    assert world.cache.stats.num_copies == 2
    assert world.open(MODEL, [0, 1, 0, 1, 0, 1, 2]).sequence.num_tokens == 6


def test_identical_content_is_published_once() -> None:
    """Two that compute the same at once end up on the same blocks, in either order of ending."""
    world = World(num_blocks=16, block_size=2)
    streams = [world.open(MODEL, [0, 1, 1, 0, 1]) for _ in range(2)]
    for stream in streams:
        world.schedule(stream, 5)
    assert len(world.cache.pool.free) == 10
    world.run(streams)
    world.check()
    assert world.cache.stats.num_deduplicated == 2
    assert len(world.cache.pool.free) == 12
    tables = [stream.sequence.block_table().tolist() for stream in streams]
    assert tables[0][:2] == tables[1][:2]
    assert tables[0][2] != tables[1][2]
    world.finish()


def test_pinned_blocks_survive_pressure() -> None:
    """What a sequence has matched is not evicted to make room for it."""
    world = World(num_blocks=6, block_size=2)
    world.open_and_compute([0, 1, 0, 1, 0, 1, 0, 1])
    world.release(world.streams[0])
    stream = world.open(MODEL, [0, 1, 0, 1, 2, 2, 2, 2, 2, 2])
    assert world.schedule(stream, 6)
    world.run([stream])
    world.check()
    assert stream.sequence.num_tokens == 10


@pytest.mark.parametrize(("length", "fits"), [(8, True), (9, False)])
def test_room_is_counted_without_the_hits(length: int, fits: bool) -> None:
    """Of 6 blocks, 2 are hits: 4 more can be had and not 5; a refusal changes nothing."""
    world = World(num_blocks=6, block_size=2)
    world.open_and_compute([0, 1, 0, 1, 0, 1, 0, 1])
    world.release(world.streams[0])
    stream = world.open(MODEL, [0, 1, 0, 1, *[2] * length])
    assert stream.sequence.num_tokens == 4
    assert world.schedule(stream, length) == fits
    world.check()


def test_the_least_recently_used_chain_goes_first_from_its_end() -> None:
    """Eviction takes leaves before what they follow, the oldest chain first."""
    world = World(num_blocks=6, block_size=2)
    for start in (0, 1):
        world.open_and_compute([start, 0, 0, 0, 0, 0])
        world.release(world.streams[0])
    pool = world.cache.pool
    assert pool.reserve(2)
    world.check()
    assert world.open(MODEL, [0, 0, 0, 0, 0, 0, 1]).sequence.num_tokens == 2
    assert world.open(MODEL, [1, 0, 0, 0, 0, 0, 1]).sequence.num_tokens == 6


def test_a_parent_inherits_the_newer_use() -> None:
    """A hot leaf that is evicted leaves its parent hot: an older chain goes before it."""
    world = World(num_blocks=5, block_size=2)
    world.open_and_compute([0, 0, 0, 0])
    world.open_and_compute([1, 1])
    for stream in list(reversed(world.streams)):
        world.release(stream)
    leaf = world.streams
    assert not leaf
    order = [block.tokens for block in world.cache.pool.order]
    assert order[0] == pack_tokens([1, 1])
    assert world.cache.pool.reserve(4)
    world.check()
    assert [b.tokens for b in world.cache.pool.index.values()] == [pack_tokens([0, 0])]


def test_a_use_counts_even_while_a_follower_holds_the_block() -> None:
    """A block that is matched again and again outlives its stale follower and older chains."""
    world = World(num_blocks=6, block_size=2)
    world.open_and_compute([0, 0, 1, 1])
    world.release(world.streams[0])
    world.open_and_compute([1, 0])
    world.release(world.streams[0])
    world.release(world.open(MODEL, [0, 0, 0]))  # uses the first block only
    assert world.cache.pool.reserve(5)
    world.check()
    assert [b.tokens for b in world.cache.pool.index.values()] == [pack_tokens([0, 0])]


def test_a_cold_leaf_leaves_its_parent_warm() -> None:
    """The branch lost, but its prefix was in use until then: older chains go before it."""
    world = World(num_blocks=4, block_size=2)
    world.open_and_compute([0, 0, 1, 1])
    world.open_and_compute([1, 0])
    world.release(world.streams[1])
    world.release(world.streams[0], cold=True)
    assert world.cache.pool.reserve(2)  # the cold leaf
    world.check()
    assert world.cache.pool.reserve(3)
    world.check()
    assert [b.tokens for b in world.cache.pool.index.values()] == [pack_tokens([0, 0])]


def test_cold_blocks_are_evicted_first() -> None:
    """What a losing branch leaves goes before everything else, however recent."""
    world = World(num_blocks=6, block_size=2)
    world.open_and_compute([0, 0])
    world.open_and_compute([1, 1])
    world.release(world.streams[0])
    world.release(world.streams[0], cold=True)
    assert [b.tokens for b in world.cache.pool.order] == [pack_tokens([1, 1]), pack_tokens([0, 0])]
    again = world.open(MODEL, [1, 1, 1])
    world.release(again)
    assert [b.tokens for b in world.cache.pool.order] == [pack_tokens([0, 0]), pack_tokens([1, 1])]


def test_a_reset_forgets_everything_but_disturbs_nobody() -> None:
    """Running sequences go on; nothing old is found; nothing of them is published."""
    world = World(num_blocks=16, block_size=2)
    world.open_and_compute([0, 1, 0, 1, 0])
    stream = world.streams[0]
    world.cache.reset()
    world.check()
    stream.tokens += [1, 1, 1]
    world.schedule(stream, 3)
    world.run([stream])
    world.check()
    assert world.open(MODEL, stream.tokens).sequence.num_tokens == 0
    world.release(stream)
    world.check()
    assert not world.cache.pool.index


def test_replaced_weights_make_old_sequences_unusable() -> None:
    """No chain holds KV of two epochs: writing on an old one is refused, releasing it is not."""
    world = World(num_blocks=16, block_size=2)
    old = world.open_and_compute([0, 1, 0, 1, 0]).sequence
    world.cache.weights_changed()
    for use in (
        lambda: old.reserve(1),
        lambda: old.write([1]),
        lambda: old.fork(),
        lambda: old.rollback(2),
    ):
        with pytest.raises(StaleSequence, match="weights of epoch 0, now is epoch 1"):
            use()
    world.check()
    world.release(world.streams[0])
    assert world.open(MODEL, [0, 1, 0, 1, 0]).sequence.num_tokens == 0


def test_a_released_sequence_cannot_be_used() -> None:
    """A second release does nothing; everything else says that it was released."""
    world = World(num_blocks=16, block_size=2)
    sequence = world.open_and_compute([0, 1, 0]).sequence
    world.release(world.streams[0])
    sequence.release()
    assert sequence.is_released
    with pytest.raises(StaleSequence, match="was released"):
        sequence.reserve(1)
    world.check()


def test_misuse_between_write_and_commit_is_refused() -> None:
    """Fork and rollback wait for the commit; a write needs its room; nothing changes on refusal."""
    cache = PrefixCache(num_blocks=4, block_size=2)
    sequence = Sequence.open(cache, MODEL, [0, 1, 1, 1])
    with pytest.raises(InvalidRequest, match="takes 4 free blocks, 3 are free: reserve first"):
        sequence.write([0] * 8)
    sequence.reserve(2)
    sequence.write([0, 1])
    for use in (sequence.fork, lambda: sequence.rollback(1)):
        with pytest.raises(InvalidRequest, match="2 tokens are scheduled"):
            use()
    sequence.commit()
    with pytest.raises(InvalidRequest, match="rollback to 3 of 2 tokens"):
        sequence.rollback(3)
    assert "computed=2" in repr(sequence)
    sequence.release()
    cache.check_invariants()


def test_options_out_of_range_are_refused() -> None:
    """A pool needs a block besides the reserved one; ids must be 31-bit integers."""
    with pytest.raises(ConfigError, match="num_blocks"):
        PrefixCache(num_blocks=1, block_size=4)
    with pytest.raises(ConfigError, match="block_size"):
        PrefixCache(num_blocks=8, block_size=0)
    cache = PrefixCache(num_blocks=8, block_size=4)
    with pytest.raises(InvalidRequest, match="token ids"):
        Sequence.open(cache, MODEL, [2**40])
    with pytest.raises(InvalidRequest, match="token ids"):
        Sequence.open(cache, MODEL, [3, -1])
    with pytest.raises(InvalidRequest, match="token ids"):
        Sequence.open(cache, MODEL, ["a"])  # type: ignore[list-item]


def test_without_partial_matching_only_whole_blocks_are_found() -> None:
    """The options that make the cache comparable with others do what they say."""
    cache = PrefixCache(num_blocks=8, block_size=4, match_partial=False, keep_tails=False)
    for expected in (0, 4):
        sequence = Sequence.open(cache, MODEL, [0, 1, 2, 3, 4, 5])
        assert sequence.num_tokens == expected
        tokens = [0, 1, 2, 3, 4, 5][expected:]
        assert sequence.reserve(len(tokens))
        sequence.write(tokens)
        sequence.commit()
        sequence.release()
    assert len(cache.pool.free) == 6
    cache.check_invariants()


def test_a_disabled_cache_finds_nothing() -> None:
    """Everything works, but nothing is shared."""
    cache = PrefixCache(num_blocks=8, block_size=2, enabled=False)
    for _ in range(2):
        sequence = Sequence.open(cache, MODEL, [0, 1, 2])
        assert sequence.num_tokens == 0
        assert sequence.reserve(3)
        sequence.write([0, 1, 2])
        sequence.commit()
        sequence.release()
        cache.check_invariants()
    assert len(cache.pool.free) == 7


def test_usage_counts_what_cannot_be_had() -> None:
    """Idle blocks are room, blocks in use are not."""
    world = World(num_blocks=8, block_size=2)
    world.open_and_compute([0, 1, 0, 1])
    assert world.cache.usage == 2 / 8
    world.release(world.streams[0])
    assert world.cache.usage == 0


def test_roots_do_not_pile_up() -> None:
    """A tenant that is gone leaves nothing behind, not even its root."""
    world = World(num_blocks=4, block_size=2)
    for _ in range(3):
        for identity in IDENTITIES:
            world.release(world.open(identity, [0, 1]))
    assert not world.cache.pool.roots


token_lists = st.lists(st.integers(0, 2), max_size=5)


@given(st.lists(token_lists.filter(bool), unique_by=tuple, max_size=30), token_lists, st.data())
def test_the_longest_common_child_is_found_among_any_number(
    stored: list[list[int]], wanted: list[int], data: st.DataObject
) -> None:
    """One child inline, few in a dict, many sorted: the same answer as looking at each."""
    parent = Block(1)
    children = []
    for i, tokens in enumerate(stored):
        child = Block(i + 2)
        child.tokens = pack_tokens(tokens)
        children.append(child)
        add_child(parent, child)
    gone = data.draw(st.lists(st.sampled_from(children), unique_by=id) if children else st.just([]))
    for child in gone:
        remove_child(parent, child)
        children.remove(child)

    best, shared = longest_common_child(parent, pack_tokens(wanted))

    lengths = [common_beginning(c.tokens, pack_tokens(wanted)) for c in children]
    assert shared == max(lengths, default=0)
    assert (best is None) == (shared == 0)
    assert set(published_children(parent)) == set(children)
    assert all(has_child(parent, child) for child in children)
    assert not any(has_child(parent, child) for child in gone)


@given(token_lists, token_lists)
def test_common_beginnings_end_on_whole_tokens(a: list[int], b: list[int]) -> None:
    """Two ids that share some bytes are two different tokens."""
    expected = 0
    while expected < min(len(a), len(b)) and a[expected] == b[expected]:
        expected += 1
    assert common_beginning(pack_tokens(a), pack_tokens(b)) == 4 * expected
    assert common_beginning(pack_tokens([257]), pack_tokens([1])) == 0


def test_a_refused_open_leaves_no_root() -> None:
    """Wrong tokens are refused before anything is made."""
    cache = PrefixCache(num_blocks=8, block_size=4)
    for wrong in ([2**40], b"12345"):
        with pytest.raises(InvalidRequest):
            Sequence.open(cache, MODEL, wrong)
    cache.check_invariants()
    sequence = Sequence.open(cache, MODEL, [1, 2])
    sequence.reserve(2)
    with pytest.raises(InvalidRequest, match="6 bytes are not packed tokens"):
        sequence.write(b"123456")
    sequence.release()
    cache.check_invariants()


def test_a_warm_use_takes_the_cold_away() -> None:
    """What a losing branch left, and somebody used again, is evicted in its turn."""
    world = World(num_blocks=8, block_size=2)
    world.open_and_compute([0, 0])
    world.release(world.streams[0], cold=True)
    world.open_and_compute([0, 0, 1, 1])  # follows the cold block, and keeps it from being idle
    world.release(world.open(MODEL, [0, 0, 2]))
    world.release(world.streams[0])
    assert all(block.priority == 0 for block in world.cache.pool.blocks)


def test_the_version_moves_whenever_room_may_have_grown() -> None:
    """Also when a reference goes away that was not the last one."""
    world = World(num_blocks=8, block_size=2)
    world.open_and_compute([0, 0, 1, 1])
    holder = world.open(MODEL, [0, 0, 2])  # ends at the first block
    world.release(world.streams[0])
    before = world.cache.pool.version, world.cache.pool.num_reclaimable()
    world.release(holder)
    after = world.cache.pool.version, world.cache.pool.num_reclaimable()
    assert after[1] > before[1]
    assert after[0] > before[0]


def test_replaced_weights_get_another_root() -> None:
    """The epoch is part of what a root's digest covers."""
    cache = PrefixCache(num_blocks=8, block_size=2)
    first = cache.root(MODEL)
    cache.pool.roots.clear()
    cache.weights_changed()
    assert cache.root(MODEL).digest != first.digest
    assert cache.root(MODEL).epoch == 1


def test_spare_blocks_are_asked_for_even_if_the_write_itself_takes_none() -> None:
    """A tail that is written on in place needs no block; what others were promised still counts."""
    world = World(num_blocks=4, block_size=4)
    world.open_and_compute([0, 1, 0, 1, 0])
    world.release(world.streams[0])
    sequence = world.open(MODEL, [0, 1, 0, 1, 0, 1]).sequence
    assert sequence.num_blocks_needed(1) == 0
    assert sequence.reserve(1, spare_blocks=2)
    assert not sequence.reserve(1, spare_blocks=3)
    assert sequence.reserve(1)
