"""Cache controls as clients spell them: what the engine is asked."""

from typing import Any

import httpx
import pytest
from starlette.requests import Request

from prefixkv.api.caching.cache_plan import CachePlan
from prefixkv.api.caching.cache_use import cache_controls
from prefixkv.api.endpoint import Job
from prefixkv.api.requests.schemas import GenerationRequest, parse_request
from prefixkv.api.service import Service
from prefixkv.cache_control import (
    Breakpoint,
    CacheControl,
    CacheReport,
    Miss,
)
from prefixkv.sampling_params import SamplingParams
from tests.api.cache_requests import BOTH, CHATS, COMPLETIONS, HEAD, MARK, asked, marked, part, post
from tests.api.fake_engine import FakeEngine

NOTHING = Miss("never_computed", 0)


NULLS: dict[str, Any] = dict.fromkeys(
    ["prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "session_id", "kv_hints",
     "return_cache_report", "cache_salt", "priority"]
)  # fmt: skip
HINTS = {"protocol_version": 9, "actions": [{"action_type": "dance", "payload": 1}, "no object"]}


@pytest.mark.parametrize("url", [COMPLETIONS, CHATS])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        NULLS,
        {"kv_hints": HINTS},
        {"kv_hints": "?"},
        {"prompt_cache_retention": "in_memory"},
        {"prompt_cache_options": {"mode": "implicit", "ttl": None, "new": 1}},
        {"prompt_cache_options": {"comparison_response_id": "resp_1"}},
    ],
)
def test_what_asks_for_nothing_asks_nothing_of_the_cache(
    client: httpx.Client, engine: FakeEngine, url: str, fields: dict[str, Any]
) -> None:
    """Null is absent, and a hint that nobody knows fails no request."""
    engine.cache_report = CacheReport(NOTHING)
    body = post(client, url, **fields)

    assert asked(engine) is None
    assert "cache_report" not in body
    assert "prompt_cache" not in body


def test_langchain_caches_what_it_marks_and_no_more(
    client: httpx.Client, engine: FakeEngine
) -> None:
    """The explicit mode, as LangChain sends it; the mark is gone before the template runs."""
    options = {"mode": "explicit", "ttl": "30m"}
    marked(client, part("LONG", **MARK), part("q"), prompt_cache_options=options)

    assert engine.prompts[-1] == "<user>LONGq\n<assistant>"
    end = HEAD + len("LONG")
    assert asked(engine) == CacheControl(breakpoints=(Breakpoint(end, 1800),), write_limit=end)


def test_pydantic_ai_marks_and_all_is_cached(client: httpx.Client, engine: FakeEngine) -> None:
    """A CachePoint comes without options."""
    content = [{"text": "LONG", "type": "text", **MARK}, {"text": "q", "type": "text"}]
    post(client, CHATS, model="gpt-5.6", messages=[{"role": "user", "content": content}])

    assert asked(engine) == CacheControl(breakpoints=(Breakpoint(HEAD + 4, 1800),))


def test_anthropics_spelling(client: httpx.Client, engine: FakeEngine) -> None:
    """As litellm sends it, on a system message; and on a message as a whole."""
    hour = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    messages = [
        {"role": "system", "content": [part("LONG", **hour)]},
        {"role": "user", "content": "q", "cache_control": {"type": "ephemeral"}},
    ]
    post(client, CHATS, messages=messages)

    system, user = len("<system>LONG"), len("<system>LONG\n<user>q")
    breakpoints = (Breakpoint(system, 3600), Breakpoint(user, 1800))
    assert asked(engine) == CacheControl(breakpoints=breakpoints)


def test_string_and_parts_marked_or_not_render_alike(
    client: httpx.Client, engine: FakeEngine
) -> None:
    """The tokens depend on the text alone."""
    for content in ("one two", [part("one two")], [part("one two", **MARK)]):
        post(client, CHATS, messages=[{"role": "user", "content": content, "cache_control": None}])

    assert len(set(engine.prompts)) == 1


