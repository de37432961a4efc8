"""What mutants of the core could do unnoticed, until these tests; see docs/mutation.md."""

from array import array

import pytest
from cache_world import IDENTITIES, Stream, World
from fake_executor import FakeExecutor, next_token, serial_output

from prefixkv import PrefixCache, Sequence
from prefixkv.block import Block, common_beginning, published_children
from prefixkv.errors import InvalidRequest, RequestTooLarge, StaleSequence
from prefixkv.eviction import EvictionOrder
from prefixkv.hashing import pack_tokens, root_digest
from prefixkv.identity import ModelIdentity
from prefixkv.request import Request
from prefixkv.scheduler import ScheduledBranch

MODEL = IDENTITIES[0]


def compute(world: World, tokens: list[int]) -> Stream:
    """Open a stream and compute all its tokens."""
    stream = world.open(MODEL, tokens)
    assert world.schedule(stream, len(tokens) - stream.sequence.num_tokens)
    world.run([stream])
    world.check()
    return stream


def go_on(world: World, stream: Stream, token: int) -> None:
    """Compute one more token of a stream."""
    stream.tokens.append(token)
    assert world.schedule(stream, 1)
    world.run([stream])
    world.check()


def leader_and_twins(*prompts: list[int]) -> tuple[FakeExecutor, list[Request]]:
    """Requests of which the first computes 4 tokens a step, while the others wait for it."""
    executor = FakeExecutor(100, 4, max_num_batched_tokens=64, max_prefill_chunk=4)
    requests = [executor.add(prompt, 2) for prompt in prompts]
    executor.step()
    leader, *twins = (request.branches[0] for request in requests)
    assert [twin for _, twin in executor.scheduler.twins[leader]] == twins
    return executor, requests


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
        world.release(compute(world, prompt))
    before = world.cache.pool.version
    world.cache.reset()

    assert world.cache.pool.version > before > 1


def test_the_counters_count() -> None:
    """Every fork, copy and takeover once, however many there are."""
    world = World(num_blocks=32, block_size=4)
    parent = compute(world, [0, 1, 0])
    children = [world.fork(parent) for _ in range(3)]
    for child in children[:2]:
        go_on(world, child, 1)
    world.release(parent)
    for child in children:
        world.release(child)
    for first in (2, 3):
        world.release(compute(world, [first, 0]))
        world.release(compute(world, [first, 0, 0, 1]))

    stats = world.cache.stats
    assert stats.num_forks == 3
    assert stats.num_copies == 2
    assert stats.num_slots_copied == 6
    assert stats.num_takeovers == 2


def test_a_discard_with_nothing_scheduled_leaves_shared_blocks_alone() -> None:
    """Neither a published block that was matched in part, nor a private one that a fork shares."""
    world = World(num_blocks=8, block_size=4)
    kept = compute(world, [0, 1, 0, 1, 1, 1])
    world.release(kept)
    for length in (3, 5):  # ends inside the full block, inside the tail
        reader = world.open(MODEL, [*kept.tokens[:length], 2])
        assert reader.sequence.num_tokens == length
        reader.sequence.discard()
        world.check()
        world.release(reader)
    assert world.open(MODEL, [*kept.tokens, 0]).sequence.num_tokens == 6

    parent = compute(world, [2, 2, 2])
    child = world.fork(parent)
    world.rollback(child, 1)
    child.sequence.discard()
    world.check()


def test_a_discarded_step_leaves_nothing_for_the_tail() -> None:
    """What was scheduled and never computed is not published when the sequence ends."""
    world = World(num_blocks=8, block_size=4)
    stream = compute(world, [0, 1, 0, 1, 0])
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
        world.release(compute(world, prompt), cold=True)
    assert world.cache.pool.reserve(2)
    world.check()

    assert [world.open(MODEL, [t, t, 2]).sequence.num_tokens for t in (0, 1)] == [2, 2]


def test_evictions_are_counted_and_leave_no_trace() -> None:
    """A block begins its next life as warm as any other."""
    world = World(num_blocks=4, block_size=2)
    for evicted in (2, 4):
        world.release(compute(world, [0, 0, 1, 1]), cold=True)
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
    world.release(compute(world, tokens))
    for length, left in [(4, 4), (5, 4), (6, 4), (3, 0)]:
        sequence = world.open(MODEL, [*tokens[:length], 2]).sequence
        assert sequence.num_tokens == length
        assert sequence.drop_partial() == (left < length)
        assert sequence.num_tokens == left


def test_a_release_between_write_and_commit_discards_what_was_scheduled() -> None:
    """Whoever leaves in the middle of a step leaves a tail of computed tokens only."""
    world = World(num_blocks=8, block_size=4)
    stream = compute(world, [0, 1, 0, 1, 0])
    stream.tokens += [1, 1]
    assert world.schedule(stream, 2)
    world.release(stream)
    world.check()

    assert world.open(MODEL, [0, 1, 0, 1, 0, 1, 1, 0]).sequence.num_tokens == 5


