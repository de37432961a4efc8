"""Running the prompts of one HTTP request side by side in the engine."""

import asyncio
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing

from prefixkv.api.engine_interface import ServingEngine
from prefixkv.cache_control import CacheControl
from prefixkv.errors import StepFailed
from prefixkv.outputs import BranchOutput, Completion, OutputDelta, Usage
from prefixkv.sampling_params import SamplingParams

IndexedDelta = tuple[int, OutputDelta]
"""The number of the prompt, and a delta of one of its outputs."""

Deltas = AsyncGenerator[IndexedDelta, None]


def generate(
    engine: ServingEngine,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    *,
    response_id: str,
    salt: str | None,
    priority: int,
    cache_controls: Sequence[CacheControl | None] = (),
) -> Deltas:
    """Yield (prompt index, delta) as the engine produces them; nothing runs before the first one.

    The first error ends all prompts; so does closing the generator. `cache_controls` has one for
    each prompt, or none at all.
    """
    # a client may send one id twice at the same time; the engine's ids stay unique
    unique = uuid.uuid4().hex[:8]
    streams = [
        _checked(
            index,
            engine.generate(
                prompt,
                params,
                request_id=f"{response_id}-{index}-{unique}",
                cache_salt=salt,
                priority=priority,
                cache_control=cache_controls[index] if cache_controls else None,
            ),
            params.n,
        )
        for index, prompt in enumerate(prompts)
    ]
    return streams[0] if len(streams) == 1 else _merged(streams)


async def first_of(deltas: Deltas) -> IndexedDelta:
    """Wait for the first delta: what the engine refuses is raised here."""
    return await anext(deltas)


async def collect(deltas: Deltas, num_prompts: int, num_outputs: int = 1) -> list[Completion]:
    """Run `deltas` to the end; return one completion per prompt, with `num_outputs` outputs."""
    completions = [
        Completion("", Usage(), [BranchOutput(index) for index in range(num_outputs)])
        for _ in range(num_prompts)
    ]
    async with aclosing(deltas):
        async for index, delta in deltas:
            completion = completions[index]
            completion.request_id = delta.request_id
            completion.usage = delta.usage
            completion.add(delta)
    return completions


async def _merged(streams: Sequence[Deltas]) -> Deltas:
    queue: asyncio.Queue[IndexedDelta | Exception | None] = asyncio.Queue()
    pumps = [asyncio.create_task(_pump(stream, queue)) for stream in streams]
    try:
        num_running = len(pumps)
        while num_running:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                num_running -= 1
            else:
                yield item
    finally:
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


async def _pump(stream: Deltas, queue: asyncio.Queue[IndexedDelta | Exception | None]) -> None:
    try:
        async with aclosing(stream):
            async for item in stream:
                queue.put_nowait(item)
        queue.put_nowait(None)
    except Exception as error:
        queue.put_nowait(error)


async def _checked(index: int, stream: AsyncIterator[OutputDelta], num_outputs: int) -> Deltas:
    """Pass deltas on; make sure that they end as promised, and that the engine hears of an end."""
    num_open = num_outputs
    try:
        async for delta in stream:
            if delta.finish_reason is None:
                yield index, delta
                continue
            if delta.finish_reason in ("abort", "error"):
                raise StepFailed(delta.error or f"the request ended with {delta.finish_reason!r}")
            yield index, delta
            num_open -= 1
            if not num_open:
                return
        raise StepFailed(f"the engine ended {num_open} outputs without a finish reason")
    finally:
        aclose = getattr(stream, "aclose", None)
        if aclose is not None:
            await aclose()
