"""uvicorn that says when it is ready, and ends requests and itself without violence."""

import logging
import signal
import socket
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import uvicorn

from prefixkv.api.engine_interface import ServingEngine
from prefixkv.api.serving.draining import Drain

logger = logging.getLogger("prefixkv.api")


class GracefulServer(uvicorn.Server):
    """Drains after a signal: goes on listening, so that all can see it, until the last answer.

    uvicorn alone stops to listen at once, and a load balancer would see broken connections where
    it should see that the server is not ready. A second signal ends the patience.

    Args:
        config: of uvicorn.
        engine: stopped when the drain is over; what still runs gets an error then, in its stream
            or as a status.
        drain: told of the signal.
        shutdown_timeout_s: how long the drain may take.
        on_ready: called when connections are accepted.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        engine: ServingEngine,
        drain: Drain,
        shutdown_timeout_s: float,
        on_ready: Callable[[], None],
    ) -> None:
        super().__init__(config)
        self._engine = engine
        self._drain = drain
        self._shutdown_timeout_s = shutdown_timeout_s
        self._on_ready = on_ready
        self._deadline: float | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._on_ready()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._drain.has_begun:
            self._deadline = time.monotonic()
        self._drain.begin()
        self.should_exit = True

    async def on_tick(self, counter: int) -> bool:
        return await super().on_tick(counter) and self._is_drained()

    def _is_drained(self) -> bool:
        num_running = self._drain.num_running
        if self._deadline is None:
            self._deadline = time.monotonic() + self._shutdown_timeout_s
            if num_running:
                logger.info(
                    "shutting down: %d requests may go on for %g s",
                    num_running,
                    self._shutdown_timeout_s,
                )
        return not num_running or time.monotonic() >= self._deadline

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await self._engine.stop()
        await super().shutdown(sockets)

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        # the original raises the signal again at the end, which would be the exit status
        with on_signals(self.handle_exit):
            yield


@contextmanager
def on_signals(handler: Callable[[int, FrameType | None], Any]) -> Iterator[None]:
    """Give SIGINT and SIGTERM to `handler` meanwhile, where the thread may do that."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = {sig: signal.signal(sig, handler) for sig in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for sig, old in previous.items():
            signal.signal(sig, old)
