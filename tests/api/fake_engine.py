"""An engine and a tokenizer without a model: bytes are tokens, and the answer is the alphabet."""

import asyncio
import json
import string
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from prefixkv.errors import ContextLengthExceeded, EngineStopped, InvalidRequest
from prefixkv.outputs import FinishReason, OutputDelta, TokenLogprobs, Usage
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

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        **template_kwargs: Any,
    ) -> list[int]:
        """Return the bytes of a plain transcript."""
        lines = [f"<{m['role']}>{_text(m['content'])}{_calls(m)}" for m in messages]
        lines += [f"<{name}={value}>" for name, value in sorted(template_kwargs.items())]
        return self.encode("\n".join(lines) + ("\n<assistant>" if add_generation_prompt else ""))


class FakeEngine:
    """Answers every prompt with the alphabet, a letter a step.

    A test may set `error` (raised before the first delta), `fail_after` (deltas before `failure`
    is raised), `step_s` and `pause_after` (deltas before a very long step), and may read the rest.
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
        self.calls: list[dict[str, Any]] = []
        self.num_aborts = 0
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

    async def generate(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        cache_salt: str | None = None,
        priority: int = 0,
    ) -> AsyncIterator[OutputDelta]:
        """Yield one letter after another."""
        self._require_running()
        if self.error is not None:
            raise self.error
        num_left = self.max_model_len - len(prompt)
        num_tokens = min(params.max_tokens or DEFAULT_NUM_TOKENS, num_left)
        if num_left < (params.max_tokens or 1):
            raise ContextLengthExceeded(
                f"{len(prompt)} prompt tokens leave {num_left} of {self.max_model_len}", "prompt"
            )
        num_cached = self._num_cached(prompt)
        call = {"prompt": list(prompt), "params": params, "request_id": request_id}
        self.calls.append(call | {"cache_salt": cache_salt, "priority": priority})
        usage = Usage(num_prompt_tokens=len(prompt), num_cached_tokens=num_cached)
        self.num_active += 1
        is_finished = False
        try:
            for step in range(num_tokens):
                await asyncio.sleep(60 if step == self.pause_after else self.step_s)
                self._require_running()
                if step == self.fail_after:
                    raise self.failure
                delta = self._delta(step, num_tokens, params, usage, request_id or "")
                is_finished = delta.finish_reason is not None
                yield delta
                if is_finished:
                    return
        finally:
            self.num_active -= 1
            self.num_aborts += not is_finished

    def _delta(
        self, step: int, num_tokens: int, params: SamplingParams, usage: Usage, request_id: str
    ) -> OutputDelta:
        usage.num_completion_tokens += 1
        text = self.script[step % len(self.script)]
        reason: FinishReason | None = "length" if step == num_tokens - 1 else None
        stop_reason: int | str | None = None
        if text in params.stop or ord(text) in params.stop_token_ids:
            reason, stop_reason = "stop", text if text in params.stop else ord(text)
            text = ""
        if step < self.num_hidden_steps:
            text = ""
        token_id = ord(text or "a")
        logprobs = _logprobs(token_id, params.logprobs)
        return OutputDelta(
            request_id, text, (token_id,), usage, reason, stop_reason, logprobs=logprobs
        )

    def _num_cached(self, prompt: Sequence[int]) -> int:
        return max((_common(prompt, call["prompt"]) for call in self.calls), default=0)

    def _require_running(self) -> None:
        if not self.is_running:
            raise EngineStopped("the engine is stopped")


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    pairs = zip(one[:-1], other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one) - 1, len(other)))


def _logprobs(token_id: int, num_top: int | None) -> tuple[TokenLogprobs, ...] | None:
    """Say that capital letters, from A on, are likelier than the letter that was chosen."""
    if num_top is None:
        return None
    top = tuple((ord("A") + i, -0.25 * (i + 1)) for i in range(num_top))
    return (TokenLogprobs(token_id, -6.5, 27, top),)


def _text(content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if any(part.get("type") != "text" for part in content):
        raise InvalidRequest("only text parts are supported")
    return "".join(part["text"] for part in content)


def _calls(message: Mapping[str, Any]) -> str:
    return json.dumps(message["tool_calls"]) if "tool_calls" in message else ""
