"""Threads, and what a client sees.

Kinds of faults that broke other systems; docs/faults.md lists them all.
"""

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import torch
from engine_runs import greedy
from tiny_models import tiny_engine, tiny_model

from prefixkv.api.app import create_app
from prefixkv.async_engine import AsyncEngine
from prefixkv.sampling_params import SamplingParams
from tests.api.live_server import running
from tests.api.sse import read_events


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model()


PROMPT = [10, 20, 30, 40, 50, 60, 70]
ENDLESS = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)


async def consume(engine: AsyncEngine, prompt: list[int], params: SamplingParams) -> None:
    """Read a request to its end."""
    async for _ in engine.generate(prompt, params):
        pass


def test_what_a_step_in_flight_uses_is_not_freed_under_it(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request that is cancelled while its forward runs keeps its blocks until that is over."""
    entered, leave = threading.Event(), threading.Event()

    async def main() -> None:
        engine = AsyncEngine(tiny_engine(model))
        await engine.start()
        pool, forward = engine.engine.cache.pool, engine.engine.model.forward

        def slow(*arguments: Any) -> torch.Tensor:
            entered.set()
            assert leave.wait(10)
            return forward(*arguments)

        monkeypatch.setattr(engine.engine.model, "forward", slow)
        task = asyncio.create_task(consume(engine, PROMPT, ENDLESS))
        await asyncio.to_thread(entered.wait, 10)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (len(pool.free), len(engine.engine.cache.sequences)) == (129 - 2, 1)
        leave.set()
        stats = await engine.stats()
        assert (stats["num_requests_running"], stats["kv_cache_usage"]) == (0, 0)
        assert stats["num_steps"] == 1
        await engine.stop()

    asyncio.run(main())


def test_only_the_worker_touches_the_engine(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Adding, stepping, aborting and looking: all in one thread, so that nothing needs a lock."""
    threads: dict[str, set[int]] = {}

    def note(target: object, name: str) -> None:
        call = getattr(target, name)

        def noted(*arguments: Any, **options: Any) -> Any:
            threads.setdefault(name, set()).add(threading.get_ident())
            return call(*arguments, **options)

        monkeypatch.setattr(target, name, noted)

    async def main() -> None:
        engine = AsyncEngine(tiny_engine(model))
        for name in ("add", "step", "abort", "stats"):
            note(engine.engine, name)
        for name in ("acquire", "release", "reserve"):
            note(engine.engine.cache.pool, name)
        await engine.start()
        leaves = asyncio.create_task(consume(engine, PROMPT, ENDLESS))
        await asyncio.gather(*(consume(engine, [*PROMPT, i + 3], greedy(4)) for i in range(4)))
        leaves.cancel()
        await asyncio.gather(leaves, return_exceptions=True)
        assert (await engine.stats())["num_requests_running"] == 0
        worker = engine._worker
        await engine.stop()
        assert worker is not None
        assert threads == {name: {worker.ident} for name in threads}
        assert len(threads) == 7

    asyncio.run(main())


@pytest.fixture(scope="module")
def client(model: Any) -> Iterator[httpx.Client]:
    """A client of a server with a real engine."""
    app = create_app(AsyncEngine(tiny_engine(model)), ["tiny"])
    with running(app) as port, httpx.Client(base_url=f"http://127.0.0.1:{port}") as http:
        yield http


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "prompt", "num_tokens"),
    [
        ("/v1/completions", {"prompt": "0123456789"}, 10),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}, 21),
    ],
)
def test_cached_tokens_are_0_when_cold_and_exact_when_warm_and_salts_hold(
    client: httpx.Client, path: str, prompt: dict[str, Any], num_tokens: int, stream: bool
) -> None:
    """A number in every answer; who has another salt, or none, starts cold."""
    cached = []
    for salt in ("a", "a", "b", "b", "a"):
        body = {**prompt, "max_tokens": 2, "temperature": 0, "stream": stream}
        response = client.post(path, json={**body, "cache_salt": f"{salt} {stream}"})
        answer = read_events(response)[-1] if stream else response.json()
        assert answer["usage"]["prompt_tokens"] == num_tokens
        details = answer["usage"]["prompt_tokens_details"]
        cached.append(details["cached_tokens"])
        assert details["cache_write_tokens"] == num_tokens - cached[-1]
    assert cached == [0, num_tokens - 1, 0, num_tokens - 1, num_tokens - 1]
    assert [type(value) for value in cached] == [int] * 5
