"""Chat messages as clients send them, made alike before the chat template sees them."""

import inspect
import json
from collections.abc import Mapping, Sequence
from typing import Any

from prefixkv.api.engine_interface import Tokenizer
from prefixkv.api.schemas import ChatCompletionRequest
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


def chat_prompt(request: ChatCompletionRequest, tokenizer: Tokenizer) -> list[int]:
    """Render the chat of `request` to token ids.

    Raises:
        InvalidRequest: the messages, or how to render them, are wrong.
    """
    messages = normalized(request.messages)
    kwargs = _template_kwargs(request, tokenizer)
    continues = bool(request.continue_final_message)
    add_generation_prompt = request.add_generation_prompt
    if add_generation_prompt is None:
        add_generation_prompt = not continues
    try:
        ids = tokenizer.render_chat(messages, add_generation_prompt, **kwargs)
    except RecursionError:
        raise InvalidRequest("messages are nested too deeply.", "messages") from None
    except InvalidRequest as error:
        error.param = error.param or "messages"
        raise
    if not ids:
        raise InvalidRequest("messages render to no tokens.", "messages")
    return ids


def chat_text(
    request: ChatCompletionRequest, tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]]
) -> str:
    """Render `messages` to text as `chat_prompt` renders those of `request`."""
    kwargs = _template_kwargs(request, tokenizer)
    opens_answer = request.add_generation_prompt
    if opens_answer is None:
        opens_answer = not request.continue_final_message
    return tokenizer.chat_text(normalized(messages), opens_answer, **kwargs)


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
    except (ValueError, RecursionError):
        # the model itself may have written this; its history must stay usable
        return arguments
    return parsed if isinstance(parsed, dict) else arguments


def _template_kwargs(request: ChatCompletionRequest, tokenizer: Tokenizer) -> dict[str, Any]:
    kwargs = dict(request.chat_template_kwargs or {})
    for name in sorted(kwargs.keys() & _RESERVED_KWARGS):
        param = f"chat_template_kwargs.{name}"
        raise InvalidRequest(f"{param} cannot be set there.", param)
    if request.continue_final_message:
        if request.add_generation_prompt:
            raise InvalidRequest(
                "continue_final_message and add_generation_prompt exclude each other.",
                "continue_final_message",
            )
        if "continue_final_message" not in inspect.signature(tokenizer.render_chat).parameters:
            raise InvalidRequest(
                "continue_final_message is true; this model's tokenizer cannot do that.",
                "continue_final_message",
            )
        kwargs["continue_final_message"] = True
    return kwargs
