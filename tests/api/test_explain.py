"""A miss explains itself: in the answer on demand, and afterwards by the id of the request."""

from collections.abc import Sequence
from typing import Any

import httpx
import pytest
from starlette.requests import Request
from starlette.testclient import TestClient

from prefixkv.api.access.api_keys import ApiKeys, key_digest, make_key
from prefixkv.api.access.tenant import ANONYMOUS, SCOPE_KEY, Tenant
from prefixkv.api.app import create_app
from prefixkv.api.caching.cache_plan import CachePlan
from prefixkv.api.caching.cache_use import cache_reports
from prefixkv.api.caching.explanations import (
    MAX_PROMPTS,
    MAX_REQUESTS,
    Explanation,
    Explanations,
    explanation,
)
from prefixkv.api.endpoint import Job
from prefixkv.api.requests.schemas import GenerationRequest, parse_request
from prefixkv.api.service import Service
from prefixkv.cache_control import CacheReport, Miss
from prefixkv.sampling_params import SamplingParams
from tests.api.fake_engine import ByteTokenizer, FakeEngine
from tests.api.sse import read_events

PROMPT = "You are a kind pirate. Say hello."
CACHED = "You are a kind sailor. Say hello."
START = PROMPT.index("pirate")


def ids(text: str) -> tuple[int, ...]:
    """The tokens of the fake tokenizer."""
    return tuple(text.encode())


DIFFERS = Miss("differs", START, ids(CACHED[START : START + 16]))
BODY: dict[str, Any] = {
    "prompt": PROMPT, "max_tokens": 2, "return_cache_report": True, "request_id": "abc/1",
}  # fmt: skip
TOLD = {
    "reason": "differs",
    "prompt_tokens": len(PROMPT),
    "cached_tokens": START,
    "position": START,
    "before": " a kind ",
    "prompt_token": "p",
    "prompt": "pirate. ",
    "cached_token": "s",
    "cached": "sailor. ",
}


def test_what_differs_is_shown_with_its_neighbourhood(
    client: httpx.Client, engine: FakeEngine
) -> None:
    """Whole, streamed, and by any of the ids that the client knows."""
    engine.cache_report = CacheReport(DIFFERS)
    body = client.post("/v1/completions", json=BODY).json()
    assert body["cache_report"] == TOLD

    for options in ({}, {"stream_options": {"include_usage": True}}):
        chunks = read_events(client.post("/v1/completions", json=BODY | {"stream": True} | options))
        assert [chunk["cache_report"] for chunk in chunks if "cache_report" in chunk] == [TOLD]

    for name in ("abc/1", "cmpl-abc/1", body["id"]):
        answer = client.get(f"/v1/prefixkv/explain/{name}")
        assert answer.json() == {"id": name, "object": "cache_report", "prompts": [TOLD]}


def test_without_the_field_it_is_remembered_all_the_same(
    client: httpx.Client, engine: FakeEngine
) -> None:
    """Also of a chat; by the header."""
    engine.cache_report = CacheReport(Miss("evicted", 5))
    body = {"messages": [{"role": "user", "content": "hello"}]}
    answer = client.post("/v1/chat/completions", json=body)
    assert "cache_report" not in answer.json()

    for name in (answer.headers["x-request-id"], answer.json()["id"]):
        (told,) = client.get(f"/v1/prefixkv/explain/{name}").json()["prompts"]
        assert (told["reason"], told["position"], told["before"]) == ("evicted", 5, "<user")
        assert told["prompt_token"] == ">"
        assert (told["cached"], told["cached_token"]) == (None, None)


def test_an_unknown_request_is_a_404(client: httpx.Client, engine: FakeEngine) -> None:
    """With a code of its own."""
    answer = client.get("/v1/prefixkv/explain/nobody")
    assert answer.status_code == 404
    error = answer.json()["error"]
    assert (error["type"], error["code"]) == ("not_found_error", "request_not_found")
    assert error["param"] == "request_id"
    assert client.post("/v1/prefixkv/explain/nobody").status_code == 405


