"""Request ids: taken from the client where they are sane, always echoed."""

import httpx
import pytest

from tests.api.fake_engine import FakeEngine

URL = "/v1/completions"


def test_the_header_names_the_response(client: httpx.Client, engine: FakeEngine) -> None:
    """The id is in the header, in the body, and in what the engine hears."""
    headers = {"X-Request-Id": "conv-7"}
    response = client.post(URL, json={"prompt": "x", "request_id": "other"}, headers=headers)

    assert response.headers["x-request-id"] == "conv-7"
    assert response.json()["id"] == "cmpl-conv-7"
    assert engine.calls[0]["request_id"].startswith("cmpl-conv-7-0-")


def test_the_body_names_it_where_no_header_does(client: httpx.Client) -> None:
    """`request_id` is echoed alike."""
    response = client.post(URL, json={"prompt": "x", "request_id": "mine"})

    assert response.headers["x-request-id"] == "mine"
    assert response.json()["id"] == "cmpl-mine"


def test_one_id_twice_is_two_requests_for_the_engine(
    client: httpx.Client, engine: FakeEngine
) -> None:
    """A retry with the same id while the first still runs must not collide."""
    for _ in range(2):
        client.post(URL, json={"prompt": ["x", "y"]}, headers={"X-Request-Id": "same"})

    assert len({call["request_id"] for call in engine.calls}) == 4


@pytest.mark.parametrize("header", ["", "caf\u00e9"])
def test_odd_headers_are_replaced(client: httpx.Client, header: str) -> None:
    """An id that cannot stand in a header is replaced by a fresh one."""
    response = client.get("/health", headers=[(b"X-Request-Id", header.encode("latin-1"))])

    assert len(response.headers["x-request-id"]) == 32


def test_long_headers_are_cut(client: httpx.Client) -> None:
    """128 characters are enough to find a request in a log."""
    response = client.get("/health", headers={"X-Request-Id": "x" * 500})

    assert response.headers["x-request-id"] == "x" * 128


def test_errors_have_an_id_too(client: httpx.Client, engine: FakeEngine) -> None:
    """Refusals, unknown paths and crashes are echoed like answers."""
    headers = {"X-Request-Id": "e"}
    assert client.get("/nothing", headers=headers).headers["x-request-id"] == "e"
    assert client.post(URL, headers=headers).headers["x-request-id"] == "e"
    engine.error = RuntimeError()
    response = client.post(URL, json={"prompt": "x"}, headers=headers)
    assert response.headers["x-request-id"] == "e"
