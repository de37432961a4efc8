"""What a server logs: enough to operate it, and nothing that its clients entrust to it."""

import json
import logging
import signal
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from prefixkv.api.serving.log_format import JsonFormatter, TextFormatter
from tests.api.fake_engine import FakeEngine
from tests.api.live_server import DEADLINE_S, eventually
from tests.api.server_process import read_until, serving

SECRETS = ("PROMPT", "SALT", "-KEY")
KEYS = {"PREFIXKV_API_KEY": "sk-KEY-1,sk-KEY-2", "PREFIXKV_ADMIN_API_KEY": "root-KEY"}
GOOD = {"Authorization": "Bearer sk-KEY-2", "X-Request-Id": "mine"}


def ask_for_all_kinds_of_answers(url: str) -> list[int]:
    """Send secrets wherever a request has room for them; return the statuses."""
    body: dict[str, Any] = {"prompt": "PROMPT", "cache_salt": "SALT", "max_tokens": 2}
    chat = {"messages": [{"role": "user", "content": "PROMPT"}], "max_tokens": 2}
    statuses = []
    with httpx.Client(base_url=url, headers=GOOD, timeout=DEADLINE_S) as client:

        def post(path: str, json: Any, **kwargs: Any) -> None:
            statuses.append(client.post(path, json=json, **kwargs).status_code)

        post("/v1/completions?q=PROMPT", body)
        post("/v1/completions", body | {"stream": True})
        post("/v1/chat/completions", chat)
        post("/v1/completions", body | {"max_tokens": 9})  # fails after the third token
        post("/v1/completions", body | {"max_tokens": 9, "stream": True})
        post("/v1/completions", body, headers={"Authorization": "Bearer wrong-KEY"})
        post("/v1/completions", body | {"cache_salt": "SALT\0"})
        post("/v1/completions", body | {"stop": ["PROMPT", 3], "seed": "PROMPT"})
        post(
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "PROMPT"}]}]},
        )
        post("/v1/completions", "PROMPT")
        post("/tokenize", {"prompt": "PROMPT"})
        post("/reset_prefix_cache", {}, headers={"Authorization": "Bearer sk-KEY-1"})
        post("/reset_prefix_cache", {}, headers={"Authorization": "Bearer root-KEY"})
        client.get("/health")
    return statuses


@pytest.mark.parametrize("log_format", ["json", "text"])
def test_no_secret_is_logged_at_any_level(tmp_path: Path, log_format: str) -> None:
    """Prompts, salts and keys are in no line, whatever the answer was; the rest is there."""
    arguments = ("--port", "0", "--log-format", log_format)
    levels = ("--log-level", "debug", "--uvicorn-log-level", "debug")
    with serving(tmp_path, *arguments, *levels, FAKE_FAIL_AFTER="3", **KEYS) as process:
        url = read_until(process, r"(http://[\d.:]+)/v1").group(1)
        statuses = ask_for_all_kinds_of_answers(url)
        process.send_signal(signal.SIGTERM)
        assert process.stdout is not None
        told = process.stdout.read()
        assert process.wait(DEADLINE_S) == 0

    assert statuses[:6] == [200, 200, 200, 500, 200, 401]
    assert statuses[6:10] == [400] * 4
    assert statuses[10:] == [200, 403, 200]
    assert told.count("mine") >= len(statuses)
    assert "a secret of the server" in told  # why the two failed
    for secret in SECRETS:
        assert secret not in told
    if log_format == "json":
        _check_lines([json.loads(line) for line in told.splitlines()], statuses)


