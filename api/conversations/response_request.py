"""The body of POST /v1/responses."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any

from pydantic import Field

from prefixkv.api.requests.body import parse_object
from prefixkv.api.requests.schemas import GenerationRequest, NumLogprobs, TokenBudget, parse_request
from prefixkv.api.requests.unsupported import UNSUPPORTED_IN_CHATS, refuse_unsupported

LOGPROBS = "message.output_text.logprobs"

# as OpenAI bounds them: stored responses hold what is sent here
_MetadataKey = Annotated[str, Field(max_length=64)]
_MetadataValue = Annotated[str, Field(max_length=512)]
_Metadata = Annotated[dict[_MetadataKey, _MetadataValue], Field(max_length=16)]


def _is_plain_text(value: Any) -> bool:
    format_ = value.get("format") if isinstance(value, dict) else value
    return format_ is None or (isinstance(format_, dict) and format_.get("type") == "text")


UNSUPPORTED_IN_RESPONSES: Mapping[str, Any] = MappingProxyType(
    {
        **UNSUPPORTED_IN_CHATS,
        "tools": lambda value: value == [],
        "tool_choice": lambda value: value in ("none", "auto"),
        "text": _is_plain_text,
        "truncation": lambda value: value == "disabled",
        "background": lambda value: value is False,
        "conversation": lambda value: False,
        "prompt": lambda value: False,
        "context_management": lambda value: value == [],
        "moderation": lambda value: False,
        "n": lambda value: value == 1,
        "prompt_logprobs": lambda value: False,
    }
)


class ResponseRequest(GenerationRequest):
    """A turn of a conversation: `input` behind what `previous_response_id` names, if anything."""

    input: Any = None
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    max_completion_tokens: TokenBudget | None = Field(default=None, alias="max_output_tokens")
    include: list[str] | None = None
    top_logprobs: NumLogprobs | None = None
    metadata: _Metadata | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    # what follows changes no answer here; the response repeats it
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: Any = None
    text: Any = None
    truncation: Any = None
    background: Any = None
    reasoning: dict[str, Any] | None = None
    safety_identifier: Any = None
    service_tier: Any = None

    @property
    def is_stored(self) -> bool:
        """Whether later requests may go on from the response; a prewarming has no answer."""
        return self.store is not False and not self.is_prewarm

    @property
    def num_logprobs(self) -> int | None:
        """Likeliest tokens to tell of; None where no log-probabilities are asked for."""
        is_asked = LOGPROBS in (self.include or ()) or self.top_logprobs
        return (self.top_logprobs or 0) if is_asked else None


def parse_response_request(raw: bytes) -> ResponseRequest:
    """Parse and validate a body; raises InvalidRequest."""
    body = parse_object(raw)
    refuse_unsupported(body, UNSUPPORTED_IN_RESPONSES)
    return parse_request(ResponseRequest, body)
