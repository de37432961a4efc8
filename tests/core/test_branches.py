"""Samples of one request as the scheduler sees them: forked once, then each for itself."""

import pytest
from fake_executor import FakeExecutor, serial_output

from prefixkv.prefix_cache import PrefixCache

PROMPT = [0, 1, 2, 0, 1]


def expected(n: int, num_tokens: int) -> dict[tuple[str, int], list[int]]:
    """What each branch of the first request gives alone."""
    return {("0", i): serial_output(PROMPT, num_tokens, i) for i in range(n)}


@pytest.mark.parametrize("n", [1, 2, 7])
def test_samples_cost_one_prompt_and_their_own_tokens(n: int) -> None:
    """P + n(T - 1) tokens, a fork each, a copy each; what siblings share is no hit."""
    executor = FakeExecutor(60, 4)
    request = executor.add(PROMPT, 6, n=n)
    executor.step()
    assert executor.cache.pool.num_usable - len(executor.cache.pool.free) == 2
    executor.run()

    assert executor.siblings == expected(n, 6)
    assert executor.num_computed == request.usage.num_computed_tokens == len(PROMPT) + n * 5
    assert request.usage.num_forks == n - 1
    assert request.usage.num_copies == (n if n > 1 else 0)
    assert request.usage.num_cached_tokens == executor.scheduler.num_cached_tokens == 0


@pytest.mark.parametrize(("num_seqs", "num_blocks"), [(2, 60), (8, 5)])
def test_more_samples_than_places_or_room_run_in_turns(num_seqs: int, num_blocks: int) -> None:
    """Who has no place waits and holds nothing."""
    executor = FakeExecutor(num_blocks, 4, max_num_seqs=num_seqs)
    executor.add(PROMPT, 6, n=7)
    while executor.scheduler.has_work:
        executor.step()
        assert len(executor.scheduler.running) <= num_seqs

    assert executor.siblings == expected(7, 6)
    assert executor.cache.usage == 0


@pytest.mark.parametrize("index", [0, 1, 3])
@pytest.mark.parametrize("cold", [False, True])
def test_a_cancelled_branch_leaves_its_siblings_alone(index: int, cold: bool) -> None:
    """The one that computed the prompt before its forks, or the reverse."""
    executor = FakeExecutor(60, 4)
    request = executor.add(PROMPT, 6, n=4)
    executor.step()
    executor.step()
    executor.scheduler.finish_branch(request.branches[index], cold=cold)
    assert len(request.branches) == 3
    executor.run()

    wanted = expected(4, 6)
    del wanted["0", index]
    assert executor.siblings == wanted
    assert executor.cache.usage == 0


def test_what_an_interrupted_schedule_wrote_does_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A prompt in chunks goes on from what is computed; who was being admitted waits."""
    executor = FakeExecutor(12, 4, max_prefill_chunk=4)
    first = executor.add([0, 1, 2, 0] * 5, 3)
    executor.step()
    second = executor.add([2, 2, 1], 3)

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(PrefixCache, "match", interrupted)
        with pytest.raises(KeyboardInterrupt):
            executor.step()
    executor.scheduler.recover([*first.branches, *second.branches])
    executor.scheduler.check_invariants()
    assert [branch.request for branch in executor.scheduler.running] == [first]

    assert executor.run() == {
        "0": serial_output([0, 1, 2, 0] * 5, 3), "1": serial_output([2, 2, 1], 3),
    }  # fmt: skip


def test_what_an_interrupted_schedule_opened_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sequence that nobody holds yet is released."""
    executor = FakeExecutor(12, 4)
    request = executor.add([0, 1, 2, 0, 1], 3)

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(executor.scheduler, "_start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            executor.step()
    executor.scheduler.recover(request.branches)
    executor.scheduler.check_invariants()
    assert not executor.cache.sequences
    assert executor.run() == {"0": serial_output([0, 1, 2, 0, 1], 3)}
