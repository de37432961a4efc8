"""Branches that are held: forked without a copy, gone on from at the cost of what is new, and never
in the way of those who run."""

import random
from functools import cache
from typing import Any

import pytest
from engine_runs import assert_idle, greedy, interrupt, outputs_of, poison, steps
from tiny_models import reference_output, tiny_engine, tiny_model

from prefixkv.engine import Engine
from prefixkv.errors import InvalidRequest
from prefixkv.held_branch import HeldBranch
from prefixkv.request import Request
from prefixkv.sampling_params import SamplingParams

PROMPT = [5, 6, 7, 8, 9, 10, 11, 12, 13, 14]  # 2 blocks of 4, and 2 tokens
T = 5


@cache
def model() -> Any:
    return tiny_model()


def expected(tokens: list[int], num_tokens: int = T) -> list[int]:
    return reference_output(model(), tokens, num_tokens)


def run(engine: Engine, *requests: Request) -> list[list[int]]:
    """Run to the end; the tokens of each request's first output."""
    found: dict[str, list[int]] = {request.request_id: [] for request in requests}
    for delta in steps(engine):
        assert delta.error is None
        if delta.request_id in found and delta.index == 0:
            found[delta.request_id] += delta.token_ids
    return list(found.values())


def finished(engine: Engine, prompt: list[int] = PROMPT) -> HeldBranch:
    """A request's branch, held after its end."""
    request = engine.add(prompt, greedy(T), keep=True)
    (tokens,) = run(engine, request)
    held = request.held[0]
    assert held.tokens.tolist() == prompt + tokens == prompt + expected(prompt)
    assert held.num_computed_tokens == len(prompt) + T - 1  # the last was only drawn
    return held


def test_going_on_costs_what_is_new_and_the_token_that_was_only_drawn() -> None:
    engine = tiny_engine(model())
    held = finished(engine)
    past = held.tokens.tolist()
    request = engine.add([40, 41], greedy(T), after=held)
    assert run(engine, request) == [expected([*past, 40, 41])]
    assert request.usage.num_prompt_tokens == len(past) + 2
    assert request.usage.num_cached_tokens == len(past) - 1
    assert request.usage.num_computed_tokens == 1 + 2 + T - 1
    held.release()
    assert_idle(engine)


def test_forks_share_every_block_and_diverge_with_a_copy_each() -> None:
    engine = tiny_engine(model())
    held = finished(engine)
    used = engine.cache.pool.num_usable - len(engine.cache.pool.free)
    forks = [engine.fork(held) for _ in range(3)]
    assert engine.cache.pool.num_usable - len(engine.cache.pool.free) == used
    past = held.tokens.tolist()
    requests = [engine.add([50 + i], greedy(T), after=fork) for i, fork in enumerate(forks)]
    assert run(engine, *requests) == [expected([*past, 50 + i]) for i in range(3)]
    assert sum(request.usage.num_copies for request in requests) == 3
    for fork in (held, *forks):
        fork.release()
    assert_idle(engine)


def test_nothing_new_draws_another_answer_from_the_same_past() -> None:
    engine = tiny_engine(model())
    held = finished(engine)
    request = engine.add([], greedy(T), after=held)
    assert run(engine, request) == [expected(held.tokens.tolist())]
    assert request.usage.num_computed_tokens == 1 + T - 1


@pytest.mark.parametrize("length", [1, 4, 7, 8, 9, 12, 14, 15])
def test_rollback_goes_on_from_an_earlier_point(length: int) -> None:
    engine = tiny_engine(model())
    held = finished(engine)
    other = engine.fork(held)
    past = held.tokens.tolist()
    held.rollback(length)
    assert held.tokens.tolist() == past[:length]
    request = engine.add([60, 61], greedy(T), after=held)
    rest = engine.add([60], greedy(T), after=other)
    assert run(engine, request, rest) == [expected([*past[:length], 60, 61]), expected([*past, 60])]
    assert request.usage.num_cached_tokens == min(length, len(past) - 1)
    held.release()
    other.release()
    assert_idle(engine)


def test_a_running_request_is_forked_and_goes_on() -> None:
    engine = tiny_engine(model())
    request = engine.add(PROMPT, greedy(T))
    engine.step()
    engine.step()
    held = engine.fork(request)
    assert held.num_computed_tokens == len(held.tokens) - 1 == len(PROMPT) + 1
    other = engine.add([70], greedy(T), after=held)
    past = held.tokens.tolist()
    rest, tokens = run(engine, request, other)
    assert past[len(PROMPT) :] + rest == expected(PROMPT)
    assert tokens == expected([*past, 70])


