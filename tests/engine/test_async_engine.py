"""The async engine: many tasks, one worker, and nothing left behind however they end."""

import asyncio
import random
import threading
import time
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

import pytest
import torch
from engine_runs import greedy
from tiny_models import reference_output, tiny_engine, tiny_model

from prefixkv.async_engine import AsyncEngine
from prefixkv.errors import EngineStopped, InvalidRequest, StepFailed
from prefixkv.outputs import OutputDelta
from prefixkv.sampling_params import SamplingParams

PROMPT = [10, 20, 30, 40, 50, 60, 70]
ENDLESS = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model()


@asynccontextmanager
async def running(model: Any, **options: Any) -> AsyncIterator[AsyncEngine]:
    """A started engine; at the end its books must be right and empty."""
    engine = AsyncEngine(tiny_engine(model, **options))
    await engine.start()
    try:
        yield engine
        await engine.run(engine.engine.check_invariants)
        stats = await engine.stats()
        assert stats["kv_cache_usage"] == 0
        assert stats["num_requests_running"] == stats["num_requests_waiting"] == 0
    finally:
        await engine.stop()


async def tokens_of(stream: AsyncIterator[OutputDelta]) -> list[int]:
    return [token async for delta in stream for token in delta.token_ids]


def test_many_requests_at_once_give_the_serial_outputs(model: Any) -> None:
    """Interleaved tasks, each with its own stream."""

    async def main() -> None:
        async with running(model) as engine:
            prompts = [[*PROMPT[: 1 + i % 7], i + 3] for i in range(12)]
            outputs = await asyncio.gather(
                *(tokens_of(engine.generate(prompt, greedy(5))) for prompt in prompts)
            )
        for prompt, output in zip(prompts, outputs, strict=True):
            assert output == reference_output(model, prompt, 5)

    asyncio.run(main())


def test_a_step_is_handed_over_at_once_and_timed(model: Any) -> None:
    """One call into the loop for all streams; what was timed is there with the last token."""

    async def main() -> None:
        async with running(model) as engine:
            handed_over = 0
            deliver = engine._deliver

            def counted(deltas: list[OutputDelta]) -> None:
                nonlocal handed_over
                handed_over += 1
                deliver(deltas)

            engine._deliver = counted  # type: ignore[method-assign]
            prompts = [[*PROMPT, i + 3] for i in range(8)]
            began = time.monotonic()
            streams = [tokens_of(engine.generate(prompt, greedy(5))) for prompt in prompts]
            await asyncio.gather(*streams)
            took = time.monotonic() - began
            seen = await engine.snapshot()
        assert handed_over <= seen.engine.num_steps < 8 * 5
        assert seen.num_finished == {"length": 8}
        histograms = seen.histograms
        assert sum(histograms["inter_token_latency_seconds"].counts) == 8 * 4
        for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds"):
            assert sum(histograms[name].counts) == 8
            assert 0 < histograms[name].sum <= 8 * took
        assert histograms["iteration_tokens_total"].sum == seen.engine.num_computed_tokens

    asyncio.run(main())


def test_refusals_come_before_the_first_delta(model: Any) -> None:
    """Wrong requests raise, and leave nothing."""

    async def main() -> None:
        async with running(model) as engine:
            for prompt in ([], [5] * 600, [9999]):
                with pytest.raises(InvalidRequest):
                    await anext(engine.generate(prompt, greedy(1)))
            assert engine.vocab_size == 259
            assert engine.max_model_len == 512

    asyncio.run(main())


@pytest.mark.parametrize("how", ["cancel", "close"])
def test_who_leaves_frees_the_blocks(model: Any, how: str) -> None:
    """A cancelled task and a closed iterator abort their request."""

    async def main() -> None:
        async with running(model) as engine:
            if how == "cancel":
                task = asyncio.create_task(tokens_of(engine.generate(PROMPT, ENDLESS)))
                while (await engine.stats())["num_requests_running"] == 0:
                    await asyncio.sleep(0)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            else:
                async with aclosing(engine.generate(PROMPT, ENDLESS)) as stream:  # type: ignore[type-var]
                    await anext(stream)

    asyncio.run(main())


