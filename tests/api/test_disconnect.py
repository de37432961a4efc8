"""A client that leaves ends its request, whatever the request was waiting for."""

import asyncio
import json
import socket
from collections.abc import AsyncGenerator
from typing import Any

import httpx
import pytest

from prefixkv.api.generation import IndexedDelta
from prefixkv.api.replies.streaming import EventStream
from prefixkv.outputs import OutputDelta, Usage
from tests.api.fake_engine import FakeEngine
from tests.api.live_server import eventually

MESSAGES = [{"role": "user", "content": "hi"}]


def send(port: int, path: str, body: dict[str, Any]) -> socket.socket:
    """Send one request and return its open connection."""
    raw = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(raw)}\r\n\r\n"
    )
    connection = socket.create_connection(("127.0.0.1", port), timeout=10)
    connection.sendall(head.encode() + raw)
    return connection


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/completions", {"prompt": ["x", "y", "z"]}),
        ("/v1/chat/completions", {"messages": MESSAGES}),
        ("/v1/chat/completions", {"messages": MESSAGES, "stream": True}),
        ("/v1/completions", {"prompt": ["x", "y", "z"], "stream": True}),
    ],
)
def test_leaving_before_the_first_token_aborts(
    engine: FakeEngine, port: int, path: str, body: dict[str, Any]
) -> None:
    """While nothing was sent, only the closed connection can tell."""
    engine.pause_after = 0
    num_prompts = len(body["prompt"]) if isinstance(body.get("prompt"), list) else 1
    connection = send(port, path, body | {"max_tokens": 1000})
    eventually(lambda: engine.num_active == num_prompts)
    connection.close()

    eventually(lambda: engine.num_aborts == num_prompts)
    assert engine.num_active == 0


@pytest.mark.parametrize("prompt", ["x", ["x", "y"]])
def test_leaving_in_the_middle_of_a_stream_aborts(
    engine: FakeEngine, port: int, prompt: Any
) -> None:
    """A stream that was cut stops its prompts."""
    engine.step_s = 0.01
    body = {"prompt": prompt, "stream": True, "max_tokens": 100_000}
    connection = send(port, "/v1/completions", body)
    while b'"text":"c"' not in connection.recv(65536):
        pass
    connection.close()

    eventually(lambda: engine.num_aborts == len(prompt))
    assert engine.num_active == 0


def test_leaving_while_the_stream_is_silent_aborts(engine: FakeEngine, port: int) -> None:
    """Between two far tokens nothing is written, so no write can fail."""
    engine.pause_after = 2
    connection = send(port, "/v1/completions", {"prompt": "x", "stream": True})
    while b'"text":"b"' not in connection.recv(65536):
        pass
    connection.close()

    eventually(lambda: engine.num_aborts == 1)


def test_leaving_in_the_middle_of_the_body_is_harmless(
    engine: FakeEngine, port: int, client: httpx.Client
) -> None:
    """Half a request starts nothing, and the server goes on."""
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b'Content-Length: 100\r\n\r\n{"prompt"'
        )

    assert client.post("/v1/completions", json={"prompt": "x"}).status_code == 200
    assert len(engine.calls) == 1


def test_finished_requests_are_no_aborts(engine: FakeEngine, client: httpx.Client) -> None:
    """The count of aborts means something."""
    for stream in (True, False):
        client.post("/v1/completions", json={"prompt": "x", "stream": stream})

    assert (engine.num_aborts, engine.num_active) == (0, 0)


def test_leaving_before_the_stream_begins_aborts() -> None:
    """The headers do not get through, and no event was asked for yet: the deltas run already."""

    async def deltas() -> AsyncGenerator[IndexedDelta, None]:
        try:
            yield 0, OutputDelta("r", "a", (1,), Usage())
            await asyncio.sleep(60)
        finally:
            closed.append(True)

    async def events() -> AsyncGenerator[bytes, None]:
        yield b"never asked for"

    async def receive() -> dict[str, Any]:
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        await asyncio.sleep(60)

    async def scenario() -> None:
        running = deltas()
        await anext(running)
        await EventStream(events(), running)({}, receive, send)
        assert closed

    closed: list[bool] = []
    asyncio.run(scenario())
