"""The engine behind asyncio: one worker thread runs the steps, any number of tasks wait.

The worker owns the engine. Tasks hand it commands through a queue; it hands the deltas of a step
over in one call into the event loop, whatever the number of streams.
"""

import asyncio
import contextlib
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, TypeVar

from prefixkv.cache_control import CacheControl
from prefixkv.engine import Engine
from prefixkv.engine_stats import ServingStats, read_stats
from prefixkv.errors import EngineStopped, PrefixKVError, StepFailed
from prefixkv.outputs import OutputDelta
from prefixkv.request_times import RequestTimes
from prefixkv.sampling_params import SamplingParams
from prefixkv.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

Command = Callable[[], object]
T = TypeVar("T")


class Inbox:
    """What one stream is told, from the event loop to the one task that waits for it.

    An `asyncio.Queue` does more than that, and costs more for each token.
    """

    __slots__ = ("_items", "_waiter")

    def __init__(self) -> None:
        self._items: deque[OutputDelta | Exception] = deque()
        self._waiter: asyncio.Future[None] | None = None

    def put(self, item: OutputDelta | Exception) -> None:
        """Add an item, and wake who waits."""
        self._items.append(item)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def get(self) -> OutputDelta | Exception:
        """Take the oldest item; wait until there is one."""
        while not self._items:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return self._items.popleft()