def test_a_request_that_waits_is_forked_with_nothing_computed() -> None:
    engine = tiny_engine(model())
    held = engine.fork(engine.add(PROMPT, greedy(T)))
    assert held.tokens.tolist() == PROMPT
    assert held.num_computed_tokens == 0
    outputs_of(engine)
    request = engine.add([], greedy(T), after=held)
    assert run(engine, request) == [expected(PROMPT)]


def test_each_sample_is_kept_by_its_index() -> None:
    engine = tiny_engine(model())
    params = SamplingParams(n=3, temperature=1.0, seed=3, max_tokens=T, ignore_eos=True)
    request = engine.add(PROMPT, params, keep=True)
    found: dict[int, list[int]] = {0: [], 1: [], 2: []}
    for delta in steps(engine):
        found[delta.index] += delta.token_ids
    kept = {index: held.tokens.tolist()[len(PROMPT) :] for index, held in request.held.items()}
    assert kept == found
    forked = engine.fork(request, 2)
    assert forked.tokens.tolist() == PROMPT + found[2]
    for held in (*request.held.values(), forked):
        held.release()
    assert_idle(engine)


def test_who_holds_gives_way_to_who_runs_the_oldest_use_first() -> None:
    """A pool of 8 blocks, two held branches of 4 each, and a request that needs 5."""
    engine = tiny_engine(model(), num_blocks=9)
    first = finished(engine)
    second = finished(engine, PROMPT[::-1])
    assert len(engine.scheduler.held) == 2
    request = engine.add([90] * 16, greedy(T))
    assert run(engine, request) == [expected([90] * 16)]
    assert first.num_computed_tokens == 0
    assert second.num_computed_tokens == len(PROMPT) + T - 1
    past = first.tokens.tolist()
    again = engine.add([91], greedy(T), after=first)  # computed anew, and right
    assert run(engine, again) == [expected([*past, 91])]


def test_decoding_takes_the_room_of_what_is_held_before_it_preempts() -> None:
    engine = tiny_engine(model(), num_blocks=9)
    finished(engine)
    requests = [engine.add([80 + i] * 6, greedy(10)) for i in range(2)]
    assert run(engine, *requests) == [expected([80 + i] * 6, 10) for i in range(2)]
    assert [request.usage.num_preemptions for request in requests] == [0, 0]
    assert len(engine.scheduler.held) == 0


def test_a_reset_and_new_weights_give_all_up() -> None:
    engine = tiny_engine(model())
    held = finished(engine)
    engine.reset_prefix_cache()
    assert held.num_computed_tokens == 0
    assert_idle(engine)
    again = finished(engine)
    engine.weights_changed()
    assert again.num_computed_tokens == 0
    request = engine.add([], greedy(T), after=again)
    assert run(engine, request) == [expected(again.tokens.tolist())]


def test_a_salt_goes_with_the_branch() -> None:
    engine = tiny_engine(model())
    request = engine.add(PROMPT, greedy(T), keep=True, cache_salt="a")
    run(engine, request)
    held = request.held[0]
    other = engine.add([40], greedy(T), after=held)
    assert other.identity == request.identity
    with pytest.raises(InvalidRequest, match="cache_salt differs"):
        engine.add([40], greedy(T), after=held, cache_salt="b")
    engine.abort(other.request_id)
    held.release()
    stranger = engine.add(held.tokens, greedy(T))
    run(engine, stranger)
    assert stranger.usage.num_cached_tokens == 0


def test_what_is_refused() -> None:
    engine = tiny_engine(model())
    held = finished(engine)
    request = engine.add(PROMPT, greedy(T))
    with pytest.raises(InvalidRequest, match="rollback to 16 of 15 tokens"):
        held.rollback(16)
    with pytest.raises(InvalidRequest, match="rollback to 0 of 15 tokens"):
        held.rollback(0)
    with pytest.raises(InvalidRequest, match="neither runs nor keeps branch 1"):
        engine.fork(request, 1)
    outputs_of_request = run(engine, request)
    assert outputs_of_request == [expected(PROMPT)]
    with pytest.raises(InvalidRequest, match="neither runs nor keeps branch 0"):
        engine.fork(request)
    held.release()
    held.release()
    for refused in (held.fork, lambda: held.rollback(3), lambda: engine.add([1], after=held,
                    params=greedy(1))):  # fmt: skip
        with pytest.raises(InvalidRequest, match="the branch of 15 tokens was released"):
            refused()
    beams = SamplingParams(n=2, use_beam_search=True, max_tokens=3)
    with pytest.raises(InvalidRequest, match="keep cannot be combined"):
        engine.add(PROMPT, beams, keep=True)
    search = engine.add(PROMPT, beams)
    with pytest.raises(InvalidRequest, match="beams cannot be forked"):
        engine.fork(search)
    engine.abort(search.request_id)
    assert_idle(engine)


