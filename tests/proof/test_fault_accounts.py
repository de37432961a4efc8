"""Failures, memory and accounts over many requests.

Kinds of faults that broke other systems; docs/faults.md lists them all.
"""

import gc
import logging
from collections import Counter
from typing import Any

import pytest
import torch
from cache_world import IDENTITIES
from engine_runs import assert_idle, greedy, run
from fake_executor import FakeExecutor, serial_output
from tiny_models import reference_output, tiny_engine, tiny_model

from prefixkv import Sequence
from prefixkv.engine import Engine
from prefixkv.outputs import Usage
from prefixkv.request import Request
from prefixkv.sampling_params import SamplingParams


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model()


@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_prompts_around_the_borders_of_blocks_cold_warm_warm_and_cold_again(kind: str) -> None:
    """The hits are there, the ids are equal, the logits nearly, and after a reset to the bit."""
    model = tiny_model(kind)
    engine = tiny_engine(model)
    for length in (3, 4, 5, 7, 8, 9, 16):
        prompt = [(37 * i + length) % 250 + 3 for i in range(length)]
        expected = reference_output(model, prompt, 3)
        logits = []
        for cached in (0, length - 1, length - 1, 0):
            if cached == 0:
                engine.reset_prefix_cache()
            result, (request,) = run(engine, [prompt], 3)
            assert request.usage.num_cached_tokens == cached
            assert request.usage.num_computed_tokens == length - cached + len(expected) - 1
            assert result.token_ids[request.request_id] == expected
            logits.append(torch.cat(result.logits))
        cold, warm, again, anew = logits
        assert float((warm - cold).abs().max()) < 1e-9
        assert torch.equal(again, warm)
        assert torch.equal(anew, cold)