TTLS: list[tuple[Any, float]] = [
    ("5m", 300), ("30m", 1800), ("1h", 3600), ("12h", 43200), ("24h", 86400), ("90s", 90),
    ("2d", 172800), (" 1.5H ", 5400), ("7", 7), (12, 12), (0.5, 0.5), (10**400, 1e9),
    ("forever", 1800), ("", 1800), ("-5m", 1800), (0, 1800), (-3, 1800), ("1h30m", 1800),
]  # fmt: skip


def test_lifetimes(client: httpx.Client, engine: FakeEngine) -> None:
    """A breakpoint's own counts before that of the options; one that says nothing is 30m."""
    for ttl, seconds in TTLS:
        own = {"prompt_cache_breakpoint": {"mode": "explicit", "ttl": ttl}}
        marked(client, part("a"), part("b", **own), prompt_cache_options={"mode": "explicit"})
        control = asked(engine)
        assert control is not None
        assert control.breakpoints[0].ttl_s == seconds, ttl

    options = {"mode": "explicit", "ttl": "5m"}
    other = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    marked(client, part("a", **MARK), part("b", **other), prompt_cache_options=options)
    control = asked(engine)
    assert control is not None
    assert [point.ttl_s for point in control.breakpoints] == [300, 3600]

    marked(client, part("a", **MARK), prompt_cache_retention="24h")
    assert asked(engine) == CacheControl(breakpoints=(Breakpoint(HEAD + 1, 86400),))


def test_the_explicit_mode_without_breakpoints_writes_nothing(
    client: httpx.Client, engine: FakeEngine
) -> None:
    """Nor does a completion, which has no parts to mark."""
    for url in (COMPLETIONS, CHATS):
        body = post(client, url, prompt_cache_options={"mode": "explicit", "ttl": "1h"})
        assert asked(engine) == CacheControl(write_limit=0)
        assert body["usage"]["prompt_tokens_details"]["cache_write_tokens"] == 0


def test_a_lifetime_in_the_implicit_mode_is_for_the_whole_prompt(
    client: httpx.Client, engine: FakeEngine
) -> None:
    """OpenAI's implicit breakpoint is at its end; a completion has that one alone."""
    post(client, COMPLETIONS, prompt=["one", "three"], prompt_cache_options={"ttl": "1h"})
    controls = [call["cache_control"] for call in engine.calls]
    assert controls == [CacheControl(breakpoints=(Breakpoint(n, 3600),)) for n in (3, 5)]

    marked(client, part("a", **MARK), part("b"), prompt_cache_options={"ttl": "1h"})
    end = len(engine.prompts[-1])
    breakpoints = (Breakpoint(HEAD + 1, 3600), Breakpoint(end, 3600))
    assert asked(engine) == CacheControl(breakpoints=breakpoints)


def test_two_marks_of_one_place_are_one_breakpoint(
    client: httpx.Client, engine: FakeEngine
) -> None:
    """The longer lifetime counts; a mark before any text has no place."""
    hour = {"prompt_cache_breakpoint": {"ttl": "1h"}}
    marked(client, part("a", **hour), part("", **MARK), part("b"))

    assert asked(engine) == CacheControl(breakpoints=(Breakpoint(HEAD + 1, 3600),))


def test_sessions(client: httpx.Client, engine: FakeEngine) -> None:
    """A field counts before headers, and those before the key of the cache."""
    fields = {"session_id": "field", "prompt_cache_key": "key"}
    headers = {"X-Session-ID": "header", "X-Session-Affinity": "affinity"}
    said: list[tuple[dict[str, str], dict[str, str], str]] = [
        (fields, headers, "field"),
        ({"prompt_cache_key": "key"}, headers, "header"),
        ({"prompt_cache_key": "key"}, {"X-Session-Affinity": "affinity"}, "affinity"),
        ({"prompt_cache_key": "key"}, {}, "key"),
    ]
    for url in (COMPLETIONS, CHATS):
        for more, headers, session in said:
            client.post(url, json=BOTH | more, headers=headers)
            assert asked(engine) == CacheControl(session=session)

    post(client, CHATS, session_id="", prompt_cache_key="")
    assert asked(engine) is None
    post(client, CHATS, session_id="x" * 5000)
    control = asked(engine)
    assert control is not None
    assert control.session is not None
    assert len(control.session) == 64


