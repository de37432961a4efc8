"""Browsers: scripts of other sites read nothing unless the operator names their origin."""

from collections.abc import Iterator

import httpx
import pytest

from prefixkv.api.access.key_file import collect_keys
from prefixkv.api.access.origins import parse_origins
from prefixkv.api.app import create_app
from prefixkv.errors import ConfigError
from tests.api.fake_engine import FakeEngine
from tests.api.live_server import running

ORIGIN = "https://dash.example"
PREFLIGHT = {
    "Origin": ORIGIN,
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization, content-type, x-request-id",
}
ALLOW = "access-control-allow-origin"


@pytest.fixture(scope="module")
def browsed() -> Iterator[httpx.Client]:
    """Return a client of a server with a key and an origin."""
    keys = collect_keys(["k"], None, None)
    app = create_app(FakeEngine(), ["m"], keys=keys, allowed_origins=[ORIGIN])
    with (
        running(app) as port,
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=20) as client,
    ):
        yield client


def test_it_is_closed_by_default(client: httpx.Client) -> None:
    """Neither a preflight nor an answer allows anything."""
    assert client.options("/v1/completions", headers=PREFLIGHT).status_code == 405
    for response in (
        client.get("/v1/models", headers={"Origin": ORIGIN}),
        client.options("/v1/models", headers=PREFLIGHT),
    ):
        assert not [name for name in response.headers if name.startswith("access-control")]


def test_a_named_origin_may_ask_and_read(browsed: httpx.Client) -> None:
    """The preflight needs no key; refusals can be read like answers, with their request's id."""
    preflight = browsed.options("/v1/completions", headers=PREFLIGHT)
    assert preflight.status_code == 200
    assert preflight.headers[ALLOW] == ORIGIN
    assert "POST" in preflight.headers["access-control-allow-methods"]
    assert "authorization" in preflight.headers["access-control-allow-headers"]
    for key, status in (("k", 200), ("wrong", 401)):
        headers = {"Origin": ORIGIN, "Authorization": f"Bearer {key}"}
        answer = browsed.get("/v1/models", headers=headers)
        assert (answer.status_code, answer.headers[ALLOW]) == (status, ORIGIN)
        assert "x-request-id" in answer.headers["access-control-expose-headers"]
        assert "access-control-allow-credentials" not in answer.headers


def test_other_origins_stay_out(browsed: httpx.Client) -> None:
    """Also those that only begin alike."""
    for origin in ("https://evil.example", f"{ORIGIN}.evil.example", "null"):
        preflight = browsed.options("/v1/completions", headers={**PREFLIGHT, "Origin": origin})
        assert preflight.status_code == 400
        assert ALLOW not in preflight.headers
        headers = {"Origin": origin, "Authorization": "Bearer k"}
        assert ALLOW not in browsed.get("/v1/models", headers=headers).headers


def test_origins_are_listed_or_one_each() -> None:
    """As vLLM's JSON, which a variable splits at spaces, or as single values."""
    both = ["https://a", "http://b:8080"]
    assert parse_origins(both) == parse_origins(['["https://a",', '"http://b:8080"]']) == both
    assert parse_origins(["*"]) == ["*"]
    assert parse_origins([]) == []


@pytest.mark.parametrize("value", ["a.example", "https://a/", "https://a/path", "[1]", '["*"', ""])
def test_what_no_browser_sends_is_refused(value: str) -> None:
    """It would silently never match."""
    with pytest.raises(ConfigError, match="--allowed-origins"):
        parse_origins([value])
