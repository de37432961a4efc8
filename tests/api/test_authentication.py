"""API keys: who is served, what a refusal tells, and which cache each key sees."""

import hashlib
import hmac
import socket
from collections.abc import Iterator

import httpx
import pytest

from prefixkv.api.access.api_keys import ApiKeys, key_digest, make_key
from prefixkv.api.access.key_file import collect_keys
from prefixkv.api.app import create_app
from prefixkv.errors import ConfigError
from tests.api.fake_engine import FakeEngine
from tests.api.live_server import running
from tests.api.test_errors import error_of

COMPLETIONS = "/v1/completions"
GUARDED = ("/v1/models", "/tokenizer_info", "/openapi.json", "/nothing", "/v1", "//health")


@pytest.fixture(scope="module")
def engine() -> FakeEngine:
    """Return the engine of `keyed`."""
    return FakeEngine()


@pytest.fixture(scope="module")
def keyed(engine: FakeEngine) -> Iterator[httpx.Client]:
    """Return a client of a server with two tenants and an operator."""
    keys = collect_keys(["sk-one", "sk-two"], None, "sk-root")
    with (
        running(create_app(engine, ["m"], keys=keys)) as port,
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=20) as client,
    ):
        yield client


@pytest.fixture(scope="module")
def open_but_for_operators() -> Iterator[httpx.Client]:
    """Return a client of a server that has nothing but an admin key."""
    keys = collect_keys((), None, "sk-root")
    with (
        running(create_app(FakeEngine(), ["m"], keys=keys)) as port,
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=20) as client,
    ):
        yield client


def bearer(key: str) -> dict[str, str]:
    """Return the header that shows `key`."""
    return {"Authorization": f"Bearer {key}"}


@pytest.mark.parametrize(
    "authorization",
    [
        None, "", "Bearer", "sk-one", "Basic sk-one", "Bearer sk-", "Bearer sk-on",
        "Bearer sk-one2", "Bearer sk-one sk-two", "Bearer SK-ONE", "Bearer caf\u00e9",
    ],
)  # fmt: skip
def test_only_a_known_key_is_served(keyed: httpx.Client, authorization: str | None) -> None:
    """401 everywhere but where monitoring looks; the answer does not repeat what was sent."""
    headers = []
    if authorization is not None:
        headers = [(b"Authorization", authorization.encode("latin-1"))]
    for path in GUARDED:
        response = keyed.get(path, headers=headers)
        error = error_of(response, 401)
        assert (error["code"], error["type"]) == ("invalid_api_key", "authentication_error")
        assert response.headers["www-authenticate"] == "Bearer"
        assert response.headers["x-request-id"]
        assert "sk-o" not in response.text
    for path in (COMPLETIONS, "/tokenize", "/detokenize", "/reset_prefix_cache"):
        error_of(keyed.post(path, json={"prompt": "x"}, headers=headers), 401)


def test_known_keys_are_served(keyed: httpx.Client) -> None:
    """Each of them, the operator's too; the scheme's case and spaces after it do not matter."""
    for value in ("Bearer sk-one", "bearer sk-two", "BEARER   sk-root"):
        response = keyed.get("/v1/models", headers={"Authorization": value})
        assert response.status_code == 200


def test_two_headers_are_no_key(keyed: httpx.Client) -> None:
    """Proxies disagree about which one counts."""
    headers = [("Authorization", "Bearer sk-one"), ("Authorization", "Bearer sk-two")]
    error_of(keyed.get("/v1/models", headers=headers), 401)


def test_monitoring_and_preflights_need_no_key(keyed: httpx.Client) -> None:
    """Health, readiness and version are open; OPTIONS gets as far as routing."""
    for path in ("/health", "/ready", "/version"):
        assert keyed.get(path).status_code == 200
    assert keyed.head("/health").status_code == 200
    error_of(keyed.options(COMPLETIONS), 405)


def test_a_refusal_does_not_wait_for_the_body(keyed: httpx.Client) -> None:
    """Who has no key cannot make the server read a gigabyte."""
    request = (
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        b"Content-Length: 1000000000\r\nAuthorization: Bearer sk-wrong\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", keyed.base_url.port or 0), timeout=10) as stream:
        stream.sendall(request)
        assert b" 401 " in stream.recv(4096).split(b"\r\n")[0]


