"""Items of a response's input as the messages of a chat."""

from collections.abc import Mapping
from typing import Any, NoReturn

from prefixkv.api.errors import UnsupportedField
from prefixkv.errors import InvalidRequest

_TEXT_PARTS = ("input_text", "output_text", "text")
_ROLES = ("user", "assistant", "system", "developer")
_ON_PARTS = ("prompt_cache_breakpoint", "cache_control")


def input_messages(value: Any) -> list[dict[str, Any]]:
    """Return the messages that the `input` of a request means.

    Calls of functions join the assistant's message before them, as chats have it. Reasoning is
    left out: no template here renders it.

    Raises:
        InvalidRequest: it is missing or of a wrong shape, or has what only OpenAI itself can serve.
    """
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not isinstance(value, list) or not value:
        raise InvalidRequest("input must be a string or a non-empty array of items.", "input")
    messages: list[dict[str, Any]] = []
    for index, item in enumerate(value):
        where = f"input.{index}"
        if not isinstance(item, dict):
            raise InvalidRequest(f"{where} must be an object.", where)
        _add_item(messages, item, where)
    if not messages:
        raise InvalidRequest("input has nothing but reasoning.", "input")
    return messages


def _add_item(messages: list[dict[str, Any]], item: Mapping[str, Any], where: str) -> None:
    match item.get("type"):
        case None | "message":
            messages.append(_message(item, where))
        case "function_call":
            _add_call(messages, item, where)
        case "function_call_output":
            output = _content(item.get("output"), f"{where}.output")
            call_id = _string(item, "call_id", where)
            messages.append({"role": "tool", "tool_call_id": call_id, "content": output})
        case "reasoning":
            pass
        case other:
            _refuse(other, f"{where}.type")


def _message(item: Mapping[str, Any], where: str) -> dict[str, Any]:
    role = item.get("role")
    if role not in _ROLES:
        param = f"{where}.role"
        raise InvalidRequest(
            f"{param} is {role!r:.100}; it must be one of {', '.join(_ROLES)}.", param
        )
    return {"role": role, "content": _content(item.get("content"), f"{where}.content")}


def _add_call(messages: list[dict[str, Any]], item: Mapping[str, Any], where: str) -> None:
    function = {name: _string(item, name, where) for name in ("name", "arguments")}
    call = {"id": _string(item, "call_id", where), "type": "function", "function": function}
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": None})
    messages[-1].setdefault("tool_calls", []).append(call)


def _content(content: Any, where: str) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequest(f"{where} must be a string or an array of parts.", where)
    return [_part(part, f"{where}.{index}") for index, part in enumerate(content)]


def _part(part: Any, where: str) -> dict[str, Any]:
    if not isinstance(part, dict):
        raise InvalidRequest(f"{where} must be an object.", where)
    kind = part.get("type")
    if kind == "refusal":
        return {"type": "text", "text": _string(part, "refusal", where)}
    if kind not in _TEXT_PARTS:
        _refuse(kind, f"{where}.type")
    controls = {name: part[name] for name in _ON_PARTS if name in part}
    return {"type": "text", "text": _string(part, "text", where), **controls}


def _string(item: Mapping[str, Any], name: str, where: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        param = f"{where}.{name}"
        raise InvalidRequest(f"{param} must be a string.", param)
    return value


def _refuse(kind: Any, param: str) -> NoReturn:
    raise UnsupportedField(f"{param} is {kind!r:.100}; this server does not support that.", param)
