"""Limits of a key: how many of its requests run or wait at once, whatever ends them."""

import asyncio
import random
from collections.abc import Iterator

import httpx
import pytest
from starlette.types import Receive, Scope, Send

from prefixkv.api.access.key_file import collect_keys
from prefixkv.api.access.key_limits import KeyLimits
from prefixkv.api.access.tenant import SCOPE_KEY, Tenant
from prefixkv.api.app import create_app
from prefixkv.api.errors import KeyLimitReached
from tests.api.fake_engine import FakeEngine
from tests.api.live_server import eventually, running
from tests.api.test_errors import error_of

ONE, TWO = ({"Authorization": f"Bearer {key}"} for key in ("one", "two"))
STREAM = {"prompt": "x", "stream": True, "max_tokens": 100_000}
SHORT = {"prompt": "x", "max_tokens": 1}
URL = "/v1/completions"


@pytest.fixture(scope="module")
def engine() -> FakeEngine:
    """Return the engine of `limited`."""
    return FakeEngine()


@pytest.fixture(scope="module")
def limited(engine: FakeEngine) -> Iterator[httpx.Client]:
    """Return a client of a server whose keys may have two requests at once."""
    keys = collect_keys(["one", "two"], None, None, 2)
    with (
        running(create_app(engine, ["m"], keys=keys)) as port,
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=20) as client,
    ):
        yield client


def test_the_next_one_over_the_limit_gets_429(limited: httpx.Client, engine: FakeEngine) -> None:
    """Other keys and routes that generate nothing go on; a client that leaves frees its place."""
    engine.reset()
    engine.step_s = 0.01
    with limited.stream("POST", URL, json=STREAM, headers=ONE) as first:
        assert first.status_code == 200
        with limited.stream("POST", URL, json=STREAM, headers=ONE) as second:
            assert second.status_code == 200
            response = limited.post("/v1/chat/completions", json={"messages": []}, headers=ONE)
            error = error_of(response, 429)
            assert (error["code"], error["type"]) == ("key_limit", "rate_limit_error")
            assert "may have 2" in error["message"]
            assert int(response.headers["retry-after"]) > 0
            assert limited.get("/v1/models", headers=ONE).status_code == 200
            assert limited.post(URL, json=SHORT, headers=TWO).status_code == 200
        eventually(lambda: limited.post(URL, json=SHORT, headers=ONE).status_code == 200)


def test_every_way_out_frees_the_place(limited: httpx.Client, engine: FakeEngine) -> None:
    """Refusals, failures before and within a stream, and plain ends; more often than the limit."""
    engine.reset()
    for _ in range(3):
        assert limited.post(URL, json={"prompt": 3}, headers=ONE).status_code == 400
        assert limited.post(URL, json=SHORT, headers=ONE).status_code == 200
        engine.error = RuntimeError()
        assert limited.post(URL, json=SHORT, headers=ONE).status_code == 500
        engine.error, engine.fail_after = None, 2
        stream = {"prompt": "x", "stream": True}
        assert "internal_error" in limited.post(URL, json=stream, headers=ONE).text
        engine.fail_after = None


def test_the_count_is_exact_under_cancellation() -> None:
    """Requests that end, fail or are cancelled at any moment: never over the limit, then none."""
    tenant = Tenant("t", max_requests=5)
    chance = random.Random(0)
    num_running = peak = num_refused = 0

    async def application(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal num_running, peak
        num_running += 1
        peak = max(peak, num_running)
        try:
            for _ in range(chance.randrange(4)):
                await asyncio.sleep(0)
            if chance.random() < 0.3:
                raise RuntimeError
        finally:
            num_running -= 1

    async def nothing() -> dict[str, object]:
        raise AssertionError

    async def ignore(message: object) -> None:
        raise AssertionError

    async def hammer() -> None:
        nonlocal num_refused
        limits = KeyLimits(application)
        scope = {"type": "http", "method": "POST", "path": URL, SCOPE_KEY: tenant}
        tasks: list[asyncio.Task[None]] = []
        for _ in range(500):
            tasks.append(asyncio.ensure_future(limits(scope, nothing, ignore)))
            if chance.random() < 0.5:
                await asyncio.sleep(0)
            if chance.random() < 0.3:
                chance.choice(tasks).cancel()
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        num_refused = sum(isinstance(end, KeyLimitReached) for end in ends)
        assert limits._num_running[tenant.name] == 0

    asyncio.run(hammer())
    assert (peak, num_running) == (5, 0)
    assert num_refused > 0