@pytest.mark.parametrize("where", ["forward", "copies"])
def test_blocks_that_a_failed_step_filled_are_not_found(
    model: Any, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only what was there before is a hit, and the answer is right."""
    engine = tiny_engine(model)
    shared = [10, 20, 30, 40, 50, 60]
    run(engine, [[*shared, 70]], 1)
    prompt = [*shared, *range(100, 112)]
    engine.add(prompt, greedy(4), request_id="failing")

    def fail(*_: object) -> None:
        raise RuntimeError("planted")

    with monkeypatch.context() as patch:
        target, name = {
            "forward": (engine.model, "forward"), "copies": (engine.backend, "copy_blocks"),
        }[where]  # fmt: skip
        patch.setattr(target, name, fail)
        assert [delta.finish_reason for delta in engine.step()] == ["error"]
    assert_idle(engine)
    result, (request,) = run(engine, [prompt], 4)
    assert request.usage.num_cached_tokens == 6
    assert result.token_ids[request.request_id] == reference_output(model, prompt, 4)


# these two are meant to remember, and bounded: tests/core/test_miss.py
_MEMORIES = {"BlockPool.forgotten", "Scheduler.misses"}


def sizes(engine: Engine) -> dict[str, int]:
    """The sizes of all containers of the engine, the scheduler and the cache."""
    owners: list[Any] = [engine, engine.scheduler, engine.cache, engine.cache.pool]
    return {
        f"{type(owner).__name__}.{name}": len(value)
        for owner in owners
        for name, value in vars(owner).items()
        if hasattr(value, "__len__")
        and not isinstance(value, str | bytes)
        and f"{type(owner).__name__}.{name}" not in _MEMORIES
    }


def num_own_objects() -> Counter[str]:
    """Live objects of our classes, by class."""
    gc.collect()
    kinds = (type(obj) for obj in gc.get_objects())
    return Counter(kind.__name__ for kind in kinds if str(kind.__module__).startswith("prefixkv"))


def serve_fifty(engine: Engine, number: int) -> None:
    """Half of them of tenants of their own; ten are aborted in mid-run."""
    for i in range(50):
        prompt = [3 + (number * 50 + i) % 250, 3 + i % 2, 5]
        engine.add(prompt, greedy(2), cache_salt=f"{number} {i}" if i % 2 else None)
    engine.step()
    for branch in list(engine.scheduler.running)[::5]:
        engine.abort(branch.request.request_id)
    while engine.has_work:
        engine.step()
    engine.check_invariants()


def test_nothing_grows_over_a_thousand_requests(
    model: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whether they finish, are aborted or fail: all containers are as before, and all objects."""
    caplog.set_level(logging.CRITICAL, "prefixkv")  # a traceback in the log holds on to objects
    engine = tiny_engine(model, num_blocks=120, block_size=2, max_num_seqs=50)

    def fail(*_: object) -> torch.Tensor:
        raise RuntimeError("planted")

    seen = []
    for number in range(20):
        with monkeypatch.context() as patch:
            if number % 4 == 3:
                patch.setattr(engine.model, "forward", fail)
            serve_fifty(engine, number)
        assert len(engine.cache.pool.index) <= 120
        assert len(engine.cache.pool.roots) <= 120
        if number in (3, 19):
            engine.reset_prefix_cache()
            seen.append((sizes(engine), num_own_objects()))
    assert engine.scheduler.num_admissions == 1000
    assert {name: size for name, size in seen[0][0].items() if size} == {
        "BlockPool.blocks": 121,
        "BlockPool.free": 120,
    }
    assert seen[1] == seen[0]


def test_every_counter_moves(model: Any) -> None:
    """Each number of `stats` moves with what it counts, by as much."""
    engine = tiny_engine(model, num_blocks=8)
    prompt = [10, 20, 30, 40, 50, 60, 70]
    seen = [engine.stats()]
    assert seen[0] == {**dict.fromkeys(seen[0], 0), "num_blocks": 8, "num_free_blocks": 8}

    def moved() -> dict[str, float]:
        now, before = engine.stats(), seen[-1]
        seen.append(now)
        changed = {name for name in now if now[name] != before[name] and "misses" not in name}
        return {name: now[name] - before[name] for name in changed}

    def add(tokens: list[int], max_tokens: int = 1) -> Usage:
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        return engine.add(tokens, params).usage

    add(prompt, 3)
    add(prompt, 3)
    assert moved() == {"num_requests_waiting": 2}
    engine.step()  # the second waits for the first
    assert moved() == {
        "num_requests_running": 1, "num_requests_waiting": -1, "num_prompt_tokens": 7,
        "num_queried_tokens": 7,
        "num_steps": 1, "num_computed_tokens": 7, "num_free_blocks": -2, "kv_cache_usage": 2 / 8,
        "num_generated_tokens": 1, "num_live_branches": 1, "num_block_references": 2,
        "num_blocks_used": 2,
    }  # fmt: skip
    engine.step()  # the first decodes into its second block, the second computes three tokens
    assert moved() == {
        "num_requests_running": 1, "num_requests_waiting": -1, "num_prompt_tokens": 7,
        "num_queried_tokens": 7,
        "num_cached_tokens": 4, "num_steps": 1, "num_computed_tokens": 4, "num_free_blocks": -1,
        "kv_cache_usage": 1 / 8, "num_generated_tokens": 2, "num_live_branches": 1,
        "num_block_references": 2, "num_blocks_used": 1, "num_shared_blocks": 1,
    }  # fmt: skip
    engine.step()  # the first takes a third block and ends; the second has filled what it had
    assert moved() == {
        "num_requests_running": -1, "num_steps": 1, "num_computed_tokens": 2,
        "kv_cache_usage": -1 / 8, "num_deduplicated": 1, "num_completion_tokens": 3,
        "num_generated_tokens": 2, "num_live_branches": -1, "num_block_references": -2,
        "num_blocks_used": -1, "num_shared_blocks": -1,
    }  # fmt: skip
    engine.step()
    moved()
    add(prompt)
    engine.step()
    assert moved() == {
        "num_prompt_tokens": 7, "num_queried_tokens": 7, "num_cached_tokens": 6, "num_steps": 1,
        "num_computed_tokens": 1,
        "num_copies": 1, "num_slots_copied": 2, "num_completion_tokens": 1,
        "num_generated_tokens": 1,
    }  # fmt: skip
    add([5] * 3)
    engine.step()
    moved()
    add([5] * 3 + [6])
    engine.step()
    assert moved() == {
        "num_prompt_tokens": 4, "num_queried_tokens": 4, "num_cached_tokens": 3, "num_steps": 1,
        "num_computed_tokens": 1,
        "num_takeovers": 1, "num_completion_tokens": 1, "num_generated_tokens": 1,
    }  # fmt: skip
    branch = Sequence.open(engine.cache, engine.identity, prompt)
    branch.fork().release()
    branch.release()
    assert moved() == {"num_forks": 1}
    usages = [add([100 + i] * 13, 8) for i in range(2)]  # of five blocks each, in a pool of eight
    run(engine)
    change = moved()
    assert (change["num_preemptions"], change["num_evicted_blocks"]) == (1, 7)
    assert [usage.num_preemptions for usage in usages] == [0, 1]
    assert [usage.num_computed_tokens for usage in usages] == [20, 24]
    assert (change["num_computed_tokens"], change["num_prompt_tokens"]) == (44, 26)
    assert "num_cached_tokens" not in change
    engine.reset_prefix_cache()
    engine.cache.digest = lambda data: b""
    moved()
    add([200] * 9)
    engine.step()
    assert moved()["num_collisions"] == 1
    never = {name for name in seen[0] if len({stats[name] for stats in seen}) == 1}
    elsewhere = {name for name in never if "misses" in name or "lease" in name}
    # tests/api/test_metrics.py has the last two as well
    assert never - elsewhere == {"num_blocks", "num_branches_held", "num_requests_deferred"}


def test_an_idle_cache_shows_as_cached_and_not_as_used(model: Any) -> None:
    """Blocks that two prompts share count once, whoever asks: the gauges, or the pool itself."""
    engine = tiny_engine(model, num_blocks=20)
    prompts = [[*range(10, 18), 20 + i, 30, 40, 50] for i in range(3)]
    run(engine, prompts, 1)
    stats, pool = engine.stats(), engine.cache.pool
    assert stats["kv_cache_usage"] == 0
    assert stats["num_blocks"] - stats["num_free_blocks"] == 2 + 3
    assert pool.num_reclaimable() == 5
    assert not pool.can_reserve(21)
    assert pool.reserve(20)
    assert engine.stats()["num_free_blocks"] == 20


@pytest.mark.parametrize("num_blocks", [20, 40])
def test_under_overload_less_is_recomputed_than_computed(num_blocks: int) -> None:
    """Two requests a step for a pool of one or three: every one ends, and the usage says the cost.

    What preempted requests find of their own again is neither useful work nor a hit.
    """
    executor = FakeExecutor(num_blocks, 4)
    requests: list[Request] = []
    while len(requests) < 40 or executor.scheduler.has_work:
        for _ in range(2 * (len(requests) < 40)):
            i = len(requests)
            prompt = [i % 3, i // 3 % 3, i // 9 % 3, i // 27, *[0, 1] * 8]
            requests.append(executor.add(prompt, 40))
        executor.step()
    usages = [request.usage for request in requests]
    useful = sum(20 + 40 - 1 - usage.num_cached_tokens for usage in usages)
    computed = sum(usage.num_computed_tokens for usage in usages)

    assert computed == executor.num_computed
    assert executor.scheduler.num_preemptions > 40
    assert useful < computed < 1.6 * useful
    assert executor.scheduler.num_cached_tokens == sum(u.num_cached_tokens for u in usages)
    outputs = [executor.finished[request.request_id] for request in requests]
    assert outputs == [serial_output(r.prompt, 40) for r in requests]


def test_a_trace_that_is_replayed_repeats_itself() -> None:
    """Eviction, preemption and twins included: the same steps over the same blocks."""

    def replay() -> list[list[tuple[str, int, int, list[int]]]]:
        executor = FakeExecutor(14, 2, max_num_batched_tokens=8)
        steps: list[list[tuple[str, int, int, list[int]]]] = []
        executor.on_batch = lambda batch: steps.append(
            [
                (i.branch.request.request_id, i.start, i.num_tokens, list(i.sequence.block_table()))
                for i in batch
            ]
        )
        for i in range(30):
            identity = IDENTITIES[i % 2]
            executor.add([i // 4 % 3, 1, i // 2 % 3, 0, 1], 3 + i % 5, identity)
            executor.step()
        executor.run()
        assert executor.scheduler.num_preemptions > 0
        assert executor.cache.pool.num_evicted > 0
        assert executor.scheduler.num_cached_tokens > 0
        return steps

    assert replay() == replay()
