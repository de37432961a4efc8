"""The input of a stored response, as items again."""

from collections.abc import Mapping, Sequence
from typing import Any

from starlette.requests import Request

from prefixkv.api.replies.bodies import dump_json
from prefixkv.errors import InvalidRequest

MAX_ITEMS = 100


def input_items(
    messages: Sequence[Mapping[str, Any]], response_id: str, request: Request
) -> dict[str, Any]:
    """Return a page of the items that `messages` were.

    Raises:
        InvalidRequest: a parameter of the query is wrong.
    """
    query = request.query_params
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise InvalidRequest(f"order is {order!r:.60}; it must be asc or desc.", "order")
    limit = query.get("limit", "20")
    if not limit.isdecimal() or len(limit) > 4 or not 1 <= int(limit) <= MAX_ITEMS:
        raise InvalidRequest(f"limit is {limit!r:.60}; it must be 1 to {MAX_ITEMS}.", "limit")
    name = response_id.removeprefix("resp_")
    items = _numbered([item for message in messages for item in _items(message)], name)
    if order == "desc":
        items.reverse()
    after = query.get("after")
    ids = [item["id"] for item in items]
    if after in ids:
        items = items[ids.index(after) + 1 :]
    page = items[: int(limit)]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": len(page) < len(items),
    }


def _numbered(items: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    prefixes = {"message": "msg", "function_call": "fc", "function_call_output": "fco"}
    return [
        {"id": f"{prefixes[item['type']]}_{name}_in{index}", "status": "completed", **item}
        for index, item in enumerate(items)
    ]


def _items(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the items of one message: a chat's calls of functions are items of their own."""
    content = message["content"]
    role = message["role"]
    if role == "tool":
        output = "".join(_texts(content))
        call_id = message["tool_call_id"]
        return [{"type": "function_call_output", "call_id": call_id, "output": output}]
    more: dict[str, Any] = {"annotations": [], "logprobs": []} if role == "assistant" else {}
    kind = "output_text" if role == "assistant" else "input_text"
    parts = [{"type": kind, "text": text, **more} for text in _texts(content)]
    items = [{"type": "message", "role": role, "content": parts}] if parts else []
    return items + [_call(call) for call in message.get("tool_calls", ())]


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = function["arguments"]
    if not isinstance(arguments, str):
        arguments = dump_json(arguments)
    return {
        "type": "function_call",
        "call_id": call["id"],
        "name": function["name"],
        "arguments": arguments,
    }


def _texts(content: Any) -> list[str]:
    if content is None:
        return []
    return [content] if isinstance(content, str) else [part["text"] for part in content]
