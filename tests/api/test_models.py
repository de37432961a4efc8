"""GET /v1/models, /health, /ready and /version."""

from importlib.metadata import version

import httpx

from tests.api.fake_engine import MAX_MODEL_LEN, FakeEngine


def test_all_names_are_listed(client: httpx.Client) -> None:
    """Every served name has a card with the context length."""
    body = client.get("/v1/models").json()

    assert body["object"] == "list"
    assert [card["id"] for card in body["data"]] == ["m", "org/other", "gpt-5.6"]
    assert {card["max_model_len"] for card in body["data"]} == {MAX_MODEL_LEN}
    assert {card["object"] for card in body["data"]} == {"model"}


def test_one_card_by_name_even_with_a_slash(client: httpx.Client) -> None:
    """A model is found under its own path, an unknown one is 404."""
    assert client.get("/v1/models/org/other").json()["id"] == "org/other"
    response = client.get("/v1/models/nope")
    assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")


def test_the_api_describes_itself(client: httpx.Client) -> None:
    """The OpenAPI document has every path; warnings, which are errors here, would show."""
    paths = client.get("/openapi.json").json()["paths"].keys()

    generating = {"/v1/completions", "/v1/chat/completions"}
    assert generating | {"/v1/models", "/health", "/ready", "/version"} <= paths
    assert {"/tokenize", "/detokenize", "/tokenizer_info"} <= paths


def test_health_follows_the_engine(client: httpx.Client, engine: FakeEngine) -> None:
    """200 while it runs, 503 with Retry-After while it does not; requests are refused alike."""
    assert client.get("/health").status_code == 200
    assert client.get("/ready").status_code == client.head("/health").status_code == 200
    engine.is_running = False
    asked = client.get("/health"), client.get("/ready")
    for response in (*asked, client.post("/v1/completions", json={"prompt": "x"})):
        assert response.status_code == 503
        assert response.headers["retry-after"]
        assert response.json()["error"]["code"] == "engine_stopped"


def test_the_version_is_told(client: httpx.Client) -> None:
    """Also while the engine does not run."""
    assert client.get("/version").json() == {"version": version("prefixkv")}