def test_all_keys_are_compared_whichever_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time tells nothing: every digest is compared in constant time, without an early end."""
    compared: list[bytes] = []
    right = hmac.compare_digest

    def compare(one: bytes, other: bytes) -> bool:
        compared.append(one)
        return right(one, other)

    monkeypatch.setattr(hmac, "compare_digest", compare)
    keys = collect_keys(["a", "b", "c"], None, "d")
    for shown, name in (("a", "key-1"), ("c", "key-3"), ("d", "admin"), ("e", None)):
        compared.clear()
        tenant = keys.find(shown.encode())
        assert (tenant and tenant.name) == name
        assert compared == [hashlib.sha256(key.encode()).digest() for key in "abcd"]


def test_each_key_sees_a_cache_of_its_own(keyed: httpx.Client, engine: FakeEngine) -> None:
    """What a client asks for divides its own cache further, and never reaches another's."""
    engine.reset()
    for key in ("sk-one", "sk-two"):
        for fields in ({}, {"cache_salt": "s"}, {"cache_salt": "t"}):
            body = {"prompt": "x", "max_tokens": 1, **fields}
            assert keyed.post(COMPLETIONS, json=body, headers=bearer(key)).status_code == 200
    salts = [call["cache_salt"] for call in engine.calls]

    assert None not in salts
    assert len(set(salts)) == 6
    assert not any("sk-" in salt for salt in salts)


def test_keys_of_one_salt_share_and_others_follow_from_the_key() -> None:
    """A restart finds the same salts; a key and its digest have the same one."""
    shared = [make_key(name, key_digest(name), salt="team") for name in ("a", "b")]
    assert shared[0].tenant.salt_for("x") == shared[1].tenant.salt_for("x")

    again = [make_key("c", key_digest("k")), make_key("d", hashlib.sha256(b"k").digest())]
    assert again[0].tenant.salt_for(None) == again[1].tenant.salt_for(None) is not None
    assert make_key("e", key_digest("l")).tenant.salt_for(None) != again[0].tenant.salt_for(None)


def test_nothing_shows_a_key_or_a_salt() -> None:
    """Whatever prints these objects, in a traceback or a log."""
    keys = collect_keys(["sk-secret"], None, "root-secret", 3)
    salted = make_key("a", key_digest("sk-secret"), salt="salt-secret")
    told = f"{keys!r} {salted!r} {salted.tenant!r} {keys.find(b'sk-secret')!r}"

    assert "secret" not in told
    assert hashlib.sha256(b"sk-secret").hexdigest() not in told


@pytest.mark.parametrize("key", ["", " ", "a b", "a\n", "caf\u00e9"])
def test_a_key_that_no_client_can_send_is_refused(key: str) -> None:
    """Better at the start than a tenant who never gets in; the message does not repeat it."""
    with pytest.raises(ConfigError, match="printable ASCII without spaces") as refused:
        collect_keys(["good", key], None, None)
    assert not key.strip() or key not in str(refused.value)


def test_one_key_has_one_holder() -> None:
    """Two tenants with one key, or a tenant with the operator's, would be anyone's guess."""
    with pytest.raises(ConfigError, match="'key-1' and 'admin' are the same key"):
        collect_keys(["same"], None, "same")
    with pytest.raises(ConfigError, match="given twice"):
        ApiKeys([make_key("a", key_digest("x")), make_key("a", key_digest("y"))])
    with pytest.raises(ConfigError, match="'anonymous'"):
        ApiKeys([make_key("anonymous", key_digest("x"))])
    keys = collect_keys(["same", "same"], None, None)  # a slip of the hand
    assert keys.find(b"same") is not None


def test_only_the_operator_resets_the_cache(keyed: httpx.Client, engine: FakeEngine) -> None:
    """A tenant's key is known, but not enough."""
    engine.reset()
    error = error_of(keyed.post("/reset_prefix_cache", headers=bearer("sk-one")), 403)
    assert error["code"] == "admin_key_required"
    assert engine.num_resets == 0
    response = keyed.post("/reset_prefix_cache", headers=bearer("sk-root"))
    assert (response.status_code, response.json()) == (200, {"success": True})
    assert engine.num_resets == 1


def test_without_an_admin_key_nobody_resets_the_cache(
    client: httpx.Client, open_but_for_operators: httpx.Client
) -> None:
    """The route says how to turn it on; an admin key alone leaves the rest open to all."""
    error = error_of(client.post("/reset_prefix_cache", headers=bearer("x")), 403)
    assert "--admin-api-key" in error["message"]

    assert open_but_for_operators.get("/v1/models").status_code == 200
    assert open_but_for_operators.get("/v1/models", headers=bearer("none")).status_code == 200
    for headers in ({}, bearer("none")):
        error_of(open_but_for_operators.post("/reset_prefix_cache", headers=headers), 401)
    response = open_but_for_operators.post("/reset_prefix_cache", headers=bearer("sk-root"))
    assert response.status_code == 200