@pytest.mark.parametrize("shows_shared_text", [True, False])
def test_who_is_shown_what_others_sent(shows_shared_text: bool) -> None:
    """Those of one salt, and without a salt all, unless the server keeps it to itself."""
    service = Service(
        engine=FakeEngine(),
        served_model_names=("m",),
        max_body_bytes=1,
        shows_shared_text=shows_shared_text,
    )

    def cached(tenant: Tenant, **fields: Any) -> str | None:
        request = parse_request(GenerationRequest, {"return_cache_report": True} | fields)
        job = Job([ids(PROMPT)], SamplingParams(), request, "m", [CachePlan()])
        http_request = Request({"type": "http", "headers": [], SCOPE_KEY: tenant})
        reports = cache_reports(service, http_request, job, "a")
        told: str | None = reports.members(0, CacheReport(DIFFERS))["cache_report"]["cached"]
        return told

    assert cached(Tenant("salted", "s")) == "sailor. "
    assert cached(ANONYMOUS, cache_salt="mine") == "sailor. "
    assert cached(ANONYMOUS) == ("sailor. " if shows_shared_text else None)


def test_a_key_explains_its_own_requests_only(engine: FakeEngine) -> None:
    """Those of others are as if they had never been, whatever their ids."""
    engine.cache_report = CacheReport(DIFFERS)
    keys = ApiKeys(make_key(name, key_digest(name)) for name in ("one", "two"))
    client = TestClient(create_app(engine, ["m"], keys=keys))
    client.post("/v1/completions", json=BODY, headers={"Authorization": "Bearer one"})
    path = "/v1/prefixkv/explain/abc/1"

    statuses = [
        client.get(path, headers={"Authorization": f"Bearer {key}"}).status_code
        for key in ("one", "two", "three")
    ]
    assert statuses == [200, 404, 401]


def explained(miss: Miss, prompt: Sequence[int] = ids(PROMPT)) -> Explanation:
    """Return an explanation that tells all."""
    return explanation(miss, prompt, tells_cached=True)


def test_the_first_difference_may_lie_behind_what_was_reused() -> None:
    """Whole blocks are reused; the texts go on alike for a while."""
    start = START - 3
    told = explained(Miss("differs", start, ids(CACHED[start : start + 16])))

    assert (told.num_cached_tokens, told.position) == (start, START)
    assert told.body(ByteTokenizer()) == TOLD | {"cached_tokens": start}


@pytest.mark.parametrize("length", [0, 1, 9])
def test_prompts_shorter_than_the_neighbourhood(length: int) -> None:
    """Nothing is shown where nothing is."""
    prompt = ids("x" * length + "y")
    told = explained(Miss("none", length), prompt).body(ByteTokenizer())

    assert told["before"] == ("x" * min(length, 8) or None)
    assert (told["prompt"], told["cached"]) == ("y", None)


def test_who_shares_a_cache_by_accident_sees_no_text_of_others() -> None:
    """Only what is the prompt's own."""
    told = explanation(DIFFERS, ids(PROMPT), tells_cached=False).body(ByteTokenizer())

    assert told == TOLD | {"cached": None, "cached_token": None}


def test_a_tenants_requests_are_unknown_to_others() -> None:
    """And no tenant displaces those of another."""
    memory = Explanations()
    one, other = Tenant("one"), Tenant("other")
    memory.recorder(one, "a")(0, explained(DIFFERS))
    for number in range(MAX_REQUESTS + 5):
        memory.recorder(other, str(number))(0, explained(DIFFERS))

    assert memory.find(one, "a") is not None
    assert memory.find(other, "a") is None
    assert memory.find(ANONYMOUS, "a") is None
    assert memory.find(other, "4") is None
    assert memory.find(other, "5") is not None


def test_the_memory_of_one_request_is_bounded_and_its_own() -> None:
    """A second request of the same id replaces the first."""
    memory = Explanations()
    remember = memory.recorder(ANONYMOUS, "a")
    for prompt in reversed(range(MAX_PROMPTS + 5)):
        remember(prompt, explained(Miss("none", prompt)))
    found = memory.find(ANONYMOUS, "a") or []
    assert [told.num_cached_tokens for told in found] == list(range(5, MAX_PROMPTS + 5))

    memory.recorder(ANONYMOUS, "a")(1, explained(Miss("evicted", 2)))
    found = memory.find(ANONYMOUS, "a") or []
    assert [told.reason for told in found] == ["evicted"]


def test_an_id_that_looks_like_a_responses() -> None:
    """Is found as it was given."""
    memory = Explanations()
    memory.recorder(ANONYMOUS, "cmpl-a")(0, explained(Miss("evicted", 1)))

    assert memory.find(ANONYMOUS, "cmpl-a") == memory.find(ANONYMOUS, "cmpl-cmpl-a")
    assert memory.find(ANONYMOUS, "a") is None
