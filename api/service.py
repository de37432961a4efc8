"""What all routes share: the engine, its public names, and how a request becomes sampling."""

import time
from dataclasses import dataclass, field
from typing import Any

from prefixkv.api.caching.explanations import Explanations
from prefixkv.api.conversations.response_store import ResponseStore
from prefixkv.api.engine_interface import ServingEngine
from prefixkv.api.history.token_memory import TokenMemory
from prefixkv.api.requests.prompts import require_token_ids
from prefixkv.api.requests.schemas import GenerationRequest
from prefixkv.api.requests.unknown_fields import UnknownFields
from prefixkv.api.serving.draining import Drain
from prefixkv.errors import ConfigError, ModelNotFound
from prefixkv.sampling_params import SamplingParams

COMPLETION_MAX_TOKENS = 16
"""OpenAI's default for completions; a chat in contrast goes on to its own end."""

_DEFAULTED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_AS_GIVEN = (
    *_DEFAULTED,
    "n",
    "best_of",
    "use_beam_search",
    "length_penalty",
    "early_stopping",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "seed",
    "min_tokens",
    "include_stop_str_in_output",
    "ignore_eos",
)
_AS_TUPLES = ("allowed_token_ids", "bad_words", "stop", "stop_token_ids")


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """One engine under one or more model names; the first name is the one in answers.

    `tells_other_salts`: a miss may be explained by there being something under another salt.
    `shows_shared_text`: and by text that others without a salt have sent.
    """

    engine: ServingEngine
    served_model_names: tuple[str, ...]
    max_body_bytes: int
    drain: Drain = field(default_factory=Drain)
    unknown_fields: UnknownFields = field(default_factory=UnknownFields)
    explanations: Explanations = field(default_factory=Explanations)
    tells_other_salts: bool = False
    shows_shared_text: bool = True
    token_memory: TokenMemory = field(default_factory=TokenMemory)
    responses: ResponseStore = field(default_factory=ResponseStore)
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        if not self.served_model_names or not all(self.served_model_names):
            raise ConfigError("a served model needs at least one non-empty name")

    def resolve_model(self, name: str | None) -> str:
        """Return the served name that `name` means; none or an empty one means the first.

        Raises:
            ModelNotFound: no model is served under `name`.
        """
        if not name:
            return self.served_model_names[0]
        if name not in self.served_model_names:
            served = ", ".join(self.served_model_names)
            raise ModelNotFound(f"The model {name[:200]!r} does not exist; served: {served}.")
        return name

    def sampling_params(
        self, request: GenerationRequest, default_max_tokens: int | None
    ) -> SamplingParams:
        """Return how to sample for `request`: its own values, else the model's, else neutral ones.

        Raises:
            InvalidRequest: a value is out of range.
        """
        require_token_ids(request.stop_token_ids or (), "stop_token_ids", self.engine.vocab_size)
        max_tokens = request.max_completion_tokens or request.max_tokens
        if request.max_tokens == 0:
            max_tokens = max_tokens or 1  # the engine always draws a token
        return SamplingParams(
            **(self._defaults(request) | _given(request)),
            max_tokens=max_tokens or default_max_tokens,
            logprobs=request.num_logprobs,
            prompt_logprobs=request.num_prompt_logprobs,
        )

    def _defaults(self, request: GenerationRequest) -> dict[str, Any]:
        """Return the model's own values. A beam search takes none: it draws nothing, and refuses
        a repetition penalty, which the client did not send."""
        defaults = self.engine.sampling_defaults
        return {
            name: defaults[name]
            for name in _DEFAULTED
            if name in defaults and not request.use_beam_search
        }


def _given(request: GenerationRequest) -> dict[str, Any]:
    """Return what `request` sets of those parameters that are called as its fields are."""
    values = {name: getattr(request, name) for name in _AS_GIVEN}
    for name in _AS_TUPLES:
        listed = getattr(request, name)
        values[name] = tuple(listed) if listed is not None else None
    return {name: value for name, value in values.items() if value is not None}