class AsyncEngine:
    """Serves one `Engine` to many tasks; `start` before, `stop` after.

    Attributes:
        engine: owned by the worker thread while that runs; `run` reaches it from outside.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._times = RequestTimes(engine.max_model_len)
        self._commands: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self._inboxes: dict[str, Inbox] = {}
        self._worker: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pending: set[asyncio.Future[Any]] = set()
        self._stopping = False
        self._num_requests = 0

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the served model."""
        return self.engine.tokenizer

    @property
    def max_model_len(self) -> int:
        """Prompt and output tokens of one request, at most."""
        return self.engine.max_model_len

    @property
    def vocab_size(self) -> int:
        """Token ids are in [0, vocab_size)."""
        return self.engine.model.facts.vocab_size

    @property
    def sampling_defaults(self) -> Mapping[str, float]:
        """What the model's makers set of temperature, top_k, top_p and the like."""
        return self.engine.model.facts.sampling_defaults

    @property
    def is_running(self) -> bool:
        """Whether requests are accepted."""
        return self._worker is not None and self._worker.is_alive() and not self._stopping

    # -- life ------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start the worker. Raises EngineStopped if it was stopped before."""
        if self._stopping:
            raise EngineStopped("the engine was stopped; make a new one")
        if self._worker is None:
            self._loop = asyncio.get_running_loop()
            self._worker = threading.Thread(target=self._work, name="prefixkv-engine", daemon=True)
            self._worker.start()

    async def stop(self) -> None:
        """End all requests with EngineStopped, and wait for the worker to end."""
        self._stopping = True
        if self._worker is None:
            return
        self._commands.put(None)
        await asyncio.to_thread(self._worker.join)

    # -- requests --------------------------------------------------------------------------------

    async def generate(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        cache_salt: str | None = None,
        priority: int = 0,
        cache_control: CacheControl | None = None,
    ) -> AsyncIterator[OutputDelta]:
        """Yield the deltas of a request; the last of each of its `n` outputs has a finish reason.

        Closing or cancelling the iterator aborts the request.

        Raises:
            InvalidRequest, QueueFull: before the first delta.
            StepFailed: if a step of the request failed.
            EngineStopped: if the engine does not run, or is stopped meanwhile.
        """
        key, began = self._new_key(request_id), time.monotonic()
        inbox = self._inboxes[key] = Inbox()

        def add() -> None:
            request = self.engine.add(
                prompt,
                params,
                request_id=key,
                cache_salt=cache_salt,
                priority=priority,
                cache_control=cache_control,
            )
            self._times.arrived(request, began)

        try:
            await self.run(add)
            num_open = params.n
            while num_open:
                delta = await inbox.get()
                if isinstance(delta, Exception):
                    raise delta
                if delta.finish_reason is not None:
                    if delta.finish_reason == "error":
                        raise StepFailed(delta.error)
                    num_open -= 1
                yield delta
        finally:
            del self._inboxes[key]
            # a no-op for one that has ended; in order after the add, whatever became of that
            self._commands.put(lambda: self._abort(key))

    def _new_key(self, request_id: str | None) -> str:
        """Clients may repeat an id; the engine's are unique."""
        self._num_requests += 1
        return f"{request_id or 'request'}-{self._num_requests}"

    async def run(self, command: Callable[[], T]) -> T:
        """Run a command on the worker between two steps, and return what it returns.

        Raises:
            EngineStopped: if the engine does not run, or not on this event loop.
        """
        if not self.is_running:
            raise EngineStopped("the engine is not running")
        if asyncio.get_running_loop() is not self._loop:
            raise EngineStopped("the engine was started on another event loop")
        future: asyncio.Future[T] = self._loop.create_future()

        def execute() -> None:
            try:
                result = command()
            except Exception as error:
                self._hand_over(_settle, future, None, error)
            else:
                self._hand_over(_settle, future, result, None)

        self._pending.add(future)
        try:
            self._commands.put(execute)
            return await future
        finally:
            self._pending.discard(future)

    async def reset_prefix_cache(self) -> None:
        """Forget all that is cached or held; running requests go on."""
        await self.run(self.engine.reset_prefix_cache)

    async def stats(self) -> dict[str, int | float]:
        """The engine's counts for monitoring."""
        return await self.run(self.engine.stats)

    async def snapshot(self) -> ServingStats:
        """All there is for monitoring; O(blocks) of the worker's time, between two steps."""

        def read() -> ServingStats:
            return ServingStats(
                engine=read_stats(self.engine),
                histograms=self._times.copy(),
                num_finished=dict(self._times.num_finished),
                config=self._cache_config(),
            )

        return await self.run(read)

    def _cache_config(self) -> dict[str, str]:
        cache = self.engine.cache
        return {
            "block_size": str(cache.block_size),
            "num_gpu_blocks": str(cache.pool.num_usable),
            "enable_prefix_caching": str(cache.enabled),
            "cache_dtype": self.engine.identity.kv_dtype.removeprefix("torch."),
        }

    # -- the worker ------------------------------------------------------------------------------

    def _work(self) -> None:
        reason = "the engine was stopped"
        try:
            while self._run_commands():
                self._step()
            self.engine.abort_all()
        except BaseException as error:  # whatever it is, nobody may wait for ever
            logger.exception("the engine died")
            reason = f"the engine died: {type(error).__name__}: {error}"
        finally:
            self._hand_over(self._end_all, EngineStopped(reason))

    def _step(self) -> None:
        engine, times, began = self.engine, self._times, time.monotonic()
        num_admissions, num_tokens = engine.scheduler.num_admissions, engine.num_computed_tokens
        deltas = engine.step()
        if deltas:
            self._hand_over(self._deliver, deltas)
        if engine.scheduler.num_admissions != num_admissions:
            times.admitted(began)
        times.stepped(engine.num_computed_tokens - num_tokens, deltas, time.monotonic())

    def _abort(self, key: str) -> None:
        if self.engine.abort(key):
            self._times.aborted(key)

    def _hand_over(self, call: Callable[..., object], *arguments: object) -> None:
        """Call something on the loop, if there still is one."""
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(call, *arguments)

    def _run_commands(self) -> bool:
        """Run what is queued; wait for a command if there is nothing else to do."""
        while True:
            try:
                command = self._commands.get(block=not self.engine.has_work)
            except queue.Empty:
                return True
            if command is None:
                return False
            command()

    def _deliver(self, deltas: list[OutputDelta]) -> None:
        for delta in deltas:
            inbox = self._inboxes.get(delta.request_id)
            if inbox is not None:
                inbox.put(delta)

    def _end_all(self, error: PrefixKVError) -> None:
        self._stopping = True
        for inbox in self._inboxes.values():
            inbox.put(error)
        for future in self._pending:
            if not future.done():
                future.set_exception(error)


def _settle(future: asyncio.Future[Any], result: object, error: Exception | None) -> None:
    """Runs on the loop; the waiter may have been cancelled."""
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)
