"""`prefixkv generate`: a few prompts, no server."""

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from typing import TextIO

from prefixkv.api.engine_interface import ServingEngine
from prefixkv.api.generation import Deltas, collect, generate
from prefixkv.api.requests.messages import chat_prompt
from prefixkv.api.requests.prompts import token_prompts
from prefixkv.api.requests.schemas import ChatCompletionRequest, GenerationRequest
from prefixkv.api.service import COMPLETION_MAX_TOKENS, Service


async def print_texts(
    engine: ServingEngine,
    prompts: Sequence[str],
    request: GenerationRequest,
    *,
    is_chat: bool,
    out: TextIO,
) -> None:
    """Answer `prompts` together; print one as it comes, several in their order with a blank line.

    Starts and stops `engine`.

    Raises:
        InvalidRequest: a prompt or an option is wrong.
        StepFailed: the engine failed.
    """
    service = Service(engine=engine, served_model_names=("offline",), max_body_bytes=0)
    default_max_tokens = None if is_chat else COMPLETION_MAX_TOKENS
    params = service.sampling_params(request, default_max_tokens)
    ids = _chats(engine, prompts) if is_chat else _texts(engine, prompts)
    await engine.start()
    try:
        deltas = generate(engine, ids, params, response_id="offline", salt=None, priority=0)
        if len(ids) == 1:
            await _print_live(deltas, out)
        else:
            completions = await collect(deltas, len(ids))
            out.write("\n\n".join(completion.text for completion in completions) + "\n")
    finally:
        await engine.stop()


def generate_and_print(
    engine: ServingEngine,
    prompts: Sequence[str],
    request: GenerationRequest,
    *,
    is_chat: bool,
    out: TextIO,
) -> None:
    """Run `print_texts` to its end."""
    asyncio.run(print_texts(engine, prompts, request, is_chat=is_chat, out=out))


async def _print_live(deltas: Deltas, out: TextIO) -> None:
    async with aclosing(deltas):
        async for _, delta in deltas:
            out.write(delta.text)
            out.flush()
    out.write("\n")


def _chats(engine: ServingEngine, prompts: Sequence[str]) -> list[list[int]]:
    return [
        chat_prompt(
            ChatCompletionRequest(messages=[{"role": "user", "content": prompt}]), engine.tokenizer
        )
        for prompt in prompts
    ]


def _texts(engine: ServingEngine, prompts: Sequence[str]) -> list[list[int]]:
    return token_prompts(
        list(prompts), engine.tokenizer, vocab_size=engine.vocab_size, add_special_tokens=True
    )