def test_an_aborted_request_keeps_nothing() -> None:
    engine = tiny_engine(model())
    request = engine.add(PROMPT, greedy(T), keep=True)
    engine.step()
    engine.abort(request.request_id)
    assert request.held == {}
    assert_idle(engine)


@pytest.mark.parametrize("moment", range(14))
def test_interrupts_leave_the_books_right(moment: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from prefixkv.sequence import Sequence

    engine = tiny_engine(model())
    held = finished(engine)
    past = held.tokens.tolist()
    interrupt(
        monkeypatch, moment,
        (engine.model, "forward"), (engine.scheduler, "hold"), (engine.scheduler.held, "hold"),
        (Sequence, "fork"), (Sequence, "reserve"), (engine.scheduler, "finish_branch"),
    )  # fmt: skip
    request = engine.add([40], greedy(T), after=held, keep=True)
    assert run(engine, request) == [expected([*past, 40])]
    monkeypatch.undo()
    engine.check_invariants()
    assert request.held[0].tokens.tolist() == [*past, 40, *expected([*past, 40])]
    for branch in (held, *request.held.values()):
        branch.release()
    assert_idle(engine)


def test_giving_way_can_be_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was held is computed again, and the branch can still be forked."""
    from prefixkv.sequence import Sequence

    engine = tiny_engine(model(), num_blocks=9)
    held = finished(engine)
    past = held.tokens.tolist()
    sequence, release = held.sequence, Sequence.release

    def interrupted(self: Sequence, **options: bool) -> None:
        if self is sequence:
            monkeypatch.setattr(Sequence, "release", release)
            raise KeyboardInterrupt
        release(self, **options)

    monkeypatch.setattr(Sequence, "release", interrupted)
    big = engine.add([90] * 20, greedy(8))
    assert run(engine, big) == [expected([90] * 20, 8)]
    fork = engine.fork(held)
    assert fork.num_computed_tokens == 0
    assert run(engine, engine.add([91], greedy(T), after=fork)) == [expected([*past, 91])]


@pytest.mark.parametrize("seed", range(8))
def test_any_tree_of_branches_in_a_small_pool_goes_on_right(seed: int) -> None:
    """Fork, cut, go on and release in any order, while others take the room."""
    draw = random.Random(seed)
    engine = tiny_engine(model(), num_blocks=draw.choice([12, 30]), max_num_batched_tokens=24)
    branches: list[tuple[HeldBranch, list[int]]] = []
    for _ in range(14):
        action = draw.choice(["new", "fork", "cut", "go on", "go on", "release", "other"])
        held, past = draw.choice(branches) if branches else (None, [])
        if action == "new" or held is None:
            prompt = PROMPT[: draw.randint(1, 10)]
            request = engine.add(prompt, greedy(3), keep=True)
            (tokens,) = run(engine, request)
            assert tokens == expected(prompt, 3)
            branches.append((request.held[0], prompt + tokens))
        elif action == "fork":
            branches.append((engine.fork(held), past[:]))
        elif action == "cut":
            length = draw.randint(1, len(past))
            held.rollback(length)
            del past[length:]
        elif action == "go on" and len(past) < 30:
            new = [draw.randrange(3, 60) for _ in range(draw.randint(0, 3))]
            request = engine.add(new, greedy(2), after=held, keep=True)
            (tokens,) = run(engine, request)
            assert tokens == expected(past + new, 2)
            branches.append((request.held[0], past + new + tokens))
        elif action == "release":
            held.release()
            branches = [pair for pair in branches if pair[0] is not held]
        else:
            prompt = [draw.randrange(60, 120) for _ in range(20)]
            assert run(engine, engine.add(prompt, greedy(3))) == [expected(prompt, 3)]
        for branch, tokens in branches:
            assert branch.tokens.tolist() == tokens
        poison(engine, float("nan"))
        engine.check_invariants()
    for branch, _ in branches:
        branch.release()
    assert_idle(engine)