def test_a_release_is_warm_unless_it_says_cold() -> None:
    """Sequences that end as usual are evicted in the order of their ends."""
    world = World(num_blocks=4, block_size=2)
    for prompt in ([0, 0, 0], [1, 1, 1]):
        stream = compute(world, prompt)
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
    parent = compute(world, [0, 1, 0, 1, 0, 1])
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
    stream = compute(world, [0, 1, 0, 1])
    world.rollback(stream, 2)
    reader = world.open(MODEL, [0, 1, 0, 0])
    world.schedule(reader, 1)
    world.run([reader])

    assert len(world.cache.pool.order) == 1
    assert all(block.priority == 0 for block in world.cache.pool.blocks)


def test_a_released_sequence_is_empty() -> None:
    """It keeps no block and no token, whoever still looks at it."""
    world = World(num_blocks=8, block_size=2)
    stream = compute(world, [0, 1, 0])
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
    stream = compute(world, [0, 1])
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
    stream = compute(world, [0, 1, 1, 1, 1, 1])
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
    sequence = compute(World(num_blocks=4, block_size=4), [0, 1]).sequence

    assert sequence.reserve(2, spare_blocks=3)
    assert not sequence.reserve(2, spare_blocks=4)
    with pytest.raises(InvalidRequest, match=r"^a write of 15 tokens takes 4 free blocks, 3 are"):
        sequence.write([0] * 15)


def test_a_copy_takes_one_block_and_what_follows_takes_its_own() -> None:
    """Room is asked for exactly: no more, or others are evicted for nothing."""
    world = World(num_blocks=8, block_size=4)
    parent = compute(world, [0, 1, 0, 1, 0])
    child = world.fork(parent)

    needed = [child.sequence.num_blocks_needed(n) for n in (1, 3, 4, 7, 8)]
    assert needed == [1, 1, 2, 2, 3]


def test_a_tail_is_kept_beside_one_that_begins_alike() -> None:
    """Only what adds nothing to a published sibling is not published."""
    world = World(num_blocks=16, block_size=4)
    beginning = [0, 0, 0, 0]
    for end in ([1, 1], [1, 2], [1]):
        world.release(compute(world, beginning + end))
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


# -- the scheduler ---------------------------------------------------------------------------------


def test_a_twin_that_ends_is_forgotten_and_the_others_go_on_waiting() -> None:
    """An abort takes one out of those that wait for a leader, whose order stays."""
    executor, (leader, first, second, third) = leader_and_twins(*[[0] * 20] * 4)
    executor.scheduler.finish(second)

    waiting = [twin.request for _, twin in executor.scheduler.twins[leader.branches[0]]]
    assert waiting == [first, third]
    assert executor.scheduler.num_waiting == 2
    executor.run()
    assert sorted(executor.finished) == ["0", "1", "3"]


def test_twins_of_a_leader_that_ends_go_back_into_the_queue() -> None:
    """Nobody is lost with the request that it waited for."""
    executor, (leader, *twins) = leader_and_twins(*[[0] * 20] * 3)
    executor.scheduler.finish(leader)

    assert not executor.scheduler.twins
    assert [branch.request for branch in executor.scheduler.waiting] == twins
    executor.run()
    assert executor.finished == {str(i): serial_output([0] * 20, 2) for i in (1, 2)}


def test_each_twin_waits_for_what_it_shares_and_no_longer() -> None:
    """Who shares two blocks is let go when they are computed; who shares all waits on."""
    executor, (leader, short, long) = leader_and_twins(
        [0] * 20, [0] * 8 + [1] * 4, [0] * 18 + [1] * 2
    )
    waits = executor.scheduler.twins
    first = leader.branches[0]
    assert [(n, b.request) for n, b in waits[first]] == [(8, short), (16, long)]
    executor.step()

    assert [(n, b.request) for n, b in waits[first]] == [(16, long)]
    assert [branch.request for branch in executor.scheduler.waiting] == [short]
    executor.run()
    assert short.usage.num_cached_tokens == 8
    assert long.usage.num_cached_tokens == 16


def test_a_preempted_request_does_not_wait_for_who_came_after_it() -> None:
    """It was admitted first, and computes again what the younger one computes as well."""
    executor = FakeExecutor(100, 4, max_num_batched_tokens=64, max_prefill_chunk=4)
    old = executor.add([0] * 20, 2)
    executor.step()
    executor.scheduler.preempt_all()
    executor.cache.reset()
    young = executor.add([0] * 20, 2)
    executor.scheduler.waiting.remove(young.branches[0])
    young.priority = -1  # it is admitted before the old one is admitted again
    executor.scheduler.waiting.add(young.branches[0])
    batch = executor.step()

    assert [item.branch.request for item in batch] == [young, old]
    assert not executor.scheduler.twins
    executor.run()


def test_every_preemption_is_counted_once() -> None:
    """For the request and for all."""
    executor = FakeExecutor(100, 4)
    requests = [executor.add([i, 0], 8) for i in range(2)]
    for times in (1, 2, 3):
        executor.step()
        executor.scheduler.preempt_all()
        assert [request.usage.num_preemptions for request in requests] == [times, times]
        assert executor.scheduler.num_preemptions == 2 * times


