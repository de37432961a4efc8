"""Sampling fields and log-probabilities of a real server, cold and warm, whole and streamed."""

import json
from typing import Any

import httpx
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

SERVER = "tiny_server"
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
FIELDS: dict[str, Any] = {
    "temperature": 0.9, "seed": 4, "max_tokens": 9, "min_tokens": 3, "repetition_penalty": 1.2,
    "presence_penalty": 0.3, "frequency_penalty": 0.2, "logit_bias": {"68": 1.5},
    "bad_words": ["ab", "#"], "include_stop_str_in_output": True, "stop": ["?"],
}  # fmt: skip


def events(response: httpx.Response) -> list[Any]:
    lines = [line[6:] for line in response.text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


@pytest.mark.parametrize("extra", [{}, FIELDS])
def test_completions(client: httpx.Client, extra: dict[str, Any]) -> None:
    """The same answer with the same numbers from the cache; chunks add up; the types are right."""
    salt = f"completions {len(extra)}"
    request = {"prompt": "Once u", "max_tokens": 9, "logprobs": 3, "cache_salt": salt, **extra}
    request.setdefault("temperature", 0)
    bodies = [client.post(COMPLETIONS, json=request).raise_for_status().json() for _ in range(2)]
    choices = [body["choices"][0] for body in bodies]
    cached = [body["usage"]["prompt_tokens_details"]["cached_tokens"] for body in bodies]
    Completion.model_validate(bodies[0], strict=True)
    chunks = events(client.post(COMPLETIONS, json={**request, "stream": True}))
    joined: dict[str, list[Any]] = {}
    for chunk in chunks:
        for name, values in (chunk["choices"][0]["logprobs"] or {}).items():
            joined.setdefault(name, []).extend(values)

    assert cached == [0, 5]
    assert choices[1]["text"] == choices[0]["text"]
    logprobs = choices[0]["logprobs"]
    assert len(logprobs["tokens"]) == bodies[0]["usage"]["completion_tokens"]
    for other in (choices[1]["logprobs"], joined):
        assert other["tokens"] == logprobs["tokens"]
        assert other["text_offset"] == logprobs["text_offset"]
        assert other["token_logprobs"] == pytest.approx(logprobs["token_logprobs"], abs=1e-9)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == choices[0]["text"]


def test_chats(client: httpx.Client) -> None:
    """The bytes of all tokens, joined, are the text, however they split characters."""
    request = {
        "messages": [{"role": "user", "content": "hi"}], "logprobs": True, "top_logprobs": 2,
        **FIELDS, "stop": [],
    }  # fmt: skip
    body = client.post(CHATS, json=request).raise_for_status().json()
    ChatCompletion.model_validate(body, strict=True)
    content = body["choices"][0]["logprobs"]["content"]
    chunks = events(client.post(CHATS, json={**request, "stream": True}))
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk, strict=True)
    told = [c["choices"][0]["logprobs"] for c in chunks]
    data = bytes(byte for entry in content for byte in entry["bytes"] or ())

    assert data.decode(errors="replace") == body["choices"][0]["message"]["content"]
    assert [e["token"] for one in told if one for e in one["content"]] == [
        entry["token"] for entry in content
    ]
    assert {len(entry["top_logprobs"]) for entry in content} == {2}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logit_bias": {"259": 1}}, "logit_bias"),
        ({"allowed_token_ids": [300]}, "allowed_token_ids"),
        ({"allowed_token_ids": [5], "bad_words": ["#"]}, "allowed_token_ids"),
    ],
)
def test_what_the_model_cannot_do_is_the_clients_error(
    client: httpx.Client, fields: dict[str, Any], param: str
) -> None:
    """Before anything runs, in a stream as well."""
    for stream in (False, True):
        request = {"prompt": "x", "stream": stream, **fields}
        response = client.post(COMPLETIONS, json=request)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == param
