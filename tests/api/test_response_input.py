"""What a response's input may be, and which fields are refused."""

from typing import Any

import httpx
import pytest
from openai.types.responses import ResponseItem
from pydantic import TypeAdapter

from tests.api.fake_engine import FakeEngine

URL = "/v1/responses"
ITEM: TypeAdapter[Any] = TypeAdapter(ResponseItem)


def create(client: httpx.Client, **body: Any) -> dict[str, Any]:
    """Return a response."""
    answer = client.post(URL, json={"max_output_tokens": 3, **body})
    assert answer.status_code == 200, answer.text
    parsed: dict[str, Any] = answer.json()
    return parsed


def with_content(content: Any) -> dict[str, Any]:
    """Return the fields of a request with one message."""
    return {"input": [{"role": "user", "content": content}]}


@pytest.mark.parametrize(
    "item",
    [
        {"role": "user", "content": "hi"},
        {"type": "message", "role": "user", "content": "hi"},
        {"content": [{"type": "input_text", "text": "hi"}], "role": "user"},
        {"content": [{"text": "h", "type": "text"}, {"type": "input_text", "text": "i"}],
         "role": "user", "status": "completed", "id": "1"},
    ],
)  # fmt: skip
def test_input_comes_in_many_spellings(
    client: httpx.Client, engine: FakeEngine, item: dict[str, Any]
) -> None:
    """All render as a plain string does."""
    create(client, input=[item], instructions="be nice")

    assert engine.prompts == ["<system>be nice\n<user>hi\n<assistant>"]


def test_a_history_of_tools_is_rendered_like_a_chats(
    client: httpx.Client, engine: FakeEngine
) -> None:
    """Calls join the message before them, outputs are tool messages, reasoning is left out."""
    calls = [
        {"type": "function_call", "call_id": i, "name": "f", "arguments": '{"a":  1}', "id": "fc"}
        for i in "12"
    ]
    wet = [{"type": "input_text", "text": "wet"}]
    outputs = [
        {"type": "function_call_output", "call_id": "1", "output": "sunny"},
        {"type": "function_call_output", "call_id": "2", "output": wet},
    ]  # fmt: skip
    part = {"type": "output_text", "text": "so", "annotations": []}
    said = {"type": "message", "role": "assistant", "id": "msg_1", "content": [part]}
    reasoning = {"type": "reasoning", "id": "rs_1", "summary": []}
    history = [{"role": "user", "content": "hi"}, reasoning, said, *calls, *outputs]
    response = create(client, input=history)
    function = {"name": "f", "arguments": '{"a": 1}'}
    chat = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "so", "tool_calls": [
            {"id": i, "type": "function", "function": function} for i in "12"]},
        {"role": "tool", "tool_call_id": "1", "content": "sunny"},
        {"role": "tool", "tool_call_id": "2", "content": "wet"},
    ]  # fmt: skip
    client.post("/v1/chat/completions", json={"messages": chat})

    assert engine.prompts[0] == engine.prompts[1]
    page = client.get(f"{URL}/{response['id']}/input_items?order=asc&limit=5").json()
    for item in page["data"]:
        ITEM.validate_python(item, strict=True)
    kinds = [item["type"].removeprefix("function_") for item in page["data"]]
    assert (kinds, page["has_more"]) == (
        ["message", "message", "call", "call", "call_output"],
        True,
    )
    rest = client.get(
        f"{URL}/{response['id']}/input_items?order=asc&after={page['last_id']}"
    ).json()
    assert [item["output"] for item in rest["data"]] == ["wet"]
    for limit in ("0", "101", "0001" + "0" * 5000):
        items = client.get(f"{URL}/{response['id']}/input_items?limit={limit}")
        assert items.status_code == 400


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": [1]}, "input.0"),
        ({"input": [{"type": "reasoning"}]}, "input"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input.0.role"),
        ({"input": [{"role": "user"}]}, "input.0.content"),
        (with_content([{"type": "input_image"}]), "input.0.content.0.type"),
        (with_content([{"type": "input_text"}]), "input.0.content.0.text"),
        (with_content(["x"]), "input.0.content.0"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0.type"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input.0.call_id"),
        ({"input": [{"type": "function_call_output", "call_id": "1"}]}, "input.0.output"),
        ({"input": "x" * 200_001}, "input"),
        ({"tools": [{"type": "function", "name": "f"}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"text": {"format": {"type": "json_schema"}}}, "text"),
        ({"truncation": "auto"}, "truncation"),
        ({"background": True}, "background"),
        ({"conversation": "c"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"n": 2}, "n"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"instructions": 3}, "instructions"),
        ({"metadata": {"k" * 65: "v"}}, None),
        ({"top_logprobs": 100}, "top_logprobs"),
        ({"stream": True, "use_beam_search": True}, "stream"),
    ],
)  # fmt: skip
def test_what_cannot_be_served_is_refused(
    client: httpx.Client, fields: dict[str, Any], param: str | None
) -> None:
    """A 400 that names the field."""
    answer = client.post(URL, json={"input": "hi", **fields})
    error = answer.json()["error"]

    assert answer.status_code == 400, answer.text
    assert sorted(error) == ["code", "message", "param", "type"]
    assert param is None or error["param"] == param
