"""`echo`: the prompt stands before each of its completions, with its log-probabilities."""

import asyncio
import math
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace

from prefixkv.api.engine_interface import Tokenizer
from prefixkv.api.generation import Deltas
from prefixkv.api.replies.logprobs import MANY_LOGPROBS
from prefixkv.outputs import OutputDelta, TokenLogprobs


@dataclass(frozen=True, slots=True)
class Echo:
    """One prompt as it is told again; `text` as it came, or what its tokens spell."""

    text: str
    token_ids: Sequence[int]


def make_echo(prompt: str | Sequence[int], token_ids: Sequence[int], tokenizer: Tokenizer) -> Echo:
    """Return the echo of a prompt that came as a text or as token ids."""
    if isinstance(prompt, str):
        return Echo(prompt, token_ids)
    special = tokenizer.special_token_ids
    spelled = b"".join(tokenizer.token_bytes(i) for i in token_ids if i not in special)
    return Echo(spelled.decode("utf-8", "replace"), token_ids)


async def echoed(
    deltas: Deltas, echoes: Sequence[Echo], *, num_top: int | None, is_all: bool
) -> Deltas:
    """Put each prompt before the first delta of each of its outputs.

    `num_top` likeliest tokens are told of at each position, as in the output; None for no scores.
    With `is_all` (`max_tokens: 0`) the outputs are nothing but the echo: the engine draws a token,
    which is left out.
    """
    told: set[tuple[int, int]] = set()
    scores: dict[int, tuple[TokenLogprobs, ...] | None] = {}
    async with aclosing(deltas):
        async for prompt, delta in deltas:
            if prompt not in scores:  # the first delta of a request brings them
                told_again = echoes[prompt], delta, num_top
                if len(delta.prompt_logprobs or ()) > MANY_LOGPROBS:
                    scores[prompt] = await asyncio.to_thread(_scores, *told_again)
                else:
                    scores[prompt] = _scores(*told_again)
            if is_all:
                delta = _without_output(delta)
            if (prompt, delta.index) not in told:
                told.add((prompt, delta.index))
                delta = _behind(echoes[prompt], scores[prompt], delta)
            yield prompt, delta


def _scores(
    echo: Echo, delta: OutputDelta, num_top: int | None
) -> tuple[TokenLogprobs, ...] | None:
    if delta.prompt_logprobs is None or num_top is None:
        return None
    # the first token has no value
    return tuple(
        value._replace(top=value.top[:num_top]) if value else TokenLogprobs(token_id, math.nan, 0)
        for token_id, value in zip(echo.token_ids, delta.prompt_logprobs, strict=True)
    )


def _behind(
    echo: Echo, scores: tuple[TokenLogprobs, ...] | None, delta: OutputDelta
) -> OutputDelta:
    logprobs = delta.logprobs
    if logprobs is not None and scores is not None:
        logprobs = scores + logprobs
    return replace(delta, text=echo.text + delta.text, logprobs=logprobs)


def _without_output(delta: OutputDelta) -> OutputDelta:
    return replace(
        delta,
        text="",
        token_ids=(),
        logprobs=() if delta.logprobs is not None else None,
        usage=replace(delta.usage, num_completion_tokens=0),
        finish_reason="length" if delta.finish_reason == "stop" else delta.finish_reason,
        stop_reason=None,
    )
