"""Request bodies. Null equals absent in every field, and unknown fields are kept and ignored.

What needs the engine to be judged (token ids, context length, the model's name) is judged later.
"""

from reprlib import Repr
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from prefixkv.api.caching.cache_fields import CacheFields
from prefixkv.errors import InvalidRequest
from prefixkv.sampling_params import MAX_LOGPROBS

MAX_INT = 2**63 - 1
MAX_CHOICES = 128
"""Of one prompt, whether returned or only drawn for `best_of`."""

_REPR = Repr()
_REPR.maxstring = _REPR.maxother = _REPR.maxlong = 60

_CONFIDENTIAL = frozenset({"cache_salt", "messages", "prompt", "input", "instructions"})
"""Fields whose values no error message repeats: messages end in logs of clients."""


def _whole(value: Any) -> Any:
    # JSON has one kind of number: JavaScript and others write 16 as 16.0
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _unless_false(value: Any) -> Any:
    # some clients write false where OpenAI's completions take null or a number
    return None if value is False else value


def _by_id(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    # JSON has strings as keys only; what is no number stays one, and is refused as such
    return {int(key) if key.isdecimal() and len(key) < 20 else key: v for key, v in value.items()}


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


Int = Annotated[int, Field(ge=-MAX_INT, le=MAX_INT), BeforeValidator(_whole)]
TokenBudget = Annotated[int, Field(ge=1, le=MAX_INT), BeforeValidator(_whole)]
NumChoices = Annotated[int, Field(ge=1, le=MAX_CHOICES), BeforeValidator(_whole)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
NumLogprobs = Annotated[int, Field(ge=0, le=MAX_LOGPROBS), BeforeValidator(_whole)]
Bias = Annotated[float, Field(ge=-100, le=100)]
LogitBias = Annotated[dict[int, Bias], BeforeValidator(_by_id)]
Strings = Annotated[list[str], BeforeValidator(_listed)]
CacheSalt = Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[^\x00]*$")]


class StreamOptions(BaseModel):
    """How usage is told in a stream."""

    model_config = ConfigDict(strict=True)

    include_usage: bool | None = None


class GenerationRequest(CacheFields):
    """Fields that completions and chats share."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False, frozen=True)

    model: str | None = None
    n: NumChoices | None = None
    best_of: NumChoices | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    early_stopping: Literal[True, False, "never"] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int | None = None
    min_p: float | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: float | None = None
    logit_bias: LogitBias | None = None
    allowed_token_ids: list[Int] | None = None
    bad_words: Strings | None = None
    seed: Int | None = None
    max_tokens: TokenBudget | None = None
    max_completion_tokens: TokenBudget | None = None
    min_tokens: Int | None = None
    stop: Strings | None = None
    stop_token_ids: list[Int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: Any = None
    cache_salt: CacheSalt | None = None
    priority: Int | None = None
    request_id: str | None = None
    prompt_logprobs: NumLogprobs | None = None

    @property
    def includes_usage(self) -> bool:
        """Whether the stream ends with a chunk that holds nothing but usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def num_logprobs(self) -> int | None:
        """Likeliest tokens to tell of at each position; None to tell of no log-probability."""
        return None

    @property
    def num_prompt_logprobs(self) -> int | None:
        """The same for the prompt."""
        return self.prompt_logprobs

    def check(self) -> None:
        """Raise InvalidRequest if fields contradict each other."""
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options needs stream: true.", "stream_options")
        n = self.n or 1
        if self.best_of is not None and self.best_of < n:
            raise InvalidRequest(
                f"best_of is {self.best_of}; it must be at least n, which is {n}.", "best_of"
            )
        if self.stream and self.prompt_logprobs is not None:
            raise InvalidRequest(
                "stream is true with prompt_logprobs, which no chunk has; with echo and logprobs "
                "a stream has them.",
                "prompt_logprobs",
            )
        if self.stream and self.use_beam_search:
            raise InvalidRequest(
                "stream is true with use_beam_search; beams are known when all have ended.",
                "stream",
            )
        if self.stream and (self.best_of or 1) > n:
            raise InvalidRequest(
                f"best_of is {self.best_of} with stream: true; the best {n} are known when all "
                "have ended.",
                "best_of",
            )


class CompletionRequest(GenerationRequest):
    """Body of POST /v1/completions; `prompt` has four shapes, told apart in `prompts`."""

    prompt: Any = None
    add_special_tokens: bool | None = None
    max_tokens: Annotated[int, Field(ge=0, le=MAX_INT), BeforeValidator(_whole)] | None = None
    logprobs: Annotated[NumLogprobs | None, BeforeValidator(_unless_false)] = None
    echo: bool | None = None

    @property
    def num_logprobs(self) -> int | None:
        """Likeliest tokens to tell of besides the chosen one."""
        return self.logprobs

    @property
    def num_prompt_logprobs(self) -> int | None:
        """Likeliest tokens to tell of in the prompt; an echo has what the output has."""
        if not self.echo or self.logprobs is None:
            return self.prompt_logprobs
        return max(self.logprobs, self.prompt_logprobs or 0)

    @property
    def is_only_echo(self) -> bool:
        """Whether nothing is wanted behind the prompt."""
        return self.max_tokens == 0 and not self.max_completion_tokens

    def check(self) -> None:
        """Raise InvalidRequest if fields contradict each other."""
        super().check()
        if self.is_only_echo and not self.echo and not self.is_prewarm:
            raise InvalidRequest(
                "max_tokens is 0; without echo it must be at least 1.", "max_tokens"
            )


class ChatCompletionRequest(GenerationRequest):
    """Body of POST /v1/chat/completions."""

    messages: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    logprobs: bool | None = None
    top_logprobs: NumLogprobs | None = None

    @property
    def num_logprobs(self) -> int | None:
        """Likeliest tokens to tell of, if log-probabilities are wanted at all."""
        return (self.top_logprobs or 0) if self.logprobs else None

    def check(self) -> None:
        """Raise InvalidRequest if fields contradict each other."""
        super().check()
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs: true.", "top_logprobs")


class TokenizeRequest(ChatCompletionRequest):
    """Body of POST /tokenize: a prompt, or a chat as /v1/chat/completions takes it."""

    prompt: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(GenerationRequest):
    """Body of POST /detokenize."""

    tokens: list[Int] | None = None


RequestT = TypeVar("RequestT", bound=GenerationRequest)


def parse_request(schema: type[RequestT], body: dict[str, Any]) -> RequestT:
    """Validate `body`.

    Raises:
        InvalidRequest: naming the first wrong field, with its value cut short unless that is
            confidential.
    """
    try:
        request = schema.model_validate(body)
    except ValidationError as error:
        raise _first_error(error) from None
    request.check()
    return request


def _first_error(error: ValidationError) -> InvalidRequest:
    first = error.errors(include_url=False, include_context=False)[0]
    param = ".".join(str(part) for part in first["loc"])
    is_told = first["loc"][0] not in _CONFIDENTIAL
    told = f"{param} is {_REPR.repr(first['input'])}" if is_told else param
    return InvalidRequest(f"{told}: {first['msg']}.", param)
