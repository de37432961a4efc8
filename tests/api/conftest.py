"""One server over one fake engine for all tests here; each test finds the engine fresh."""

import os
from collections.abc import Iterator

import httpx
import pytest

from prefixkv.api.app import create_app
from prefixkv.api.options.server_options import ServerOptions
from prefixkv.api.serving import server
from prefixkv.config import EngineConfig
from tests.api.fake_engine import FakeEngine
from tests.api.live_server import running

MODEL = "m"
MAX_BODY_BYTES = 300_000


@pytest.fixture(scope="session")
def _served_engine() -> Iterator[tuple[FakeEngine, int]]:
    engine = FakeEngine()
    app = create_app(engine, [MODEL, "org/other", "gpt-5.6"], max_body_bytes=MAX_BODY_BYTES)
    with running(app) as port:
        yield engine, port


@pytest.fixture
def engine(_served_engine: tuple[FakeEngine, int]) -> FakeEngine:
    """Return the engine behind `client`, as new."""
    engine, _ = _served_engine
    engine.reset()
    engine.is_running = True
    return engine


@pytest.fixture
def port(engine: FakeEngine, _served_engine: tuple[FakeEngine, int]) -> int:
    """Return the port of the server."""
    return _served_engine[1]


@pytest.fixture(scope="session")
def _client(_served_engine: tuple[FakeEngine, int]) -> Iterator[httpx.Client]:
    _, port = _served_engine
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=20) as client:
        yield client


@pytest.fixture
def client(_client: httpx.Client, engine: FakeEngine) -> httpx.Client:
    """Return a client of the server, whose engine is as new."""
    return _client


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[tuple[EngineConfig, ServerOptions]]:
    """Return what `serve` would have run with."""
    for name in [name for name in os.environ if name.startswith(("PREFIXKV_", "VLLM_"))]:
        monkeypatch.delenv(name)
    calls: list[tuple[EngineConfig, ServerOptions]] = []
    monkeypatch.setattr(server, "run", lambda *options: calls.append(options))
    return calls
