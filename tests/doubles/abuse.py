"""Many connections at once, half of which behave badly: does a server process survive them whole?

`python tests/doubles/abuse.py --seconds 60 --connections 200` prints what was done and what was
left. Everything is drawn from a seed, and stays on 127.0.0.1.
"""

import argparse
import asyncio
import json
import random
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx

SERVER = Path(__file__).with_name("open_books.py")
DEADLINE_S = 60.0
PATIENCE_S = 2.0
KEY = "a-key-of-the-abused"
RIGHT = {"Authorization": f"Bearer {KEY}"}
STORY = "Once upon a time there was a fox that lived beside a river"
PROMPTS = [STORY[:cut] + tail for cut in (58, 40, 22) for tail in ("", "!", " and a crow.")]
PLAIN = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}
MALFORMED = [
    b"",
    b"{",
    b'{"prompt": "\xff"}',
    b'{"prompt": NaN}',
    b"[" * 100_000,
    b'{"prompt": ["a", 3]}',
    b'{"prompt": "a", "n": 1e9}',
    b'{"prompt": "a", "stop": [""]}',
    b'{"prompt": [[99999999]]}',
    b'{"messages": {}}',
]


def message(body: bytes, key: str = KEY, length: int | None = None) -> bytes:
    """A completion request as it goes over the wire."""
    lines = [
        "POST /v1/completions HTTP/1.1",
        "Host: x",
        "Content-Type: application/json",
        f"Content-Length: {len(body) if length is None else length}",
        f"Authorization: Bearer {key}",
    ]
    return "\r\n".join([*lines, "", ""]).encode() + body


class Abuse:
    """What all connections share: the server, the answers that are right, and what was counted."""

    def __init__(self, url: str, answers: dict[str, str]) -> None:
        self.url = url
        self.port = int(url.rsplit(":", 1)[1])
        self.answers = answers
        self.counts: Counter[str] = Counter()

    async def run(self, num_connections: int, seconds: float, seed: int) -> None:
        """Keep `num_connections` busy; every other one is honest, and ends by itself."""
        until = time.monotonic() + seconds
        async with asyncio.TaskGroup() as group:
            for i in range(num_connections):
                rng = random.Random(seed * 1_000_000 + i)
                group.create_task(self.behave(rng, until) if i % 2 else self.misuse(rng, until))

    async def behave(self, rng: random.Random, until: float) -> None:
        """Ask again and again, once at least; each answer must come, whole and right."""
        limits = httpx.Limits(max_connections=1)
        async with httpx.AsyncClient(
            base_url=self.url, timeout=DEADLINE_S, limits=limits, headers=RIGHT
        ) as http:
            is_first = True
            while is_first or time.monotonic() < until:
                is_first = False
                prompt = rng.choice(PROMPTS)
                body = {**PLAIN, "prompt": prompt, "stream": rng.random() < 0.5}
                response = await http.post("/v1/completions", json=body)
                assert response.status_code == 200, response.text
                assert text_of(response) == self.answers[prompt]
                self.counts["honest"] += 1

    async def misuse(self, rng: random.Random, until: float) -> None:
        """Do one bad thing after the other, each on a connection of its own."""
        acts = [
            self.cut_request,
            self.cut_answer,
            self.read_slowly,
            self.oversize,
            self.malform,
            self.guess_a_key,
        ]
        is_first = True
        while is_first or time.monotonic() < until:
            is_first = False
            act = rng.choice(acts)
            reader, writer = await asyncio.open_connection(sock=self.connection(rng))
            try:
                # the server may close first, and may be slow: who misuses it is promised nothing
                with suppress(ConnectionError, TimeoutError):
                    await asyncio.wait_for(act(rng, reader, writer), PATIENCE_S)
                self.counts[act.__name__] += 1
            finally:
                if rng.random() < 0.5:
                    writer.transport.abort()
                writer.close()

    def connection(self, rng: random.Random) -> socket.socket:
        """A socket that is connected; some can hold little that was not read."""
        one = socket.socket()
        if rng.random() < 0.5:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        one.connect(("127.0.0.1", self.port))
        one.setblocking(False)
        return one

    async def cut_request(self, rng: random.Random, reader: Any, writer: Any) -> None:
        """Leave in the middle of the request."""
        raw = message(long_request(rng))
        writer.write(raw[: rng.randrange(len(raw))])
        await writer.drain()
        await asyncio.sleep(rng.random() * 0.2)

    async def cut_answer(self, rng: random.Random, reader: Any, writer: Any) -> None:
        """Leave while the answer is computed, or in the middle of its stream."""
        writer.write(message(long_request(rng)))
        await writer.drain()
        await asyncio.sleep(rng.random() * 0.2)
        if rng.random() < 0.5:
            await reader.read(rng.randrange(1, 2000))

    async def read_slowly(self, rng: random.Random, reader: Any, writer: Any) -> None:
        """Read a long stream a few bytes at a time, then leave."""
        writer.write(message(long_request(rng)))
        for _ in range(rng.randrange(40)):
            await reader.read(64)
            await asyncio.sleep(0.02)

    async def oversize(self, rng: random.Random, reader: Any, writer: Any) -> None:
        """Declare a body that is too large, and send some of it; the status is 413."""
        writer.write(message(b" " * 100_000, length=2**30))
        assert b" 413 " in await reader.readline()

    async def malform(self, rng: random.Random, reader: Any, writer: Any) -> None:
        """Send what is no request; it is refused."""
        writer.write(message(rng.choice(MALFORMED)))
        assert b" 400 " in await reader.readline()

    async def guess_a_key(self, rng: random.Random, reader: Any, writer: Any) -> None:
        """Ask with a wrong key; the status is 401."""
        writer.write(message(long_request(rng), key=f"{KEY}{rng.randrange(10)}"))
        assert b" 401 " in await reader.readline()


