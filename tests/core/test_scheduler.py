"""Who runs, who waits, who gives way, and that everybody ends with the serial output."""

import pytest
from fake_executor import IDENTITY, FakeExecutor, next_token, serial_output
from hypothesis import given
from hypothesis import strategies as st

from prefixkv.config import EngineConfig
from prefixkv.errors import ConfigError, InvariantViolation, QueueFull, RequestTooLarge
from prefixkv.identity import ModelIdentity
from prefixkv.prefix_cache import PrefixCache
from prefixkv.request import Branch
from prefixkv.scheduler import Batch, ScheduledBranch

prompts = st.lists(st.integers(0, 1), min_size=1, max_size=14)


@given(
    data=st.data(),
    requests=st.lists(st.tuples(prompts, st.integers(1, 6), st.integers(0, 3)), max_size=8),
    block_size=st.integers(1, 4),
    spare=st.integers(0, 8),
    budget=st.integers(1, 20),
    chunk=st.sampled_from([None, 1, 3]),
    num_seqs=st.integers(1, 5),
    enabled=st.booleans(),
)
def test_every_request_ends_with_the_serial_output(
    data: st.DataObject,
    requests: list[tuple[list[int], int, int]],
    block_size: int,
    spare: int,
    budget: int,
    chunk: int | None,
    num_seqs: int,
    enabled: bool,
) -> None:
    """Whatever the pool, the budget and the order of arrival: all finish, and nobody notices."""
    largest = max((-(-(len(p) + n - 1) // block_size) for p, n, _ in requests), default=1)
    executor = FakeExecutor(
        largest + spare, block_size, enabled=enabled, max_num_seqs=num_seqs,
        max_num_batched_tokens=budget, max_prefill_chunk=chunk,
    )  # fmt: skip
    for prompt, num_tokens, delay in requests:
        executor.add(prompt, num_tokens)
        for _ in range(delay):
            executor.step()
        if data.draw(st.integers(0, 9)) == 0:
            executor.cache.reset()

    outputs = executor.run()

    expected = {str(i): serial_output(p, n) for i, (p, n, _) in enumerate(requests)}
    assert outputs == expected
    assert executor.cache.usage == 0


@given(requests=st.lists(prompts, min_size=1, max_size=6), data=st.data())
def test_requests_that_end_early_leave_nothing_behind(
    requests: list[list[int]], data: st.DataObject
) -> None:
    """Aborts at any point and failing steps free what was held; the others are not touched."""
    executor = FakeExecutor(8, 2, max_num_batched_tokens=5)
    running = [executor.add(prompt, 3) for prompt in requests]
    alive = {request.request_id: request.prompt.tolist() for request in running}
    while executor.scheduler.has_work:
        action = data.draw(st.sampled_from(["step", "step", "step", "fail", "abort"]))
        if action == "abort":
            request = data.draw(st.sampled_from(running))
            executor.scheduler.finish(request)
            alive.pop(request.request_id)
        else:
            for item in executor.step("forward" if action == "fail" else None):
                if action == "fail":
                    alive.pop(item.branch.request.request_id)
        running = [
            r for r in running if r.request_id in alive and r.request_id not in executor.finished
        ]

    assert executor.finished == {key: serial_output(prompt, 3) for key, prompt in alive.items()}
    assert executor.cache.usage == 0
    assert not executor.scheduler.twins


@pytest.mark.parametrize("prompt_size", [5, 8, 17, 37])
@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("budget", [3, 100])
def test_a_twin_waits_and_computes_the_rest_only(
    prompt_size: int, block_size: int, budget: int
) -> None:
    """Of two identical prompts at once, the second computes what no full block holds.

    That is P - (P - 1) // block_size * block_size; only one token where blocks end with the prompt,
    as the last block is then published full and matched but for its last slot.
    """
    executor = FakeExecutor(200, block_size, max_num_batched_tokens=budget)
    prompt = [i % 3 for i in range(prompt_size)]
    first, second = executor.add(prompt, 2), executor.add(prompt, 2)

    outputs = executor.run()

    computed = prompt_size - (prompt_size - 1) // block_size * block_size
    if prompt_size % block_size == 0:
        computed = 1
    assert first.usage.num_computed_tokens == prompt_size + 1
    assert second.usage.num_computed_tokens == computed + 1
    assert second.usage.num_cached_tokens == prompt_size - computed
    assert outputs["0"] == outputs["1"] == serial_output(prompt, 2)


def test_a_twin_holds_nothing_and_lets_others_pass() -> None:
    """While its leader computes, a twin has no sequence, and who came later is admitted."""
    executor = FakeExecutor(100, 4, max_num_batched_tokens=8)
    executor.add([0] * 20, 1)
    twin = executor.add([0] * 20, 1)
    executor.add([1] * 3, 1)
    executor.step()
    executor.step()

    assert twin.branches[0].sequence is None
    assert executor.scheduler.num_waiting == 2
    executor.scheduler.finish(executor.scheduler.running[0].request)  # the leader is cut off
    executor.run()
    assert executor.finished["1"] == serial_output([0] * 20, 1)
    assert twin.usage.num_cached_tokens == 16


def test_identities_do_not_wait_for_each_other() -> None:
    """The same prompt under another salt is no twin."""
    executor = FakeExecutor(100, 4)
    executor.add([0] * 20, 1)
    other = executor.add([0] * 20, 1, ModelIdentity(architecture="fake", salt="s"))
    batch = executor.step()

    assert [item.num_tokens for item in batch] == [20, 20]
    assert other.usage.num_cached_tokens == 0


def test_the_oldest_running_request_is_never_preempted() -> None:
    """However tight the pool, who was admitted first runs through."""
    executor = FakeExecutor(8, 2, max_num_batched_tokens=6)
    first = executor.add([0, 1, 0], 12)
    others = [executor.add([1, i % 2, i // 2 % 2, 1], 10) for i in range(5)]

    outputs = executor.run()

    assert first.usage.num_preemptions == 0
    assert sum(other.usage.num_preemptions for other in others) > 0
    assert outputs == {
        "0": serial_output([0, 1, 0], 12),
        **{str(i + 1): serial_output([1, i % 2, i // 2 % 2, 1], 10) for i in range(5)},
    }


def test_who_loses_least_gives_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request whose blocks others keep alive is preempted before one that would lose its own."""
    executor = FakeExecutor(11, 2, max_num_batched_tokens=64)
    preempted: list[Branch] = []
    stop = executor.scheduler._stop_running

    def note(branch: Branch, *, cold: bool = False) -> None:
        if branch.num_output_tokens < branch.request.max_tokens:
            preempted.append(branch)
        stop(branch, cold=cold)

    monkeypatch.setattr(executor.scheduler, "_stop_running", note)
    shared = [0, 1, 1, 0, 0, 1, 0, 0]
    executor.add(shared, 8)
    executor.step()
    sharer = executor.add(shared, 8)
    executor.add([1] * 5, 8)
    executor.run()

    assert preempted[0].request is sharer


def test_preempted_requests_keep_their_cached_tokens_count() -> None:
    """What a request finds of its own after a preemption is no cache hit."""
    executor = FakeExecutor(6, 2)
    requests = [executor.add([i % 2, i // 2, 1], 6) for i in range(3)]
    executor.run()

    assert executor.scheduler.num_preemptions > 0
    assert [request.usage.num_cached_tokens for request in requests] == [0, 0, 0]


def test_what_can_never_fit_is_refused_at_once() -> None:
    """The message has the arithmetic; the queue and the pool are as before."""
    executor = FakeExecutor(8, 4)
    with pytest.raises(RequestTooLarge, match="need 12 blocks of 4 tokens, the pool has 8"):
        executor.add([0] * 40, 9)

    assert executor.scheduler.num_waiting == 0
    executor.add([0] * 32, 1)
    executor.run()


def test_a_prompt_as_large_as_the_pool_is_served_again() -> None:
    """An exact resend finds no room for its copy, and falls back to whole blocks."""
    executor = FakeExecutor(8, 4)
    first = executor.add([0, 1] * 16, 1)
    executor.run()
    second = executor.add([0, 1] * 16, 1)
    executor.run()

    assert executor.finished[first.request_id] == executor.finished[second.request_id]
    assert second.usage.num_cached_tokens == 28


def test_an_exact_resend_computes_one_token() -> None:
    """A finished request's half-filled tail is found again, to the token."""
    executor = FakeExecutor(50, 4)
    prompt = [0, 1, 1, 0, 1, 0, 0]
    executor.add(prompt, 4)
    executor.run()
    second = executor.add(prompt, 1)
    executor.run()

    assert second.usage.num_computed_tokens == 1


def test_a_continued_chat_computes_the_new_tokens_only() -> None:
    """The next turn finds prompt and output of the last one, but for the token never computed."""
    executor = FakeExecutor(50, 4)
    prompt = [0, 1, 1, 0, 1, 0, 0]
    executor.add(prompt, 5)
    executor.run()
    history = prompt + executor.finished["0"]
    second = executor.add([*history, 1, 1], 1)
    executor.run()

    assert second.usage.num_cached_tokens == len(history) - 1
    assert executor.cache.stats.num_copies == 0  # the tail is taken over where it lies


def test_a_waiting_head_is_matched_again_only_when_the_cache_changed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A head without room costs nothing in steps in which no block was published or freed."""
    matches = 0
    match = PrefixCache.match

    def counting(*args: object) -> object:
        nonlocal matches
        matches += 1
        return match(*args)  # type: ignore[arg-type] # passed through

    monkeypatch.setattr(PrefixCache, "match", counting)
    executor = FakeExecutor(10, 64)
    executor.add([0] * 10, 40)
    executor.add([1] * 600, 1)
    executor.step()
    before = matches
    for _ in range(30):
        executor.step()

    assert matches == before


def test_a_full_queue_refuses_and_says_so() -> None:
    """More waiting requests than allowed is 'later', with the numbers."""
    executor = FakeExecutor(10, 4, max_num_waiting=2)
    executor.add([0], 1)
    executor.add([0], 1)
    with pytest.raises(QueueFull, match="2 requests are waiting, the limit is 2"):
        executor.add([0], 1)


def test_lower_priority_numbers_go_first() -> None:
    """Waiting is by priority, then by arrival."""
    executor = FakeExecutor(100, 4, max_num_seqs=1)
    late = executor.add([0, 0], 1)
    early = executor.add([1, 1], 1)
    executor.scheduler.waiting.remove(early.branches[0])
    early.priority = -1
    executor.scheduler.waiting.add(early.branches[0])
    order: list[str] = []

    def note(batch: list[ScheduledBranch]) -> None:
        order.extend(item.branch.request.request_id for item in batch)

    executor.on_batch = note
    executor.run()

    assert order == [early.request_id, late.request_id]


def test_decodes_come_before_prompts_and_share_the_budget() -> None:
    """A long prompt never keeps others from their next token."""
    executor = FakeExecutor(100, 4, max_num_batched_tokens=6)
    executor.add([0, 1], 20)
    executor.step()
    executor.add([1] * 30, 1)
    batch = executor.step()
    assert [item.num_tokens for item in batch] == [1, 5]
    batch = executor.step()
    assert [item.num_tokens for item in batch] == [1, 5]


def test_a_disabled_cache_shares_nothing() -> None:
    """Without prefix caching every prompt is computed whole, twins included."""
    executor = FakeExecutor(100, 4, enabled=False)
    for _ in range(3):
        executor.add([0] * 20, 2)
    executor.run()

    assert executor.num_computed == 3 * 21
    assert IDENTITY.salt is None
    assert next_token([0] * 20) == executor.finished["0"][0]


def test_a_younger_decode_comes_before_an_older_prompt() -> None:
    """Decodes first, whoever was admitted first."""
    executor = FakeExecutor(100, 4, max_num_batched_tokens=8, max_prefill_chunk=4)
    executor.add([0] * 40, 1)
    executor.add([1], 20)
    executor.step()
    batch = executor.step()
    assert [item.num_tokens for item in batch] == [1, 4]
    assert [item.branch.request.request_id for item in batch] == ["1", "0"]


def test_prompts_in_chunks_are_not_admitted_against_the_same_blocks() -> None:
    """Room is promised to the rest of a prompt: nothing is computed twice for want of it."""
    executor = FakeExecutor(210, 4, max_num_batched_tokens=256, max_prefill_chunk=16)
    for i in range(8):
        executor.add([i % 3, i // 3] + [0] * 398, 4)
    executor.run()
    assert executor.scheduler.num_preemptions == 0
    assert executor.num_computed == 8 * 403 - executor.scheduler.num_cached_tokens


def test_nobody_is_admitted_in_a_step_with_a_preemption() -> None:
    """The room that a preemption makes is for those who run."""
    executor = FakeExecutor(8, 2, max_num_batched_tokens=64)
    for i in range(4):
        executor.add([i % 2, i // 2, 1], 8)
    seen = False
    while executor.scheduler.has_work:
        before = executor.scheduler.num_preemptions
        running = {branch.request for branch in executor.scheduler.running}
        batch = executor.step()
        if executor.scheduler.num_preemptions > before:
            seen = True
            assert {item.branch.request for item in batch} <= running
    assert seen


def test_a_budget_given_back_by_a_preemption_is_used_again() -> None:
    """A request that is taken out of a step does not count in it."""
    executor = FakeExecutor(30, 2)
    for i in range(3):
        executor.add([i, 1, 1], 4)
    executor.step()
    batch = Batch(budget=10, scored=10)
    first = executor.scheduler.running[0]
    first.sequence.reserve(1)
    batch.add(first, 1)
    assert batch.budget == 9
    batch.remove(first)
    batch.remove(first)
    assert batch.budget == 10
    first.sequence.discard()
    executor.run()


def test_who_is_preempted_after_it_was_scheduled_is_not_computed() -> None:
    """A young decode, scheduled first, gives way to an old prompt in the same step."""
    executor = FakeExecutor(8, 2, max_prefill_chunk=2)
    executor.add([0, 1, 1] * 4, 1)
    young = executor.add([2], 12)
    for _ in range(5):
        assert {item.branch.request for item in executor.step()} >= {young}

    batch = executor.step()

    assert young.usage.num_preemptions == 1
    assert [item.branch.request.request_id for item in batch] == ["0"]
    assert executor.run() == {"0": serial_output([0, 1, 1] * 4, 1), "1": serial_output([2], 12)}


def test_running_twins_and_all_go_back_into_the_queue_when_all_are_preempted() -> None:
    """Replaced weights preempt everybody; each still ends with the serial output."""
    executor = FakeExecutor(100, 4, max_num_batched_tokens=8)
    for _ in range(3):
        executor.add([0] * 20, 2)
    executor.step()
    assert executor.scheduler.num_waiting == 2
    executor.scheduler.preempt_all()
    executor.scheduler.check_invariants()
    assert executor.scheduler.num_waiting == 3
    assert not executor.scheduler.twins
    assert set(map(tuple, executor.run().values())) == {tuple(serial_output([0] * 20, 2))}


def test_a_waiting_twin_may_end_before_its_leader() -> None:
    """It is forgotten wherever it waits."""
    executor = FakeExecutor(100, 4, max_num_batched_tokens=8)
    executor.add([0] * 20, 2)
    twin, other = executor.add([0] * 20, 2), executor.add([0] * 20, 2)
    executor.step()
    executor.scheduler.finish(twin)
    assert executor.scheduler.num_waiting == 1
    executor.run()
    assert sorted(executor.finished) == ["0", other.request_id]


def test_books_of_scheduler_and_cache_that_disagree_are_named() -> None:
    """A sequence that no running request holds is a leak."""
    executor = FakeExecutor(100, 4)
    request = executor.add([0] * 5, 2)
    executor.step()
    executor.scheduler.running.remove(request.branches[0])
    with pytest.raises(InvariantViolation, match="0 are held, 0 are leased, 1 sequences live"):
        executor.scheduler.check_invariants()
    assert "Branch 0 of 0, 6 tokens" in repr(request.branches[0])
    assert "5 tokens, 1 live" in repr(request)


def test_options_are_checked_where_they_are_made() -> None:
    """Sizes that contradict each other, or are no sizes."""
    with pytest.raises(ConfigError, match="block_size is 12"):
        EngineConfig(block_size=12)
    with pytest.raises(ConfigError, match="both set the size of the pool"):
        EngineConfig(num_blocks=4, kv_cache_memory_bytes=1000)
    with pytest.raises(ConfigError, match="num_blocks is 0"):
        EngineConfig(num_blocks=0)
    with pytest.raises(ConfigError, match="max_prefill_chunk is 0"):
        EngineConfig(max_prefill_chunk=0).scheduler_config()
    with pytest.raises(ConfigError, match="max_num_seqs is True"):
        EngineConfig(max_num_seqs=True).scheduler_config()