def test_of_equal_losses_the_youngest_gives_way() -> None:
    """Among those that would lose as much, who came last."""
    executor = FakeExecutor(6, 2)
    requests = [executor.add([i, 0, 0], 6) for i in range(3)]
    while not executor.scheduler.num_preemptions:
        executor.step()

    assert [request.usage.num_preemptions for request in requests] == [0, 0, 1]


def test_the_budget_is_used_up_to_its_last_token_and_no_further() -> None:
    """More requests decode than the budget has tokens: no share is empty, none is left over."""
    for budget in (1, 2):
        executor = FakeExecutor(100, 4, max_num_batched_tokens=budget)
        shares: list[list[int]] = []

        def note(batch: list[ScheduledBranch], shares: list[list[int]] = shares) -> None:
            shares.append([item.num_tokens for item in batch])

        executor.on_batch = note
        for i in range(3):
            executor.add([i], 3)
        executor.run()

        assert sum(map(sum, shares)) == 9
        assert all(sum(share) <= budget and 0 not in share for share in shares)
        assert len(shares) <= 9 if budget == 1 else len(shares) <= 7


def test_who_comes_after_a_preempted_request_is_still_scheduled() -> None:
    """One gives way to the first in the order; the step goes on behind it."""
    executor = FakeExecutor(10, 4)
    prompt = [0, 1, 1, 0] * 3
    oldest = executor.add(prompt, 8)
    executor.step()
    sharer = executor.add([*prompt, (next_token(prompt) + 1) % 3], 8)  # holds one block of its own
    youngest = executor.add([2] * 16, 8)
    while not executor.scheduler.num_preemptions:
        batch = executor.step()

    assert sharer.usage.num_preemptions == 1
    assert [item.branch.request for item in batch] == [oldest, youngest]


def test_the_last_two_tokens_of_a_prompt_are_no_decode() -> None:
    """One pending token is a decode, two are a prompt's rest and come later."""
    executor = FakeExecutor(100, 4, max_prefill_chunk=4)
    executor.add([0] * 6, 1)
    executor.add([1], 8)
    executor.step()
    batch = executor.step()

    assert [(item.branch.request.request_id, item.num_tokens) for item in batch] == [
        ("1", 1),
        ("0", 2),
    ]


def test_a_chunk_is_no_longer_than_the_budget() -> None:
    """The smaller one of the two limits holds."""
    executor = FakeExecutor(100, 4, max_num_batched_tokens=3, max_prefill_chunk=8)
    executor.add([0] * 10, 1)

    assert [[item.num_tokens for item in executor.step()] for _ in range(4)] == [[3], [3], [3], [1]]


def test_who_stands_behind_a_twin_is_admitted_in_the_same_step() -> None:
    """A twin costs nobody a step."""
    executor = FakeExecutor(100, 4, max_prefill_chunk=4)
    leader, twin, other = (executor.add([i] * 20, 1) for i in (0, 0, 1))
    batch = executor.step()

    assert [item.branch.request for item in batch] == [leader, other]
    assert executor.scheduler.twins == {leader.branches[0]: [(20, twin.branches[0])]}


def test_no_more_requests_run_than_are_allowed() -> None:
    """The limit is reached, and not passed."""
    executor = FakeExecutor(100, 4, max_num_seqs=2)
    requests = [executor.add([i], 2) for i in range(3)]
    executor.step()

    assert [branch.request for branch in executor.scheduler.running] == requests[:2]


def test_admissions_are_numbered_and_their_tokens_counted() -> None:
    """The totals of the prefix cache's hit rate are sums over all requests."""
    executor = FakeExecutor(100, 4)
    requests = []
    for size in (5, 6, 7):
        requests.append(executor.add([0] * size, 1))
        executor.run()

    assert [request.admission for request in requests] == [0, 1, 2]
    assert executor.scheduler.num_prompt_tokens == 5 + 6 + 7
    assert executor.scheduler.num_cached_tokens == 0 + 5 + 6


def test_one_token_more_than_the_pool_holds_is_refused() -> None:
    """All tokens but the last one drawn need a slot."""
    executor = FakeExecutor(8, 4)
    executor.add([0] * 30, 3)
    with pytest.raises(RequestTooLarge, match="need 9 blocks of 4 tokens, the pool has 8"):
        executor.add([0] * 31, 3)
    executor.run()


@pytest.mark.parametrize("salt", [None, "other"])
def test_a_leader_is_found_behind_requests_that_share_nothing(salt: str | None) -> None:
    """Neither another beginning nor another tenant in front of it hides it."""
    executor = FakeExecutor(100, 4, max_num_batched_tokens=64, max_prefill_chunk=4)
    executor.add([1] * 20, 1, ModelIdentity(architecture="fake", salt=salt))
    leader, twin = executor.add([0] * 20, 1), executor.add([0] * 20, 1)
    executor.step()

    assert executor.scheduler.twins == {leader.branches[0]: [(20, twin.branches[0])]}
