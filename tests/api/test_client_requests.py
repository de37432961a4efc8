"""Requests as client libraries send them: each is served, or refused in the right shape."""

import json
import os
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai_shapes import check_answer, check_chunk, read_stream

from tests.api.client_requests import REFUSED, SERVED, refused_field
from tests.api.fake_engine import FakeEngine

# of what clients ask, endpoints that are no part of this server; those of a generation, not yet
NEVER_SERVED = {"/v1/embeddings"}
METHODS = {"/v1/models": "GET", "/health": "GET"}


def captured_requests() -> list[dict[str, Any]]:
    """Return the captured requests of real clients; none where the file is absent."""
    beside_checkout = Path(__file__).parents[3] / "shared" / "data"
    folder = Path(os.environ.get("PREFIXKV_SHARED_DATA", beside_checkout))
    path = folder / "client-requests.jsonl"
    if not path.is_file():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]


CAPTURED = captured_requests()


@pytest.fixture(scope="module")
def paths(_client: httpx.Client) -> set[str]:
    """The paths that the server documents."""
    return set(_client.get("/openapi.json").json()["paths"])


def judge(response: httpx.Response, path: str, body: dict[str, Any] | None) -> list[Any]:
    """Check the answer against what is documented for `body`; return bodies or chunks of a 200."""
    field = refused_field(body)
    if field is not None:
        assert response.status_code == 400, response.text
        error = response.json()["error"]
        assert error.keys() == {"message", "type", "param", "code"}
        assert error["param"].partition(".")[0] == field, error
        assert error["type"] == "invalid_request_error"
        assert len(response.content) < 2048
        return []
    assert response.status_code == 200, response.text
    if body is None:
        return []
    if body.get("stream"):
        chunks = read_stream(response.text)
        for chunk in chunks:
            check_chunk(path, chunk)
        return chunks
    check_answer(path, response.json())
    return [response.json()]


def usage_of(bodies: list[Any]) -> Any:
    """The usage of an answer, or of the chunk or event of a stream that has it."""
    told = [body.get("response", body).get("usage") for body in bodies]
    usages = [usage for usage in told if usage is not None]
    assert len(usages) == 1
    return usages[0]


@pytest.mark.parametrize("client_name", SERVED)
def test_what_each_client_sends_is_served(
    client: httpx.Client, paths: set[str], client_name: str
) -> None:
    """A strictly valid answer whose usage comes once and counts cached tokens: all on resending."""
    for path, body in SERVED[client_name]:
        if path not in paths:
            continue
        assert refused_field(body) is None
        for is_resent in (False, True):
            bodies = judge(client.post(path, json=body), path, body)
            usage = usage_of(bodies)
            details = usage.get("prompt_tokens_details") or usage["input_tokens_details"]
            num_prompt = usage.get("prompt_tokens", usage.get("input_tokens"))
            num_prompts = 2 if client_name == "lm-eval" and "echo" in body else 1
            assert isinstance(details["cached_tokens"], int)
            if is_resent:
                assert details["cached_tokens"] == num_prompt - num_prompts


@pytest.mark.parametrize(("path", "body"), REFUSED)
def test_what_needs_more_is_refused(
    client: httpx.Client, engine: FakeEngine, paths: set[str], path: str, body: dict[str, Any]
) -> None:
    """Tools, structure, suffixes and what beams lack are a clear 400, and nothing is generated."""
    if path in paths:
        assert refused_field(body) is not None
        assert judge(client.post(path, json=body), path, body) == []
        assert engine.calls == []


def test_what_clients_probe_is_there(client: httpx.Client) -> None:
    """Before they begin, clients look for models, health, and what the tokenizer is."""
    for path in ("/health", "/v1/models", "/tokenizer_info", "/version"):
        assert client.get(path).status_code == 200
    check_answer("/v1/models", client.get("/v1/models").json())
    error = client.post("/v1/embeddings", json={"input": "x"})
    assert error.status_code == 404
    assert error.json()["error"].keys() == {"message", "type", "param", "code"}


@pytest.mark.skipif(not CAPTURED, reason="shared/data/client-requests.jsonl is not here")
def test_captured_requests_are_served_or_refused_properly(
    client: httpx.Client, paths: set[str]
) -> None:
    """Every real request: 200 and valid, or the 400 that is documented for a field it has."""
    assert len(CAPTURED) > 100
    for request in CAPTURED:
        method, path, body = request["method"], request["path"], request["body"]
        response = client.request(method, path, json=body)
        if response.status_code == 404:
            assert path in NEVER_SERVED or path not in paths, path
            continue
        try:
            judge(response, path, body)
        except AssertionError as error:
            raise AssertionError((request["client"], request["case"], path)) from error