def long_request(rng: random.Random) -> bytes:
    """A request that takes long to answer, in one of several ways, and that few others share."""
    more: dict[str, Any] = rng.choice([{}, {"stream": True}, {"n": 3, "stream": True}, {"n": 2}])
    prompt = f"{rng.choice(PROMPTS)} {rng.randrange(10**9)}"
    body = {**PLAIN, "prompt": prompt, "max_tokens": 80, "temperature": 1, **more}
    return json.dumps(body).encode()


def text_of(response: httpx.Response) -> str:
    """The text of an answer, whole or streamed; a stream has to have ended as streams do."""
    if not response.headers["content-type"].startswith("text/event-stream"):
        return str(response.json()["choices"][0]["text"])
    *events, done, rest = response.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    choices = [json.loads(event.removeprefix("data: "))["choices"][0] for event in events]
    assert choices[-1]["finish_reason"] == "length"
    return "".join(choice["text"] for choice in choices)


@contextmanager
def server() -> Iterator[str]:
    """A server process of its own; yields its address, and ends it by a signal."""
    with tempfile.TemporaryFile("w+") as log:
        command = [sys.executable, str(SERVER), "serve", "tiny", "--port", "0", "--threads", "1"]
        options = ["--api-key", KEY, "--uvicorn-log-level", "warning"]
        process = subprocess.Popen([*command, *options], stdout=log, stderr=log, text=True)
        try:
            yield _address(process, log)
            process.terminate()
            assert process.wait(30) == 0, "it did not end as asked"
        finally:
            process.kill()
            process.wait()


def _address(process: subprocess.Popen[str], log: Any) -> str:
    deadline = time.monotonic() + DEADLINE_S
    while process.poll() is None and time.monotonic() < deadline:
        log.seek(0)
        if found := re.search(r"at (http://[\d.]+:\d+)/v1", log.read()):
            return found[1]
        time.sleep(0.05)
    log.seek(0)
    raise AssertionError(f"it does not serve: {log.read()}")


def answers(url: str) -> dict[str, str]:
    """What each prompt is answered when nobody else asks."""
    found = {}
    for prompt in PROMPTS:
        body = {**PLAIN, "prompt": prompt}
        response = httpx.post(f"{url}/v1/completions", json=body, headers=RIGHT, timeout=60)
        found[prompt] = text_of(response.raise_for_status())
    return found


def books_at_rest(url: str) -> dict[str, Any]:
    """What the server holds when nothing is left to do; checks that nothing was forgotten."""
    deadline = time.monotonic() + DEADLINE_S
    while True:
        response = httpx.get(f"{url}/books", headers=RIGHT, timeout=DEADLINE_S)
        books: dict[str, Any] = response.raise_for_status().json()
        names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage", "num_inboxes")
        if all(books[name] == 0 for name in names) and books["num_tasks"] <= 4:
            return books
        assert time.monotonic() < deadline, f"this is left: {books}"
        time.sleep(0.1)


def abuse(
    num_connections: int, seconds: float, seed: int
) -> tuple[Counter[str], dict[str, Any], dict[str, Any]]:
    """Abuse a new server twice; return what was done in all, and the books after each time.

    The first time, for a fifth of `seconds`, is what the second one is compared with: before it,
    buffers have not grown to what so many connections need.
    """
    with server() as url:
        it = Abuse(url, answers(url))
        asyncio.run(it.run(num_connections, seconds / 5, seed))
        before = books_at_rest(url)
        asyncio.run(it.run(num_connections, seconds, seed + 1))
        after = books_at_rest(url)
        assert answers(url) == it.answers
    return it.counts, before, after


def main() -> int:
    """Print what was done and what was left; return 1 if memory has grown by more than 5 %."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--connections", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    counts, before, after = abuse(options.connections, options.seconds, options.seed)
    growth = after["resident_bytes"] / before["resident_bytes"] - 1
    print(json.dumps({"done": counts, "before": before, "after": after}, indent=1))  # noqa: T201
    print(f"memory: {growth:+.1%}")  # noqa: T201
    return int(growth > 0.05)


if __name__ == "__main__":
    sys.exit(main())
