"""What mutants of the scheduler could do unnoticed, until these tests; see docs/mutation.md."""

import pytest
from fake_executor import FakeExecutor, next_token, serial_output

from prefixkv.errors import RequestTooLarge
from prefixkv.identity import ModelIdentity
from prefixkv.request import Request
from prefixkv.scheduler import ScheduledBranch


def leader_and_twins(*prompts: list[int]) -> tuple[FakeExecutor, list[Request]]:
    """Requests of which the first computes 4 tokens a step, while the others wait for it."""
    executor = FakeExecutor(100, 4, max_num_batched_tokens=64, max_prefill_chunk=4)
    requests = [executor.add(prompt, 2) for prompt in prompts]
    executor.step()
    leader, *twins = (request.branches[0] for request in requests)
    assert [twin for _, twin in executor.scheduler.twins[leader]] == twins
    return executor, requests


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
