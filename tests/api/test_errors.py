"""Every refusal has OpenAI's shape, at any status, and a bounded size."""

import json
import logging
import socket
from typing import Any

import httpx
import pytest

from prefixkv.api.app import create_app
from prefixkv.api.errors import ANSWERS, Draining, error_response
from prefixkv.api.requests.unknown_fields import MAX_LENGTH, MAX_NAMES, UnknownFields
from prefixkv.errors import (
    ConfigError,
    EngineStopped,
    InvalidRequest,
    ModelError,
    QueueFull,
    RequestTooLarge,
    StaleSequence,
    StepFailed,
)
from tests.api.conftest import MAX_BODY_BYTES
from tests.api.fake_engine import VOCAB_SIZE, FakeEngine
from tests.api.sse import read_events

COMPLETIONS = "/v1/completions"
CHATS = "/v1/chat/completions"
RESPONSES = "/v1/responses"
JSON = {"Content-Type": "application/json"}
MESSAGES = [{"role": "user", "content": "hi"}]


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    """Return the error object of `response`, checking status, keys and size."""
    assert response.status_code == status, response.text
    body = response.json()
    assert body.keys() == {"error"}
    assert body["error"].keys() == {"message", "type", "param", "code"}
    assert body["error"]["message"]
    assert len(response.content) < 2048
    return dict(body["error"])


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": "abc"}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": 10**30}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": "1"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"top_k": 10**30}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"seed": 2**64}, "seed"),
        ({"stop": ""}, "stop"),
        ({"stop": 3}, "stop"),
        ({"stop": ["a", 3]}, "stop.1"),
        ({"stop": ["x"] * 65}, "stop"),
        ({"stop_token_ids": [VOCAB_SIZE]}, "stop_token_ids"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"stop_token_ids": [True]}, "stop_token_ids.0"),
        ({"ignore_eos": 1}, "ignore_eos"),
        ({"presence_penalty": 2.5}, "presence_penalty"),
        ({"frequency_penalty": -3}, "frequency_penalty"),
        ({"frequency_penalty": "1"}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"logit_bias": {"7": 101}}, "logit_bias.7"),
        ({"logit_bias": {"7": None}}, "logit_bias.7"),
        ({"logit_bias": {"x": 1}}, "logit_bias.x.[key]"),
        ({"logit_bias": {"-1": 1}}, "logit_bias.-1.[key]"),
        ({"logit_bias": [7]}, "logit_bias"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids"),
        ({"bad_words": [""]}, "bad_words"),
        ({"bad_words": ["x"] * 129}, "bad_words"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
        ({"include_stop_str_in_output": 1}, "include_stop_str_in_output"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream_options": {}, "stream": False}, "stream_options"),
        ({"stream_options": [], "stream": True}, "stream_options"),
        ({"stream_options": {"include_usage": 1}, "stream": True}, "stream_options.include_usage"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"cache_salt": "s" * 129}, "cache_salt"),
        ({"cache_salt": "a\0b"}, "cache_salt"),
        ({"priority": 0.5}, "priority"),
        ({"request_id": ""}, "request_id"),
        ({"request_id": "a\nb"}, "request_id"),
        ({"request_id": "x" * 129}, "request_id"),
        ({"model": 3}, "model"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"n": True}, "n"),
        ({"n": "2"}, "n"),
        ({"best_of": 0}, "best_of"),
        ({"best_of": 129}, "best_of"),
        ({"n": 3, "best_of": 2}, "best_of"),
        ({"n": 2, "best_of": 3, "stream": True}, "best_of"),
        ({"n": 2, "best_of": 3, "use_beam_search": True}, "best_of"),
        ({"use_beam_search": 1}, "use_beam_search"),
        ({"use_beam_search": True, "stream": True}, "stream"),
        ({"length_penalty": "1"}, "length_penalty"),
        ({"early_stopping": "always"}, "early_stopping"),
    ],
)
@pytest.mark.parametrize("url", [COMPLETIONS, CHATS])
def test_a_wrong_field_is_named(
    client: httpx.Client, url: str, fields: dict[str, Any], param: str
) -> None:
    """Type and range errors are a 400 with the field in `param`."""
    body = {"prompt": "x", "messages": MESSAGES, **fields}
    error = error_of(client.post(url, json=body), 400)

    assert (error["param"], error["type"]) == (param, "invalid_request_error")


