"""What all routes share: the engine, its public names, and how a request becomes sampling."""

import time
from dataclasses import dataclass, field

from prefixkv.api.engine_interface import ServingEngine
from prefixkv.api.prompts import require_token_ids
from prefixkv.api.schemas import GenerationRequest
from prefixkv.api.unknown_fields import UnknownFields
from prefixkv.errors import ConfigError, ModelNotFound
from prefixkv.sampling_params import SamplingParams

COMPLETION_MAX_TOKENS = 16
"""OpenAI's default for completions; a chat in contrast goes on to its own end."""

_DEFAULTED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """One engine under one or more model names; the first name is the one in answers."""

    engine: ServingEngine
    served_model_names: tuple[str, ...]
    max_body_bytes: int
    unknown_fields: UnknownFields = field(default_factory=UnknownFields)
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
        given = {name: getattr(request, name) for name in _DEFAULTED}
        chosen = {name: value for name, value in given.items() if value is not None}
        defaults = self.engine.sampling_defaults
        inherited = {name: defaults[name] for name in _DEFAULTED if name in defaults}
        stop_token_ids = tuple(request.stop_token_ids or ())
        require_token_ids(stop_token_ids, "stop_token_ids", self.engine.vocab_size)
        allowed = request.allowed_token_ids
        return SamplingParams(
            **(inherited | chosen),
            presence_penalty=request.presence_penalty or 0.0,
            frequency_penalty=request.frequency_penalty or 0.0,
            logit_bias=request.logit_bias or {},
            allowed_token_ids=tuple(allowed) if allowed is not None else None,
            bad_words=tuple(request.bad_words or ()),
            seed=request.seed,
            max_tokens=request.max_completion_tokens or request.max_tokens or default_max_tokens,
            min_tokens=request.min_tokens or 0,
            stop=tuple(request.stop or ()),
            stop_token_ids=stop_token_ids,
            include_stop_str_in_output=bool(request.include_stop_str_in_output),
            ignore_eos=bool(request.ignore_eos),
            logprobs=request.num_logprobs,
        )