def _check_lines(lines: list[dict[str, Any]], statuses: list[int]) -> None:
    assert all({"time", "level", "logger", "message"} <= line.keys() for line in lines)
    requests = [line for line in lines if line["logger"] == "prefixkv.access"]
    # a stream's line may come after that of the next request; there is none for /health
    assert sorted(line["status"] for line in requests) == sorted(statuses)
    first = requests[0]
    assert (first["method"], first["path"], first["tenant"]) == ("POST", "/v1/completions", "key-2")
    assert (first["request_id"], first["client"]) == ("mine", "127.0.0.1")
    assert first["duration_ms"] > 0
    kinds = ("prompt_tokens", "cached_tokens", "completion_tokens")
    counts = [[line.get(kind) for kind in kinds] for line in requests]
    assert counts[0] == [6, 0, 2]
    assert counts.count([6, 5, 2]) == 1  # the stream
    assert counts.count([6, 5, 3]) == 1  # the one that failed
    refused = next(line for line in requests if line["status"] == 401)
    assert refused["tenant"] == "anonymous"
    failure = next(line for line in lines if line["level"] == "error")
    assert failure["request_id"] == "mine"
    assert failure["exception"].startswith("Traceback")


def test_an_answer_that_was_cut_is_told(
    client: httpx.Client, engine: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    """The status alone, which was sent at the beginning, would hide it."""
    engine.step_s = 0.01
    request = {"prompt": "x", "stream": True, "max_tokens": 100_000}
    with caplog.at_level(logging.INFO, "prefixkv.access"):
        with client.stream("POST", "/v1/completions", json=request) as response:
            assert response.status_code == 200
        eventually(lambda: bool(caplog.records))
        assert client.get("/v1/models").status_code == 200
        eventually(lambda: len(caplog.records) == 2)

    cut, whole = (vars(record)["fields"] for record in caplog.records)
    assert (cut["status"], cut.get("is_cut")) == (200, True)
    assert (whole["status"], whole.get("is_cut")) == (200, None)


def test_tokens_of_a_stream_that_fails_are_told(
    client: httpx.Client, engine: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    """They were computed, whatever the endpoint."""
    engine.fail_after = 2
    requests: dict[str, dict[str, Any]] = {
        "/v1/completions": {"prompt": "x"},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
        "/v1/responses": {"input": "x"},
    }

    def counts() -> list[int | None]:
        lines = [vars(record).get("fields") for record in caplog.records]
        return [line.get("completion_tokens") for line in lines if line is not None]

    with caplog.at_level(logging.INFO, "prefixkv.access"):
        for path, body in requests.items():
            assert client.post(path, json={**body, "stream": True}).status_code == 200
        eventually(lambda: len(counts()) == len(requests))
    assert counts() == [2, 2, 2]


def record_of(message: str, *arguments: object, **extra: Any) -> logging.LogRecord:
    """Return a record, of an exception if one is being handled."""
    info: Any = sys.exc_info() if sys.exc_info()[0] else None
    record = logging.LogRecord("x", logging.ERROR, "f.py", 1, message, arguments, info)
    vars(record).update(extra)
    return record


def test_a_line_of_json_is_one_line() -> None:
    """Whatever is in it: line breaks, half characters, objects, tracebacks."""
    try:
        raise ValueError("a\nb")
    except ValueError:
        record = record_of("%s\n\u2028\ud800", "x", fields={"path": Path("p"), "n": 1})
    text = JsonFormatter().format(record)

    assert len(text.splitlines()) == 1
    line = json.loads(text)
    assert (line["path"], line["n"], line["level"]) == ("p", 1, "error")
    assert "ValueError: a\nb" in line["exception"]
    assert line["time"].endswith("+00:00")


def test_a_line_of_text_shows_the_fields() -> None:
    """Behind the message, without those that have no value."""
    text = TextFormatter().format(record_of("m\n", fields={"status": 200, "none": None}))

    assert text.endswith(" ERROR x: m status=200")
    text = TextFormatter().format(record_of("m", fields={"request_id": "1 status=500"}))
    assert text.endswith(' ERROR x: m request_id="1 status=500"')


def test_a_failed_start_is_a_line_of_json_too(tmp_path: Path) -> None:
    """So that whoever collects the log reads why."""
    arguments = ("--log-format", "json", "--api-key-file", "nothing.toml")
    with serving(tmp_path, *arguments) as process:
        assert process.stdout is not None
        told = process.stdout.read()
        assert process.wait(DEADLINE_S) == 1

    line = json.loads(told)
    assert line["level"] == "critical"
    assert line["message"] == "nothing.toml: No such file or directory"
