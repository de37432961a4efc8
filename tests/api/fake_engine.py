"""An engine and a tokenizer without a model: bytes are tokens, and the answer is the alphabet."""

import asyncio
import json
import string
from collections.abc import AsyncIterator, Mapping, Sequence
from copy import copy
from dataclasses import replace
from typing import Any

from prefixkv.admission import refuse_beside_beams
from prefixkv.cache_control import CacheControl, CacheReport
from prefixkv.engine_stats import EngineStats, ServingStats
from prefixkv.errors import ContextLengthExceeded, EngineStopped, InvalidRequest
from prefixkv.outputs import (
    BranchOutput,
    FinishReason,
    OutputDelta,
    PromptLogprob,
    TokenLogprobs,
    Usage,
)
from prefixkv.request_times import RequestTimes
from prefixkv.sampling_params import SamplingParams

ALPHABET = string.ascii_lowercase
VOCAB_SIZE = 100_000
MAX_MODEL_LEN = 200_000
DEFAULT_NUM_TOKENS = 26


class ByteTokenizer:
    """UTF-8 bytes as ids; a chat is its messages behind their roles."""

    special_token_ids = frozenset[int]()

    def token_bytes(self, token_id: int) -> bytes:
        """Return the character of that number: what the fake engine makes of ids."""
        return chr(token_id).encode()

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the bytes of `text`."""
        return list(text.encode())

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of bytes."""
        return bytes(token_id % 256 for token_id in token_ids).decode("utf-8", "replace")

    def token_strings(self, token_ids: Sequence[int]) -> list[str]:
        """Return hexadecimal numbers."""
        return [f"{token_id:02x}" for token_id in token_ids]

    def describe(self) -> dict[str, Any]:
        """Return a part of what a real one tells."""
        return {"tokenizer_class": "ByteTokenizer", "eos_token": None}

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        **template_kwargs: Any,
    ) -> list[int]:
        """Return the bytes of a plain transcript."""
        return self.encode(self.chat_text(messages, add_generation_prompt, **template_kwargs))

    def chat_text(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        **template_kwargs: Any,
    ) -> str:
        """Return a plain transcript."""
        lines = [f"<{m['role']}>{_text(m['content'])}{_calls(m)}" for m in messages]
        lines += [f"<{name}={value}>" for name, value in sorted(template_kwargs.items())]
        return "\n".join(lines) + ("\n<assistant>" if add_generation_prompt else "")


class Answer:
    """One branch: the script from its own letter on."""

    def __init__(self, index: int, script: str, num_tokens: int, params: SamplingParams) -> None:
        self.is_over = False
        self._index = index
        self._script = script[index:] + script[:index]
        self._num_tokens = num_tokens
        self._params = params
        self._told = BranchOutput()

    def delta(self, step: int, usage: Usage, request_id: str, num_hidden: int) -> OutputDelta:
        """Return the next letter, or the end."""
        params = self._params
        text = self._script[step % len(self._script)]
        reason: FinishReason | None = "length" if step == self._num_tokens - 1 else None
        stop_reason: int | str | None = None
        if text in params.stop or ord(text) in params.stop_token_ids:
            reason, stop_reason = "stop", text if text in params.stop else ord(text)
            text = ""
        if step < num_hidden:
            text = ""
        self.is_over = reason is not None
        token_id = ord(text or "a")
        delta = OutputDelta(
            request_id, text, (token_id,), copy(usage), reason, stop_reason,
            logprobs=_logprobs(token_id, params.logprobs), index=self._index,
        )  # fmt: skip
        self._told.add(delta)
        return delta

    def whole(self, index: int, usage: Usage, request_id: str) -> OutputDelta:
        """Return all at once, as number `index` of what was ranked."""
        told = self._told
        logprobs = tuple(told.logprobs) if told.logprobs is not None else None
        return OutputDelta(
            request_id, told.text, tuple(told.token_ids), copy(usage), told.finish_reason,
            told.stop_reason, logprobs=logprobs, index=index, score=-0.5 * (index + 1),
        )  # fmt: skip