@pytest.mark.parametrize(
    ("url", "fields", "param"),
    [
        (COMPLETIONS, {"logprobs": 21}, "logprobs"),
        (COMPLETIONS, {"logprobs": -1}, "logprobs"),
        (COMPLETIONS, {"logprobs": True}, "logprobs"),
        (COMPLETIONS, {"logprobs": "1"}, "logprobs"),
        (CHATS, {"logprobs": 1}, "logprobs"),
        (CHATS, {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        (CHATS, {"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        (CHATS, {"top_logprobs": 1}, "top_logprobs"),
        (CHATS, {"logprobs": False, "top_logprobs": 1}, "top_logprobs"),
    ],
)
def test_wrong_logprobs_are_named(
    client: httpx.Client, url: str, fields: dict[str, Any], param: str
) -> None:
    """A number in completions; in chats a switch, and a number that needs it."""
    error = error_of(client.post(url, json={"prompt": "x", "messages": MESSAGES, **fields}), 400)

    assert (error["param"], error["type"]) == (param, "invalid_request_error")


@pytest.mark.parametrize(
    "prompt",
    [
        None, "", [], [""], ["a", ""], [[]], [[1], []], 3, {}, ["a", 1], [1, "a"], [[1], "a"],
        [True], [1, True], [[True]], [1.0], [-1], [VOCAB_SIZE], [[97, VOCAB_SIZE]],
        [10**30], [[10**30]], ["x"] * 2049,
    ],
)  # fmt: skip
def test_a_wrong_prompt_is_refused(client: httpx.Client, prompt: Any) -> None:
    """Empty prompts, mixed shapes and ids outside the vocabulary are a 400."""
    error = error_of(client.post(COMPLETIONS, json={"prompt": prompt}), 400)

    assert error["param"] == "prompt"


@pytest.mark.parametrize(
    ("url", "fields"),
    [
        *((url, fields) for url in (COMPLETIONS, CHATS) for fields in (
            {"suffix": "x"},
            {"response_format": {"type": "json_object"}}, {"structured_outputs": {"regex": "a"}},
        )),
        (CHATS, {"echo": True}),
        (CHATS, {"tools": []}),
        (CHATS, {"tools": [{"type": "function", "function": {"name": "f"}}]}),
        (CHATS, {"tool_choice": "auto"}),
        (CHATS, {"tool_choice": {"type": "function"}}),
        (CHATS, {"add_special_tokens": True}),
        (CHATS, {"chat_template": "{{ messages }}"}),
    ],
)  # fmt: skip
def test_what_is_not_served_yet_is_refused(
    client: httpx.Client, url: str, fields: dict[str, Any]
) -> None:
    """A field that would change the answer is never ignored."""
    body = {"prompt": "x", "messages": MESSAGES, **fields}
    error = error_of(client.post(url, json=body), 400)

    assert [error["param"]] == list(fields)
    assert error["code"] == "unsupported_parameter"


@pytest.mark.parametrize("url", [COMPLETIONS, CHATS])
def test_neutral_values_are_served(client: httpx.Client, url: str) -> None:
    """What asks for nothing is accepted."""
    neutral = {
        "n": 1, "best_of": 1, "presence_penalty": 0, "frequency_penalty": 0.0, "logprobs": False,
        "repetition_penalty": 1.0, "min_tokens": 0, "logit_bias": {}, "bad_words": [],
        "response_format": {"type": "text"}, "tool_choice": "none", "echo": False,
        "use_beam_search": False, "length_penalty": 1.0, "early_stopping": False, "store": False,
        "parallel_tool_calls": True,
    }  # fmt: skip
    response = client.post(url, json={"prompt": "x", "messages": MESSAGES, **neutral})

    assert response.status_code == 200, response.text


@pytest.mark.parametrize(
    "raw",
    [
        b"", b"{", b"[]", b"null", b"3", b'"x"', b"{} {}", b"\xff\xfe", b'{"prompt": "\xff"}',
        b'{"prompt": "x", "temperature": NaN}', b'{"prompt": "x", "anything": Infinity}',
        b'{"prompt": "x", "anything": [-1e999]}',
        b'{"prompt": "x", "temperature": 1e400}', b'{"prompt": "\\ud800"}',
        b'{"prompt": "x", "user": "\\udfff"}', b'{"prompt": "x", "model": "\\ud83d"}',
        b'{"prompt": "x", "a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"prompt": "x", "a": ' + b'{"a":' * 20_000 + b"1" + b"}" * 20_000 + b"}",
        b'{"prompt": "x", "max_tokens": ' + b"9" * 5_000 + b"}",
        b"\xef\xbb\xbf{}", b'{"prompt": "x\n"}',
    ],
)  # fmt: skip
def test_what_is_not_a_json_object_is_refused(client: httpx.Client, raw: bytes) -> None:
    """Malformed, deep or oversized JSON is a 400, never a 500."""
    error_of(client.post(COMPLETIONS, content=raw, headers=JSON), 400)


def test_a_whole_surrogate_pair_is_a_character(client: httpx.Client, engine: FakeEngine) -> None:
    """Escaped characters outside the basic plane are fine."""
    raw = b'{"prompt": "\\ud83d\\ude00"}'
    response = client.post(COMPLETIONS, content=raw, headers=JSON)

    assert response.status_code == 200
    assert engine.prompts == ["\U0001f600"]


@pytest.mark.parametrize("depth", [100, 400, 900, 990])
def test_deep_messages_never_crash(client: httpx.Client, depth: int) -> None:
    """Nesting that JSON parsing still takes is served or refused."""
    nested = "[" * depth + "]" * depth
    function = {"name": "f", "arguments": f'{{"a": {nested}}}'}
    calls = json.dumps([{"id": "1", "type": "function", "function": function}])
    message = f'{{"role": "assistant", "tool_calls": {calls}, "name": {nested}}}'
    raw = f'{{"messages": [{message}], "metadata": {nested}, "user": "\\ud83d\\ude00"}}'
    response = client.post(CHATS, content=raw.encode(), headers=JSON)

    assert response.status_code in (200, 400), response.text


@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded", ""])
def test_a_wrong_content_type_is_415(client: httpx.Client, content_type: str) -> None:
    """Forms and undeclared bodies are refused, so that a web page cannot post unnoticed."""
    headers = {"Content-Type": content_type}
    error_of(client.post(COMPLETIONS, content=b'{"prompt": "x"}', headers=headers), 415)


@pytest.mark.parametrize(
    "content_type", ["application/json; charset=utf-8", "Application/JSON", "application/x+json"]
)
def test_spellings_of_json_are_accepted(client: httpx.Client, content_type: str) -> None:
    """Parameters and case do not matter."""
    headers = {"Content-Type": content_type}
    response = client.post(COMPLETIONS, content=b'{"prompt": "x"}', headers=headers)

    assert response.status_code == 200


def test_messages_stay_short_whatever_was_sent(client: httpx.Client) -> None:
    """Values are cut in messages and names in `param`."""
    big = "\u00e9" * 50_000
    for body in (
        {"prompt": "x", "max_tokens": big},
        {"prompt": "x", "model": big},
        {"prompt": "x", "stop": [[big] * 2]},
        {"prompt": "x", "logit_bias": {big: big}},
        {"prompt": "x", "cache_salt": big},
        {"messages": MESSAGES, "chat_template_kwargs": {big: big}},
    ):
        response = client.post(COMPLETIONS, json=body)
        assert response.status_code in (400, 404)
        error_of(response, response.status_code)


def test_a_declared_body_over_the_limit_is_413(client: httpx.Client) -> None:
    """The declared length alone is enough to refuse."""
    error = error_of(client.post(COMPLETIONS, json={"prompt": "x" * MAX_BODY_BYTES}), 413)

    assert error["code"] == "request_body_too_large"


def test_a_chunked_body_over_the_limit_is_413_while_it_arrives(port: int) -> None:
    """An endless body is answered as soon as it passes the limit."""
    head = (
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        b"Transfer-Encoding: chunked\r\n\r\n"
    )
    piece = b"%x\r\n%s\r\n" % (1000, b" " * 1000)
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        connection.sendall(head + piece * (MAX_BODY_BYTES // 1000 + 1))
        # the body has not ended, and the answer is here
        status = connection.recv(4096).split(b"\r\n")[0]

    assert b" 413 " in status


def test_unknown_models_are_404(client: httpx.Client) -> None:
    """Missing and empty names mean the default; others must exist."""
    error = error_of(client.post(COMPLETIONS, json={"prompt": "x", "model": "nope"}), 404)

    assert (error["code"], error["type"]) == ("model_not_found", "not_found_error")
    for fields in ({}, {"model": ""}, {"model": None}):
        body = client.post(COMPLETIONS, json={"prompt": "x", **fields}).json()
        assert body["model"] == "m"
    body = client.post(COMPLETIONS, json={"prompt": "x", "model": "org/other"}).json()
    assert body["model"] == "org/other"


def test_routing_errors_have_the_same_shape(client: httpx.Client) -> None:
    """Unknown paths, wrong methods and trailing slashes."""
    error_of(client.get("/v1/nothing"), 404)
    error_of(client.post(COMPLETIONS + "/", json={"prompt": "x"}), 404)
    response = client.get(COMPLETIONS)
    error_of(response, 405)
    assert response.headers["allow"] == "POST"


@pytest.mark.parametrize(
    ("error", "status", "code", "retries"),
    [
        (InvalidRequest("no", "seed"), 400, None, False),
        (RequestTooLarge("needs 12 blocks, the pool has 8"), 400, "request_too_large", False),
        (StaleSequence("released"), 409, "stale_sequence", False),
        (QueueFull("8 requests wait; the limit is 8"), 429, "queue_full", True),
        (StepFailed("the step failed"), 500, "step_failed", False),
        (EngineStopped("stopped"), 503, "engine_stopped", True),
        (Draining("ends"), 503, "draining", True),
        (ModelError("whatever"), 500, "internal_error", False),
        (RuntimeError("a secret of the server"), 500, "internal_error", False),
        (ZeroDivisionError(), 500, "internal_error", False),
    ],
)
@pytest.mark.parametrize("stream", [True, False])
def test_what_the_engine_raises_first_decides_the_status(
    client: httpx.Client,
    engine: FakeEngine,
    error: Exception,
    status: int,
    code: str | None,
    retries: bool,
    stream: bool,
) -> None:
    """Streamed or not, an error before the first token has its HTTP status."""
    engine.error = error
    response = client.post(COMPLETIONS, json={"prompt": "x", "stream": stream})

    body = error_of(response, status)
    assert body["code"] == code
    assert ("retry-after" in response.headers) is retries
    assert "secret" not in body["message"]
    engine.error = None
    assert client.post(COMPLETIONS, json={"prompt": "x"}).status_code == 200


@pytest.mark.parametrize(
    ("failure", "message"),
    [
        (StepFailed("step 3 failed"), "step 3 failed"),
        (RuntimeError("a secret of the server"), "The server failed to answer; see its log."),
    ],
)
def test_an_error_inside_a_stream_is_an_event(
    client: httpx.Client, engine: FakeEngine, failure: Exception, message: str
) -> None:
    """After the status is sent, the error comes as an event, and the stream ends properly."""
    engine.fail_after, engine.failure = 2, failure
    chunks = read_events(client.post(CHATS, json={"messages": MESSAGES, "stream": True}))

    assert chunks[-1]["error"].keys() == {"message", "type", "param", "code"}
    assert chunks[-1]["error"]["message"] == message
    assert len(chunks) == 4
    assert engine.num_active == 0


def test_an_error_in_the_middle_of_a_whole_answer_is_500(
    client: httpx.Client, engine: FakeEngine
) -> None:
    """Nothing was sent yet, so the status tells."""
    engine.fail_after = 2
    error_of(client.post(CHATS, json={"messages": MESSAGES}), 500)

    assert engine.num_active == 0


def test_unexpected_errors_are_logged_with_their_traceback(
    client: httpx.Client, engine: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    """The client learns nothing, the log everything."""
    engine.error = RuntimeError("a secret of the server")
    with caplog.at_level(logging.ERROR, "prefixkv.api"):
        client.post(COMPLETIONS, json={"prompt": "x"})

    assert len(caplog.records) == 1
    assert caplog.records[0].exc_info is not None
    assert "a secret of the server" in caplog.text


def test_names_of_unknown_fields_do_not_fill_the_memory() -> None:
    """However many and however long: they come from clients."""
    fields = UnknownFields()
    fields.note(f"{i:04}" + "x" * 1_000_000 for i in range(300))

    assert len(fields._seen) == MAX_NAMES
    assert max(map(len, fields._seen)) == MAX_LENGTH


def test_unknown_fields_are_ignored_and_logged_once(
    client: httpx.Client, caplog: pytest.LogCaptureFixture
) -> None:
    """One line per name for the life of the process; known neutral fields are not mentioned."""
    request = {"prompt": "x", "an_unknown_field": 1, "n": 1}
    with caplog.at_level(logging.INFO, "prefixkv.api"):
        for _ in range(2):
            assert client.post(COMPLETIONS, json=request).status_code == 200

    assert [record.getMessage() for record in caplog.records] == [
        "requests have a field that is ignored: 'an_unknown_field'"
    ]


@pytest.mark.parametrize("names", [[], [""]])
def test_an_application_needs_a_model_name(names: list[str]) -> None:
    """Serving under no name is refused at construction."""
    with pytest.raises(ConfigError, match="name"):
        create_app(FakeEngine(), names)


def test_every_row_of_the_table_has_the_shape() -> None:
    """All four keys at any status, and the headers that its status asks for."""
    for kind, answer in ANSWERS.items():
        response = error_response(kind("x" * 10_000))
        error = json.loads(bytes(response.body))["error"]
        assert error.keys() == {"message", "type", "param", "code"}
        assert len(response.body) < 2048
        assert (response.status_code, error["type"]) == (answer.status, answer.type)
        assert ("retry-after" in response.headers) is (answer.status in (429, 503))
        assert ("www-authenticate" in response.headers) is (answer.status == 401)
        assert error["code"] == (getattr(kind, "code", None) or answer.code)


@pytest.mark.parametrize(
    ("url", "fields"),
    [
        (CHATS, {"messages": ["SECRET"]}),
        (CHATS, {"messages": "SECRET"}),
        (CHATS, {"messages": MESSAGES, "cache_salt": "SECRET\0"}),
        (RESPONSES, {"input": "x", "instructions": ["SECRET"]}),
        ("/tokenize", {"prompt": ["SECRET"]}),
        (COMPLETIONS, {"prompt": "x", "suffix": "SECRET"}),
        (COMPLETIONS, {"prompt": {"x": "SECRET"}}),
    ],
)
def test_messages_repeat_no_prompt_and_no_salt(
    client: httpx.Client, url: str, fields: dict[str, Any]
) -> None:
    """Not even those that are wrong: clients log what they are told."""
    assert "SECRET" not in error_of(client.post(url, json=fields), 400)["message"]
