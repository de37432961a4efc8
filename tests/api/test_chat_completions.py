"""POST /v1/chat/completions."""

from typing import Any

import httpx
import pytest

from tests.api.fake_engine import ALPHABET, FakeEngine
from tests.api.sse import read_events

URL = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hi"}]


def test_a_chat_has_every_key_clients_read(client: httpx.Client) -> None:
    """The body has the documented keys; without a limit the answer uses what the context leaves."""
    body = client.post(URL, json={"messages": HELLO}).json()

    assert body.pop("id").startswith("chatcmpl-")
    assert isinstance(body.pop("created"), int)
    assert body.pop("system_fingerprint")
    assert body == {
        "object": "chat.completion",
        "model": "m",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": ALPHABET, "refusal": None},
                "logprobs": None,
                "finish_reason": "length",
                "stop_reason": None,
            }
        ],
        "usage": {
            "prompt_tokens": 20,
            "completion_tokens": 26,
            "total_tokens": 46,
            "prompt_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 20},
        },
    }


def test_no_limit_is_left_to_the_engine(client: httpx.Client, engine: FakeEngine) -> None:
    """A chat without max_tokens passes None on."""
    client.post(URL, json={"messages": HELLO})

    assert engine.calls[0]["params"].max_tokens is None


def test_a_stream_opens_with_the_role_and_ends_with_usage(client: httpx.Client) -> None:
    """Role first, then text, then the reason with usage."""
    request = {"messages": HELLO, "max_tokens": 3, "stream": True}
    chunks = read_events(client.post(URL, json=request))

    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas == [
        {"role": "assistant", "content": ""},
        {"content": "a"},
        {"content": "b"},
        {"content": "c"},
    ]
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert chunks[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}


def test_include_usage_adds_a_chunk_without_choices(client: httpx.Client) -> None:
    """The extra chunk repeats the usage of the finish chunk."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    request = {"messages": HELLO, "max_tokens": 1, "stream": True, "stream_options": options}
    chunks = read_events(client.post(URL, json=request))

    assert chunks[-1]["choices"] == []
    assert [chunk["usage"] for chunk in chunks if chunk.get("usage")] == [chunks[-1]["usage"]]


def test_held_back_text_makes_no_chunk(client: httpx.Client, engine: FakeEngine) -> None:
    """Steps whose text is not decided yet are silent, and a finish without text has no content."""
    engine.num_hidden_steps = 2
    request = {"messages": HELLO, "stop": "d", "stream": True}
    chunks = read_events(client.post(URL, json=request))

    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas == [{"role": "assistant", "content": ""}, {"content": "c"}, {}]


@pytest.mark.parametrize(
    "content", ["hi", [{"type": "text", "text": "hi"}], [{"text": "h", "type": "text"}] * 1]
)
def test_messages_reach_the_template(
    client: httpx.Client, engine: FakeEngine, content: Any
) -> None:
    """Text comes as a string or as parts."""
    client.post(URL, json={"messages": [{"role": "user", "content": content}]})

    assert engine.prompts[0].startswith("<user>h")


def test_tool_history_is_rendered_alike_whatever_its_spelling(
    client: httpx.Client, engine: FakeEngine
) -> None:
    """Spacing of arguments, key order, and null against absent content give the same prompt."""
    histories: list[list[dict[str, Any]]] = [
        [
            {"role": "assistant", "content": None, "tool_calls": [_call('{"city": "Paris"}')]},
            {"role": "tool", "tool_call_id": "1", "content": "sunny"},
        ],
        [
            {"tool_calls": [_call('{"city":"Paris"}')], "refusal": None, "role": "assistant"},
            {"content": "sunny", "tool_call_id": "1", "role": "tool", "name": None},
        ],
    ]
    for history in histories:
        response = client.post(URL, json={"messages": HELLO + history})
        assert response.status_code == 200, response.text

    assert engine.prompts[0] == engine.prompts[1]
    assert '"arguments": {"city": "Paris"}' in engine.prompts[0]


@pytest.mark.parametrize("arguments", ["not json", "[1]", "", None, r'{"a": "\ud800"}'])
def test_arguments_that_a_model_garbled_do_not_end_the_chat(
    client: httpx.Client, arguments: str | None
) -> None:
    """A history with unparsable arguments stays usable."""
    message = {"role": "assistant", "content": None, "tool_calls": [_call(arguments)]}

    assert client.post(URL, json={"messages": [message]}).status_code == 200


def test_template_options_are_passed_on(client: httpx.Client, engine: FakeEngine) -> None:
    """`chat_template_kwargs` and `add_generation_prompt` reach the template."""
    request = {
        "messages": HELLO,
        "chat_template_kwargs": {"enable_thinking": False},
        "add_generation_prompt": False,
    }
    client.post(URL, json=request)

    assert engine.prompts == ["<user>hi\n<enable_thinking=False>"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": ["hi"]}, "messages.0"),
        ({"messages": [{"content": "hi"}]}, "messages.0.role"),
        ({"messages": [{"role": 1, "content": "hi"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
        ({"messages": [{"role": "assistant", "tool_calls": [1]}]}, "messages.0.tool_calls"),
        ({"messages": [{"role": "assistant", "tool_calls": "x"}]}, "messages.0.tool_calls"),
        ({"messages": HELLO, "continue_final_message": True}, "continue_final_message"),
        (
            {"messages": HELLO, "continue_final_message": True, "add_generation_prompt": True},
            "continue_final_message",
        ),
        (
            {"messages": HELLO, "chat_template_kwargs": {"tokenize": False}},
            "chat_template_kwargs.tokenize",
        ),
        ({"messages": HELLO, "chat_template_kwargs": []}, "chat_template_kwargs"),
    ],
)
def test_wrong_messages_are_refused(
    client: httpx.Client, fields: dict[str, Any], param: str
) -> None:
    """The field is named with its path."""
    response = client.post(URL, json=fields)

    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


def test_a_chat_that_is_too_long_blames_the_messages(
    client: httpx.Client, engine: FakeEngine
) -> None:
    """The engine speaks of a prompt, the client of messages."""
    message = {"role": "user", "content": "x" * 200_000}
    error = client.post(URL, json={"messages": [message]}).json()["error"]

    assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")


def _call(arguments: str | None) -> dict[str, Any]:
    return {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
