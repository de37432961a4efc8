"""The real application over a stub engine, as a process of its own for `benchmarks/edge.py`.

The engine is a real `AsyncEngine` over a stub that needs no model: every step sleeps until its time
has come, then has one token for each stream. It prints its port, and answers two further paths:
`/loop_gap` (the longest time the event loop was not free since it was last asked, in ms) and
`/own_cpu` (CPU seconds that the stub itself spent).
"""

import asyncio
import socket
import sys
import time
from copy import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import uvicorn
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from prefixkv import default_model
from prefixkv.api.app import create_app
from prefixkv.async_engine import AsyncEngine
from prefixkv.engine import Engine
from prefixkv.outputs import OutputDelta, Usage
from prefixkv.tokenizer import Tokenizer

STEP_S = 0.02
TICK_S = 0.001
TEXT = " token"


class StubEngine:
    """Has a token for every request at each step, `STEP_S` after the one before."""

    max_model_len = 1_000_000

    def __init__(self, tokenizer: Tokenizer) -> None:
        facts = SimpleNamespace(vocab_size=tokenizer.vocab_size, sampling_defaults={})
        self.tokenizer = tokenizer
        self.model = SimpleNamespace(facts=facts)
        self.num_computed_tokens = 0
        self.scheduler = SimpleNamespace(num_admissions=0)
        self.own_cpu_s = 0.0
        self._left: dict[str, tuple[SimpleNamespace, int]] = {}
        self._next_step = 0.0

    @property
    def has_work(self) -> bool:
        """Whether any stream is open."""
        return bool(self._left)

    def add(self, prompt: Any, params: Any, *, request_id: str, **_: object) -> SimpleNamespace:
        """Open a stream."""
        usage = Usage(num_prompt_tokens=len(prompt))
        request = SimpleNamespace(
            request_id=request_id,
            usage=usage,
            params=params,
            admission=self.scheduler.num_admissions,
        )
        self.scheduler.num_admissions += 1
        self._left[request_id] = request, params.max_tokens
        return request

    def abort(self, request_id: str) -> bool:
        """Close a stream."""
        return self._left.pop(request_id, None) is not None

    def abort_all(self) -> None:
        """Close all."""
        self._left.clear()

    def step(self) -> list[OutputDelta]:
        """Wait for the next step and return its tokens."""
        now = time.monotonic()
        self._next_step = max(self._next_step + STEP_S, now)
        time.sleep(self._next_step - now)
        began = time.thread_time()
        deltas = [self._delta(*entry) for entry in list(self._left.values())]
        self.num_computed_tokens += len(deltas)
        self.own_cpu_s += time.thread_time() - began
        return deltas

    def _delta(self, request: SimpleNamespace, left: int) -> OutputDelta:
        request_id, usage = request.request_id, request.usage
        usage.num_completion_tokens += 1
        self._left[request_id] = request, left - 1
        if left == 1:
            del self._left[request_id]
        return OutputDelta(request_id, TEXT, (5,), copy(usage), "length" if left == 1 else None)


class LoopGap:
    """How long the event loop was not free, at worst."""

    def __init__(self) -> None:
        self._worst = 0.0

    async def watch(self) -> None:
        """Sleep in short turns and note by how much each was too long."""
        while True:
            before = time.monotonic()
            await asyncio.sleep(TICK_S)
            self._worst = max(self._worst, time.monotonic() - before - TICK_S)

    def take(self) -> float:
        """Return the worst so far, in ms, and begin anew."""
        worst, self._worst = self._worst, 0.0
        return worst * 1e3


def main() -> None:
    """Serve until killed."""
    folder = default_model.fetch()
    stub = StubEngine(Tokenizer.from_folder(Path(folder)))
    app = create_app(AsyncEngine(cast(Engine, stub)), ["stub"])
    gap = LoopGap()
    watchers: list[asyncio.Task[None]] = []

    async def loop_gap(request: Request) -> Response:
        if not watchers:
            watchers.append(asyncio.create_task(gap.watch()))
        return JSONResponse(gap.take())

    async def own_cpu(request: Request) -> Response:
        return JSONResponse(stub.own_cpu_s)

    app.add_route("/loop_gap", loop_gap)
    app.add_route("/own_cpu", own_cpu)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        print(listener.getsockname()[1], flush=True)
        config = uvicorn.Config(app, log_level=sys.argv[1] if sys.argv[1:] else "info", ws="none")
        uvicorn.Server(config).run(sockets=[listener])


if __name__ == "__main__":
    main()
