"""Running the prompts of one HTTP request side by side in the engine."""

import asyncio
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing

from prefixkv.api.engine_interface import ServingEngine
from prefixkv.api.schemas import GenerationRequest
from prefixkv.errors import StepFailed
from prefixkv.outputs import Completion, OutputDelta, TokenLogprobs
from prefixkv.sampling_params import SamplingParams

IndexedDelta = tuple[int, OutputDelta]
Deltas = AsyncGenerator[IndexedDelta, None]


def generate(
    engine: ServingEngine,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    request: GenerationRequest,
    response_id: str,
) -> Deltas:
    """Yield (prompt index, delta) as the engine produces them; nothing runs before the first one.

    The first error ends all prompts; so does closing the generator.
    """
    # a client may send one id twice at the same time; the engine's ids stay unique
    unique = uuid.uuid4().hex[:8]
    return _merged(
        [
            engine.generate(
                prompt,
                params,
                request_id=f"{response_id}-{index}-{unique}",
                cache_salt=request.cache_salt,
                priority=request.priority or 0,
            )
            for index, prompt in enumerate(prompts)
        ]
    )


async def collect(deltas: Deltas, num_prompts: int) -> list[Completion]:
    """Run `deltas` to the end and return one completion per prompt."""
    texts: list[list[str]] = [[] for _ in range(num_prompts)]
    logprobs: list[list[TokenLogprobs]] = [[] for _ in range(num_prompts)]
    completions: list[Completion | None] = [None] * num_prompts
    async with aclosing(deltas):
        async for index, delta in deltas:
            texts[index].append(delta.text)
            logprobs[index].extend(delta.logprobs or ())
            if delta.finish_reason is not None:
                completions[index] = Completion(
                    request_id=delta.request_id,
                    text="".join(texts[index]),
                    token_ids=[],
                    finish_reason=delta.finish_reason,
                    usage=delta.usage,
                    stop_reason=delta.stop_reason,
                    logprobs=logprobs[index] if delta.logprobs is not None else None,
                )
    finished = [completion for completion in completions if completion is not None]
    assert len(finished) == num_prompts, "the merged stream checks that each prompt finished"
    return finished


async def _merged(streams: Sequence[AsyncIterator[OutputDelta]]) -> Deltas:
    if len(streams) == 1:
        async with aclosing(_checked(streams[0])) as stream:
            async for delta in stream:
                yield 0, delta
        return
    queue: asyncio.Queue[IndexedDelta | Exception | None] = asyncio.Queue()
    pumps = [asyncio.create_task(_pump(i, stream, queue)) for i, stream in enumerate(streams)]
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


async def _pump(
    index: int,
    stream: AsyncIterator[OutputDelta],
    queue: asyncio.Queue[IndexedDelta | Exception | None],
) -> None:
    try:
        async with aclosing(_checked(stream)) as checked:
            async for delta in checked:
                queue.put_nowait((index, delta))
        queue.put_nowait(None)
    except Exception as error:
        queue.put_nowait(error)


async def _checked(stream: AsyncIterator[OutputDelta]) -> AsyncGenerator[OutputDelta, None]:
    """Pass deltas on; make sure that they end as promised, and that the engine hears of an end."""
    try:
        async for delta in stream:
            if delta.finish_reason in ("abort", "error"):
                raise StepFailed(delta.error or f"the request ended with {delta.finish_reason!r}")
            yield delta
            if delta.finish_reason is not None:
                return
        raise StepFailed("the engine ended the request without a finish reason")
    finally:
        aclose = getattr(stream, "aclose", None)
        if aclose is not None:
            await aclose()