def test_cancelling_at_any_moment_leaks_nothing(model: Any) -> None:
    """Also before the request has reached the worker; the same id may come again."""

    async def main() -> None:
        rng = random.Random(0)
        async with running(model, num_blocks=40) as engine:
            tasks = []
            for i in range(40):
                stream = engine.generate([*PROMPT, i + 3], greedy(20), request_id="same")
                tasks.append(asyncio.create_task(tokens_of(stream)))
                for _ in range(rng.randrange(4)):
                    await asyncio.sleep(0)
                if rng.random() < 0.6:
                    rng.choice(tasks).cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            for i, result in enumerate(results):
                if isinstance(result, list):
                    assert result == reference_output(model, [*PROMPT, i + 3], 20)
                else:
                    assert isinstance(result, asyncio.CancelledError)

    asyncio.run(main())


def test_a_failing_step_is_told_to_its_requests(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They raise StepFailed; the engine goes on with others."""

    def fail(*_: object) -> None:
        raise RuntimeError("planted")

    async def main() -> None:
        async with running(model) as engine:
            with monkeypatch.context() as patch:
                patch.setattr(engine.engine.model, "forward", fail)
                with pytest.raises(StepFailed, match="planted"):
                    await tokens_of(engine.generate(PROMPT, greedy(3)))
            assert await tokens_of(engine.generate(PROMPT, greedy(3)))

    asyncio.run(main())


def test_stopping_ends_what_runs_and_refuses_what_comes(model: Any) -> None:
    """Streams raise EngineStopped, and so does every later use."""

    async def main() -> None:
        engine = AsyncEngine(tiny_engine(model))
        with pytest.raises(EngineStopped):
            await anext(engine.generate(PROMPT, greedy(1)))
        await engine.start()
        task = asyncio.create_task(tokens_of(engine.generate(PROMPT, ENDLESS)))
        await asyncio.sleep(0.05)
        await engine.stop()
        with pytest.raises(EngineStopped):
            await task
        with pytest.raises(EngineStopped):
            await anext(engine.generate(PROMPT, greedy(1)))
        with pytest.raises(EngineStopped):
            await engine.start()
        assert not engine.is_running
        await engine.stop()
        assert not engine.engine.has_work

    asyncio.run(main())


def test_a_dead_engine_says_so(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault outside the forward ends the worker: waiting streams raise, health shows it."""

    def fail(*_: object) -> None:
        raise RuntimeError("planted")

    async def main() -> None:
        engine = AsyncEngine(tiny_engine(model))
        await engine.start()
        monkeypatch.setattr(engine.engine.scheduler, "schedule", fail)
        with pytest.raises(EngineStopped, match="the engine died: RuntimeError: planted"):
            await tokens_of(engine.generate(PROMPT, greedy(3)))
        assert not engine.is_running
        await engine.stop()

    asyncio.run(main())


def test_a_stop_that_is_cancelled_still_ends_everything(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who waits for a token is told, though nobody waits for the stop any more."""
    release = threading.Event()

    async def main() -> None:
        engine = AsyncEngine(tiny_engine(model))
        await engine.start()
        forward = engine.engine.model.forward

        def slow(*arguments: Any) -> torch.Tensor:
            release.wait(10)
            return forward(*arguments)

        monkeypatch.setattr(engine.engine.model, "forward", slow)
        task = asyncio.create_task(tokens_of(engine.generate(PROMPT, ENDLESS)))
        await asyncio.sleep(0.05)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(engine.stop(), 0.05)
        release.set()
        with pytest.raises(EngineStopped):
            await asyncio.wait_for(task, 10)

    asyncio.run(main())


def test_a_worker_that_is_ended_by_a_command_says_so(model: Any) -> None:
    """Even what is no Exception must not leave anybody waiting."""

    def leave() -> None:
        raise SystemExit

    async def main() -> None:
        engine = AsyncEngine(tiny_engine(model))
        await engine.start()
        with pytest.raises(EngineStopped, match="SystemExit"):
            await asyncio.wait_for(engine.run(leave), 10)
        await engine.stop()

    asyncio.run(main())


def test_another_event_loop_is_refused_and_harms_nobody(model: Any) -> None:
    """The engine answers on the loop that it was started on."""

    async def main() -> None:
        async with running(model) as engine:

            def elsewhere() -> None:
                with pytest.raises(EngineStopped, match="another event loop"):
                    asyncio.run(engine.stats())

            await asyncio.to_thread(elsewhere)
            assert await tokens_of(engine.generate(PROMPT, greedy(2)))

    asyncio.run(main())
