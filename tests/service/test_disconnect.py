"""A client that leaves frees what its request held, over real sockets and a real engine."""

import json
import socket
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from asked_engine import AskedEngine
from tiny_models import tiny_engine

from prefixkv.api.app import create_app
from tests.api.live_server import eventually, running

ENDLESS = {"prompt": "abc", "max_tokens": 250, "temperature": 0, "ignore_eos": True}


@pytest.fixture
def served(request: pytest.FixtureRequest) -> Iterator[tuple[AskedEngine, int]]:
    engine = AskedEngine(tiny_engine(num_blocks=getattr(request, "param", 80)))
    with running(create_app(engine, ["tiny"])) as port:
        yield engine, port


@pytest.mark.parametrize("served", [300], indirect=True)
@pytest.mark.parametrize(
    ("fields", "num_branches"),
    [
        ({}, 1),
        ({"stream": True}, 1),
        ({"n": 4}, 4),
        ({"n": 4, "stream": True}, 4),
        ({"best_of": 4}, 4),
        ({"n": 4, "use_beam_search": True}, 4),
    ],
)
def test_a_cut_connection_aborts_its_request(
    served: tuple[AskedEngine, int], fields: dict[str, Any], num_branches: int
) -> None:
    """Streamed or not, one branch or four: the pool is back where it was, and others are served."""
    engine, port = served
    body = json.dumps({**ENDLESS, **fields}).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    ).encode()
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(head + body)
        eventually(lambda: engine.ask()["num_requests_running"] == num_branches)
        if fields.get("stream"):
            assert connection.recv(100)
    eventually(engine.is_idle)
    steps = engine.ask()["num_steps"]
    assert steps < 250  # it did not run to its end

    answer = httpx.post(
        f"http://127.0.0.1:{port}/v1/completions", json={"prompt": "abc", "max_tokens": 2}
    )
    assert answer.status_code == 200


def test_many_clients_half_of_which_leave(served: tuple[AskedEngine, int]) -> None:
    """Those that stay get their answers, by preemption if need be; nothing is left behind."""
    engine, port = served
    url = f"http://127.0.0.1:{port}/v1/completions"
    texts: dict[int, str] = {}

    def ask(i: int) -> None:
        body = {**ENDLESS, "prompt": f"client {i % 3}", "max_tokens": 60, "stream": True}
        with httpx.stream("POST", url, json=body, timeout=60) as response:
            text = ""
            for line in response.iter_lines():
                if i % 2:
                    return
                if line.startswith("data: {"):
                    text += json.loads(line[6:])["choices"][0]["text"]
            texts[i] = text

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    eventually(engine.is_idle)

    assert sorted(texts) == [0, 2, 4, 6, 8, 10]
    assert texts[0] == texts[6]
    assert texts[2] == texts[8]
