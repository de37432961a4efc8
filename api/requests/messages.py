"""Chat messages as clients send them, made alike before the chat template sees them."""

import inspect
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prefixkv.api.engine_interface import Tokenizer
from prefixkv.api.requests.schemas import ChatCompletionRequest
from prefixkv.errors import InvalidRequest

# the renderer's own arguments, which a template keyword would override or collide with
_RESERVED_KWARGS = frozenset(
    [
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "documents",
        "max_length",
        "messages",
        "padding",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "self",
        "tokenize",
        "tokenizer_kwargs",
        "tools",
        "truncation",
    ]
)


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """A chat as its template lays it out.

    Attributes:
        messages: normalised, as the template saw them.
        template_kwargs: what the client set of the template's variables.
        is_open: whether the answer goes on with the last message instead of being one of its own.
    """

    messages: Sequence[Mapping[str, Any]]
    text: str
    template_kwargs: Mapping[str, Any]
    is_open: bool = False


def chat_prompt(request: ChatCompletionRequest, tokenizer: Tokenizer) -> list[int]:
    """Return the token ids of a chat, as the tokenizer alone makes them; raises as `render`."""
    ids = tokenizer.encode(render(request, tokenizer).text, add_special_tokens=False)
    require_tokens(ids)
    return ids


def render(request: ChatCompletionRequest, tokenizer: Tokenizer) -> RenderedChat:
    """Lay out the chat of `request`.

    Raises:
        InvalidRequest: the messages, or how to render them, are wrong.
    """
    continues = bool(request.continue_final_message)
    kwargs = checked_template_kwargs(request.chat_template_kwargs)
    if continues:
        _require_continuing(request, tokenizer)
    add_generation_prompt = request.add_generation_prompt
    if add_generation_prompt is None:
        add_generation_prompt = not continues
    messages = normalized(request.messages)
    continuing = {"continue_final_message": True} if continues else {}
    text = chat_text(messages, tokenizer, add_generation_prompt, **kwargs, **continuing)
    return RenderedChat(messages, text, kwargs, is_open=continues)


def chat_text(
    messages: Sequence[Mapping[str, Any]],
    tokenizer: Tokenizer,
    add_generation_prompt: bool = True,
    **template_kwargs: Any,
) -> str:
    """Return what the template makes of normalised messages.

    Raises:
        InvalidRequest: it refuses them.
    """
    try:
        return tokenizer.chat_text(messages, add_generation_prompt, **template_kwargs)
    except RecursionError:
        raise InvalidRequest("messages are nested too deeply.", "messages") from None
    except InvalidRequest as error:
        error.param = error.param or "messages"
        raise


def checked_template_kwargs(given: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the template variables of a request; raises InvalidRequest for the renderer's own."""
    kwargs = dict(given or {})
    for name in sorted(kwargs.keys() & _RESERVED_KWARGS):
        param = f"chat_template_kwargs.{name}"
        raise InvalidRequest(f"{param} cannot be set there.", param)
    return kwargs


def require_tokens(token_ids: Sequence[int]) -> None:
    """Raise InvalidRequest for a chat that rendered to nothing."""
    if not token_ids:
        raise InvalidRequest("messages render to no tokens.", "messages")


def normalized(messages: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]]:
    """Return `messages` without null fields, and with tool arguments as objects.

    Templates print arguments with `tojson`, which would quote a string a second time; parsed,
    any spacing that a client chose renders to the same tokens.

    Raises:
        InvalidRequest: no messages, one without a role, or tool calls of a wrong shape.
    """
    if not messages:
        raise InvalidRequest("messages is missing or empty.", "messages")
    return [_normalized_message(message, i) for i, message in enumerate(messages)]


def _normalized_message(message: Mapping[str, Any], index: int) -> dict[str, Any]:
    role = message.get("role")
    if not isinstance(role, str) or not role:
        param = f"messages.{index}.role"
        raise InvalidRequest(f"{param} must be a non-empty string.", param)
    kept = {name: value for name, value in message.items() if value is not None}
    # templates test for the field, so an empty list must not be there
    calls = kept.pop("tool_calls", None)
    if calls:
        kept["tool_calls"] = _tool_calls(calls, f"messages.{index}.tool_calls")
    # where only tool calls are said, the content is null or absent: the same thing
    kept.setdefault("content", None)
    return kept


def _tool_calls(calls: Any, param: str) -> list[dict[str, Any]]:
    is_shaped = isinstance(calls, list) and all(
        isinstance(call, dict) and isinstance(call.get("function"), dict) for call in calls
    )
    if not is_shaped:
        raise InvalidRequest(f"{param} must be an array of objects with a function.", param)
    return [call | {"function": _function(call["function"])} for call in calls]


def _function(function: Mapping[str, Any]) -> dict[str, Any]:
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        arguments = _parsed_arguments(arguments)
    return {**function, "arguments": {} if arguments is None else arguments}


def _parsed_arguments(arguments: str) -> Any:
    try:
        parsed = json.loads(arguments or "{}")
        if "\\u" in arguments:  # half of a surrogate pair is no text
            json.dumps(parsed, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        # the model itself may have written this; its history must stay usable
        return arguments
    return parsed if isinstance(parsed, dict) else arguments


def _require_continuing(request: ChatCompletionRequest, tokenizer: Tokenizer) -> None:
    param = "continue_final_message"
    if request.add_generation_prompt:
        raise InvalidRequest(f"{param} and add_generation_prompt exclude each other.", param)
    if param not in inspect.signature(tokenizer.chat_text).parameters:
        raise InvalidRequest(f"{param} is true; this model's tokenizer cannot do that.", param)