class FakeEngine:
    """Answers every prompt with the alphabet, a letter a step; further branches begin further on.

    Of ranked branches the last one is the best.

    A test may set `error` (raised before the first delta), `fail_after` (deltas before `failure`
    is raised), `step_s` and `pause_after` (deltas before a very long step) and `cache_report`
    (told with the last delta), and may read the rest.
    """

    def __init__(self) -> None:
        self.tokenizer = ByteTokenizer()
        self.vocab_size = VOCAB_SIZE
        self.is_running = False
        self.reset()

    def reset(self) -> None:
        """Forget what a test set and what it saw."""
        self.max_model_len = MAX_MODEL_LEN
        self.sampling_defaults: dict[str, float | int] = {}
        self.error: Exception | None = None
        self.failure: Exception = RuntimeError("a secret of the server")
        self.fail_after: int | None = None
        self.step_s = 0.0
        self.pause_after: int | None = None
        self.num_hidden_steps = 0
        self.script: str = ALPHABET
        self.cache_report: CacheReport | None = None
        self.calls: list[dict[str, Any]] = []
        self.num_aborts = 0
        self.num_resets = 0
        self.num_active = 0

    @property
    def prompts(self) -> list[str]:
        """The prompts so far, as text."""
        return [bytes(call["prompt"]).decode() for call in self.calls]

    async def start(self) -> None:
        """Begin to accept requests."""
        self.is_running = True

    async def stop(self) -> None:
        """Refuse what comes, and end what runs at its next step."""
        self.is_running = False

    async def snapshot(self) -> ServingStats:
        """Return nothing but zeros."""
        self._require_running()
        histograms = RequestTimes(self.max_model_len).copy()
        return ServingStats(engine=EngineStats(), histograms=histograms, num_finished={}, config={})

    async def reset_prefix_cache(self) -> None:
        """Count how often it was asked to forget."""
        self._require_running()
        self.num_resets += 1

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
        """Yield one letter after another."""
        self._require_running()
        if self.error is not None:
            raise self.error
        if params.use_beam_search:
            refuse_beside_beams(params, self.vocab_size)
        num_left = self.max_model_len - len(prompt)
        num_tokens = min(params.max_tokens or DEFAULT_NUM_TOKENS, num_left)
        if num_left < (params.max_tokens or 1):
            raise ContextLengthExceeded(
                f"{len(prompt)} prompt tokens leave {num_left} of {self.max_model_len}", "prompt"
            )
        num_cached = self._num_cached(prompt)
        call = {"prompt": list(prompt), "params": params, "request_id": request_id}
        self.calls.append(
            call | {"cache_salt": cache_salt, "priority": priority, "cache_control": cache_control}
        )
        usage = _usage(len(prompt), num_cached, cache_control)
        answers = [Answer(i, self.script, num_tokens, params) for i in range(params.num_branches)]
        scores = _prompt_logprobs(prompt, params.prompt_logprobs)
        self.num_active += 1
        is_finished = False
        try:
            for step in range(num_tokens):
                await asyncio.sleep(60 if step == self.pause_after else self.step_s)
                self._require_running()
                if step == self.fail_after:
                    raise self.failure
                for answer in (answer for answer in answers if not answer.is_over):
                    usage.num_completion_tokens += 1
                    delta = answer.delta(step, usage, request_id or "", self.num_hidden_steps)
                    is_finished = all(answer.is_over for answer in answers)
                    report = self.cache_report if is_finished else None
                    if not params.is_ranked:
                        yield replace(delta, prompt_logprobs=scores, cache_report=report)
                        scores = None
            if params.is_ranked:
                for index, answer in enumerate(answers[::-1][: params.n]):
                    whole = answer.whole(index, usage, request_id or "")
                    yield whole if index else replace(whole, prompt_logprobs=scores)
        finally:
            self.num_active -= 1
            self.num_aborts += not is_finished

    def _num_cached(self, prompt: Sequence[int]) -> int:
        return max((_common(prompt, call["prompt"]) for call in self.calls), default=0)

    def _require_running(self) -> None:
        if not self.is_running:
            raise EngineStopped("the engine is stopped")


def _usage(num_prompt: int, num_cached: int, control: CacheControl | None) -> Usage:
    limit = control.write_limit if control is not None else None
    num_findable = num_prompt if limit is None else min(limit, num_prompt)
    num_written = max(0, num_findable - num_cached)
    return Usage(num_prompt, num_cached, num_cache_write_tokens=num_written)


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    pairs = zip(one[:-1], other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one) - 1, len(other)))


def _logprobs(token_id: int, num_top: int | None) -> tuple[TokenLogprobs, ...] | None:
    """Say that capital letters, from A on, are likelier than the letter that was chosen."""
    if num_top is None:
        return None
    top = tuple((ord("A") + i, -0.25 * (i + 1)) for i in range(num_top))
    return (TokenLogprobs(token_id, -6.5, 27, top),)


def _prompt_logprobs(
    prompt: Sequence[int], num_top: int | None
) -> tuple[PromptLogprob, ...] | None:
    """Say of each token of the prompt what is said of those of the output."""
    if num_top is None:
        return None
    return (None, *(entry for i in prompt[1:] for entry in _logprobs(i, num_top) or ()))


def _text(content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if any(part.get("type") != "text" for part in content):
        raise InvalidRequest("only text parts are supported")
    return "".join(part["text"] for part in content)


def _calls(message: Mapping[str, Any]) -> str:
    return json.dumps(message["tool_calls"]) if "tool_calls" in message else ""