def test_priorities(client: httpx.Client, engine: FakeEngine) -> None:
    """A field counts before vLLM's header, which must be an integer."""
    header = {"X-Vllm-Priority": "-5"}
    client.post(CHATS, json=BOTH, headers=header)
    client.post(CHATS, json=BOTH | {"priority": 3}, headers=header)
    client.post(CHATS, json=BOTH | {"priority": 0}, headers=header)
    assert [call["priority"] for call in engine.calls] == [-5, 3, 0]

    refused = client.post(CHATS, json=BOTH, headers={"X-Vllm-Priority": "high"})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "X-Vllm-Priority"


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"prompt_cache_key": 5}, "prompt_cache_key"),
    ({"prompt_cache_options": "explicit"}, "prompt_cache_options"),
    ({"prompt_cache_options": {"mode": "auto"}}, "prompt_cache_options.mode"),
    ({"prompt_cache_options": {"ttl": [1]}}, "prompt_cache_options.ttl"),
    ({"prompt_cache_options": {"ttl": True}}, "prompt_cache_options.ttl"),
    ({"prompt_cache_options": {"prewarm": "yes"}}, "prompt_cache_options.prewarm"),
    ({"prompt_cache_retention": 24}, "prompt_cache_retention"),
    ({"session_id": {}}, "session_id"),
    ({"return_cache_report": 1}, "return_cache_report"),
]


def test_wrong_types_are_named(client: httpx.Client, engine: FakeEngine) -> None:
    """Each is a 400 with the field as its param, in both endpoints."""
    for url in (COMPLETIONS, CHATS):
        for fields, param in WRONG:
            response = client.post(url, json=BOTH | fields)
            assert response.status_code == 400, fields
            assert response.json()["error"]["param"] == param

    content = [part("a"), part("b", prompt_cache_breakpoint="here")]
    response = client.post(CHATS, json={"messages": [{"role": "user", "content": content}]})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "messages.0.content.1.prompt_cache_breakpoint"
    assert engine.calls == []


def test_an_endless_lifetime_is_a_long_one(client: httpx.Client, engine: FakeEngine) -> None:
    """A number that a double can hold, and no clock."""
    raw = '{"prompt": "x", "prompt_cache_options": {"ttl": 1e300}}'
    client.post(COMPLETIONS, content=raw, headers={"Content-Type": "application/json"})

    assert asked(engine) == CacheControl(breakpoints=(Breakpoint(1, 1e9),))


def test_salts_of_base64(client: httpx.Client, engine: FakeEngine) -> None:
    """All its characters, in both alphabets."""
    post(client, CHATS, cache_salt="ab+/cd-_09==")

    assert engine.calls[-1]["cache_salt"] == "client:ab+/cd-_09=="


def test_other_salts_are_looked_at_where_the_server_allows_it() -> None:
    """And only for a report: it costs a look into each."""
    request = parse_request(GenerationRequest, {"return_cache_report": True})
    silent = parse_request(GenerationRequest, {})
    http_request = Request({"type": "http", "headers": []})

    def looks(allowed: bool, request: GenerationRequest) -> list[CacheControl | None]:
        service = Service(
            engine=FakeEngine(),
            served_model_names=("m",),
            max_body_bytes=1,
            tells_other_salts=allowed,
        )
        job = Job([[1]], SamplingParams(), request, "m", [CachePlan()])
        return cache_controls(service, http_request, job)

    assert looks(True, request) == [CacheControl(looks_at_other_salts=True)]
    assert looks(False, request) == looks(True, silent) == [None]
