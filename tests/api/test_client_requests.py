"""Requests as client libraries send them: each is served, or refused in the right shape."""

import json
import os
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from tests.api.sse import read_events

CHATS = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
USER = {"role": "user", "content": "What is the weather?"}
PARTS = {"role": "user", "content": [{"type": "text", "text": "What is the weather?"}]}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "City", "schema": {"type": "object"}}}
USAGE = {"include_usage": True, "continuous_usage_stats": True}
TOOL_TURN = [
    {"role": "assistant", "content": None, "tool_calls": [
        {"id": "1", "type": "function", "function": {"name": "weather", "arguments": "{}"}},
    ]},
    {"role": "tool", "tool_call_id": "1", "content": "sunny"},
]  # fmt: skip

SERVED: list[tuple[str, dict[str, Any]]] = [
    (CHATS, {"model": "m", "messages": [USER]}),
    (CHATS, {"messages": [USER], "stream": False, "temperature": 0.1, "max_completion_tokens": 7}),
    (CHATS, {"messages": [PARTS], "stream": True, "stream_options": {"include_usage": True}}),
    (CHATS, {"messages": [PARTS], "stop": ["Observation:", "Calling tools:", "</code>"]}),
    (CHATS, {"messages": [USER], "stream": True, "stream_options": USAGE, "ignore_eos": True}),
    (CHATS, {"messages": [USER, *TOOL_TURN]}),
    (CHATS, {"messages": [USER], "prompt_cache_key": "k", "session_id": "s", "n": 1, "seed": 3}),
    (CHATS, {"messages": [USER], "logprobs": True, "top_logprobs": 2}),
    (CHATS, {"messages": [USER], "n": 3, "stream": False, "temperature": 1.0}),
    (CHATS, {"messages": [USER], "n": 2, "seed": 1, "use_beam_search": True, "top_k": 3}),
    (COMPLETIONS, {"prompt": "x", "best_of": 2, "n": 2, "logprobs": 1, "seed": None}),
    (CHATS, {"messages": [USER], "logit_bias": {"50256": -100}, "presence_penalty": 0.5}),
    (COMPLETIONS, {"prompt": "x", "seed": None, "logprobs": None, "frequency_penalty": 0}),
    (COMPLETIONS, {"prompt": [[1, 2], [3]], "temperature": 0, "seed": 1234, "stop": ["\n"]}),
    (COMPLETIONS, {"prompt": ["x"], "stream": True, "stream_options": USAGE, "max_tokens": 8}),
    (COMPLETIONS, {"prompt": "x", "echo": True, "max_tokens": 0}),
]

REFUSED: list[tuple[str, dict[str, Any]]] = [
    (CHATS, {"messages": [USER], "tools": [TOOL], "tool_choice": "auto"}),
    (CHATS, {"messages": [USER], "response_format": SCHEMA}),
    (COMPLETIONS, {"prompt": "x", "suffix": "y"}),
]


def captured_requests() -> list[dict[str, Any]]:
    """Return the captured requests to endpoints that exist here; none where the file is absent."""
    beside_checkout = Path(__file__).parents[3] / "shared" / "data"
    folder = Path(os.environ.get("PREFIXKV_SHARED_DATA", beside_checkout))
    path = folder / "client-requests.jsonl"
    if not path.is_file():
        return []
    lines = path.read_text(encoding="utf-8").splitlines()
    requests = [json.loads(line) for line in lines if line]
    return [r for r in requests if r["path"] in (CHATS, COMPLETIONS, "/health", "/v1/models")]


CAPTURED = captured_requests()


def send(
    client: httpx.Client, path: str, body: Any, method: str = "POST"
) -> tuple[httpx.Response, list[Any]]:
    """Send one request; return the response and its bodies or chunks, validated strictly."""
    response = client.request(method, path, json=body)
    if response.status_code != 200 or method != "POST":
        return response, []
    if not body.get("stream"):
        kind = ChatCompletion if path == CHATS else Completion
        answer = response.json()
        if body.get("echo") and body.get("logprobs") is not None:
            # null for a prompt's first token, as OpenAI sent it; its types do not know
            for choice in answer["choices"]:
                assert choice["logprobs"]["token_logprobs"].pop(0) is None
                assert choice["logprobs"]["top_logprobs"].pop(0) is None
        kind.model_validate(answer, strict=True)
        return response, [answer]
    chunks = read_events(response)
    if path == CHATS:
        for chunk in chunks:
            ChatCompletionChunk.model_validate(chunk, strict=True)
    return response, chunks


@pytest.mark.parametrize(("path", "body"), SERVED)
def test_plain_requests_are_served(client: httpx.Client, path: str, body: dict[str, Any]) -> None:
    """One request of each shape that needs nothing but text is answered, with cached tokens."""
    response, bodies = send(client, path, body)

    assert response.status_code == 200, response.text
    usage = bodies[-1]["usage"]
    assert isinstance(usage["prompt_tokens_details"]["cached_tokens"], int)


@pytest.mark.parametrize(("path", "body"), REFUSED)
def test_what_needs_more_is_refused(client: httpx.Client, path: str, body: dict[str, Any]) -> None:
    """Tools, structure and suffixes are a clear 400."""
    response, _ = send(client, path, body)

    assert response.status_code == 400
    assert response.json()["error"]["code"] == "unsupported_parameter"
    assert response.json()["error"]["param"] in body


@pytest.mark.skipif(not CAPTURED, reason="shared/data/client-requests.jsonl is not here")
def test_captured_requests_are_served_or_refused_properly(client: httpx.Client) -> None:
    """Every real request: 200 and valid, or a 400 that names a field it has."""
    statuses: dict[int, int] = {}
    for request in CAPTURED:
        where = (request["client"], request["case"])
        response, _ = send(client, request["path"], request["body"], request["method"])
        statuses[response.status_code] = statuses.get(response.status_code, 0) + 1
        if response.status_code != 200:
            assert response.status_code == 400, (where, response.text)
            error = response.json()["error"]
            besides_beams = "with use_beam_search" in error["message"]
            assert error["code"] == "unsupported_parameter" or besides_beams, (where, error)
            assert error["param"] in request["body"], (where, error)

    assert statuses[200] > statuses[400]
