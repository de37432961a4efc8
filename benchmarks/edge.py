"""What a streamed token costs between the engine and the socket, and what holds the event loop up.

    python -P benchmarks/edge.py [--seconds S] [--json FILE]

The real application under uvicorn (uvloop, httptools), in a process of its own, over a real
`AsyncEngine` whose engine is a stub that has one token for each stream every 20 ms; clients are raw
sockets in this process. CPU time is that of the server's threads, from the kernel, less what the
server uses when idle: the event loop's (the main thread) and the engine's, the making of the
deltas, which is the stub's own, taken out of it. Then the longest time that the event loop was
not free while a chat of 200,000 tokens was read, rendered and tokenised beside 8 streams.
"""

import argparse
import asyncio
import json
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, cast

import uvloop

SERVER = Path(__file__).parent / "edge_server.py"
ROUNDS = 3
WORDS_OF_LONG_PROMPT = 200_000


class Cpu(NamedTuple):
    """Seconds on a core: of the event loop's thread, and of the engine's and all others."""

    loop: float
    others: float


class Server:
    """The process, seen from outside."""

    def __init__(self, process: subprocess.Popen[str], port: int) -> None:
        self.pid, self.port = process.pid, port

    def cpu(self) -> Cpu:
        """CPU time so far, the stub's own left out."""
        times = {
            task.name: int((task / "schedstat").read_text().split()[0]) / 1e9
            for task in Path(f"/proc/{self.pid}/task").iterdir()
        }
        loop = times.pop(str(self.pid))
        return Cpu(loop, sum(times.values()) - self.ask("own_cpu"))

    def ask(self, path: str) -> float:
        """Return the number that a path answers with."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/{path}") as response:
            return float(response.read())


@contextmanager
def serving() -> Iterator[Server]:
    """Run the server."""
    command = [sys.executable, "-P", str(SERVER), "warning"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield Server(process, int(process.stdout.readline()))
        finally:
            process.terminate()


class Stream(asyncio.Protocol):
    """One streaming chat; counts its events."""

    def __init__(self, request: bytes) -> None:
        self.num_events = 0
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._request = request

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the request."""
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass
        self.transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        """Count; the server sends each event whole."""
        self.num_events += data.count(b"data: ")

    def connection_lost(self, error: Exception | None) -> None:
        """Tell who waits."""
        self.ended.set_result(None)


def chat(content: str, max_tokens: int) -> bytes:
    """A streaming chat as HTTP."""
    message = {"role": "user", "content": content}
    body = json.dumps({"messages": [message], "stream": True, "max_tokens": max_tokens}).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


async def open_stream(server: Server, request: bytes) -> Stream:
    """Connect and send a request."""
    loop = asyncio.get_running_loop()
    _, stream = await loop.create_connection(lambda: Stream(request), "127.0.0.1", server.port)
    return stream


async def open_streams(server: Server, count: int) -> list[Stream]:
    """Open endless streams, and wait until all have begun."""
    request = chat("Hello!", 1_000_000 // 2)
    streams = [await open_stream(server, request) for _ in range(count)]
    while min(stream.num_events for stream in streams) < 10:
        await asyncio.sleep(0.01)
    return streams


async def close(streams: list[Stream]) -> None:
    """Cut the connections."""
    for stream in streams:
        stream.transport.abort()
    await asyncio.gather(*(stream.ended for stream in streams))
    await asyncio.sleep(0.2)


async def cost_of_a_token(server: Server, count: int, seconds: float) -> Cpu:
    """Microseconds of the two threads for each token of `count` streams."""
    idle = await _spent(server, seconds / 4)
    streams = await open_streams(server, count)
    before = sum(stream.num_events for stream in streams)
    spent = await _spent(server, seconds)
    num_tokens = sum(stream.num_events for stream in streams) - before
    await close(streams)
    assert num_tokens > count * seconds / 0.02 * 0.9, f"{num_tokens} tokens: the server is too slow"
    return Cpu(
        (spent.loop - idle.loop * 4) / num_tokens * 1e6,
        (spent.others - idle.others * 4) / num_tokens * 1e6,
    )


async def _spent(server: Server, seconds: float) -> Cpu:
    before = server.cpu()
    await asyncio.sleep(seconds)
    after = server.cpu()
    return Cpu(after.loop - before.loop, after.others - before.others)


async def gaps(server: Server, seconds: float) -> dict[str, float]:
    """The longest time the loop was not free, in ms: with streams only, and with long prompts."""
    streams = await open_streams(server, 8)
    server.ask("loop_gap")
    await asyncio.sleep(seconds)
    alone = server.ask("loop_gap")
    words = " ".join(f"word{i % 977}" for i in range(WORDS_OF_LONG_PROMPT // 3))
    took, beside = [], []
    for _ in range(ROUNDS):
        began = time.monotonic()
        stream = await open_stream(server, chat(words, 1))
        while not stream.num_events:
            await asyncio.sleep(0.005)
        took.append((time.monotonic() - began) * 1e3)
        await close([stream])
        beside.append(server.ask("loop_gap"))
    await close(streams)
    return {"alone": alone, "beside": max(beside), "long prompt took": median(took)}


async def measure(server: Server, seconds: float) -> dict[str, Any]:
    """All numbers."""
    rows: dict[str, Any] = {}
    for count in (64, 1):
        rounds = [await cost_of_a_token(server, count, seconds) for _ in range(ROUNDS)]
        best = min(rounds, key=sum)
        rows[f"{count} streams"] = best._asdict() | {
            "sum": sum(best),
            "all": list(map(sum, rounds)),
        }
        print(f"{count:3} streams: {sum(best):6.1f} µs a token, {best.loop:.1f} of the event loop")
    rows["gap, ms"] = await gaps(server, seconds)
    print("longest time the loop was not free, ms:", rows["gap, ms"])
    return rows


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with serving() as server:
        rows = uvloop.run(measure(server, options.seconds))
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
