"""What the HTTP layer needs from an engine; `prefixkv.async_engine.AsyncEngine` provides it."""

from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from typing import Any, Protocol

from prefixkv.cache_control import CacheControl
from prefixkv.engine_stats import ServingStats
from prefixkv.outputs import OutputDelta
from prefixkv.sampling_params import SamplingParams


class Tokenizer(Protocol):
    """Text to token ids and back; called from several threads at once."""

    @property
    def special_token_ids(self) -> Collection[int]:
        """Tokens that are no part of a text."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """Return what the token adds to a text as UTF-8, perhaps half a character."""
        ...

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of `text`; raises InvalidRequest where it cannot be encoded."""
        ...

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of the tokens; broken characters become U+FFFD."""
        ...

    def token_strings(self, token_ids: Sequence[int]) -> list[str]:
        """Return each token as the vocabulary spells it."""
        ...

    def describe(self) -> dict[str, Any]:
        """Return the tokenizer's class, special tokens and chat template, for JSON."""
        ...

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        **template_kwargs: Any,
    ) -> list[int]:
        """Return the ids of the rendered chat; raises InvalidRequest on messages it refuses."""
        ...

    def chat_text(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        **template_kwargs: Any,
    ) -> str:
        """Return the rendered chat, special tokens spelled out; raises as `render_chat`."""
        ...


class ServingEngine(Protocol):
    """An engine that answers many requests at once on the event loop."""

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the served model."""
        ...

    @property
    def max_model_len(self) -> int:
        """Prompt and output tokens of one request, at most."""
        ...

    @property
    def vocab_size(self) -> int:
        """Token ids are in [0, vocab_size)."""
        ...

    @property
    def sampling_defaults(self) -> Mapping[str, float | int]:
        """The model's own temperature, top_k, top_p and the like, where its authors gave them."""
        ...

    @property
    def is_running(self) -> bool:
        """Whether requests are accepted."""
        ...

    def generate(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        cache_salt: str | None = None,
        priority: int = 0,
        cache_control: CacheControl | None = None,
    ) -> AsyncIterator[OutputDelta]:
        """Yield deltas until each of the `n` outputs has had one with a finish reason.

        What is wrong with the request is raised on the first `__anext__`. Cancelling or closing
        the iterator aborts the request.
        """
        ...

    async def snapshot(self) -> ServingStats:
        """Return what the engine counts; raises EngineStopped if it does not run."""
        ...

    async def reset_prefix_cache(self) -> None:
        """Forget all that is cached or held; running requests go on."""
        ...

    async def start(self) -> None:
        """Begin to accept requests."""
        ...

    async def stop(self) -> None:
        """End all requests with EngineStopped and accept no more."""
        ...
