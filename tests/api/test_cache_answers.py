"""What an answer tells of the cache, and the answer of a prewarming, which tells nothing else."""

import json

import httpx
import pytest

from prefixkv.cache_control import (
    Breakpoint,
    CacheControl,
    CacheReport,
    LeaseOutcome,
    Miss,
)
from tests.api.cache_requests import BOTH, CHATS, COMPLETIONS, HEAD, MARK, asked, marked, part, post
from tests.api.fake_engine import FakeEngine
from tests.api.sse import read_events

NOTHING = Miss("never_computed", 0)


def test_what_was_applied_is_told(client: httpx.Client, engine: FakeEngine) -> None:
    """Whole and streamed, once."""
    leases = (LeaseOutcome(HEAD + 1, 60.0), LeaseOutcome(HEAD + 2, 60.0, "more than 4"))
    engine.cache_report = CacheReport(NOTHING, leases)
    messages = [{"role": "user", "content": [part("a", **MARK), part("b", **MARK)]}]
    expected = {
        "mode": "implicit",
        "breakpoints": [
            {"num_tokens": HEAD + 1, "ttl_s": 60, "status": "granted"},
            {"num_tokens": HEAD + 2, "ttl_s": 60, "status": "refused", "reason": "more than 4"},
        ],
    }
    assert post(client, CHATS, messages=messages)["prompt_cache"] == expected

    for options in ({}, {"stream_options": {"include_usage": True}}):
        body = BOTH | {"messages": messages, "stream": True} | options
        chunks = read_events(client.post(CHATS, json=body))
        told = [chunk for chunk in chunks if "prompt_cache" in chunk]
        assert [chunk["prompt_cache"] for chunk in told] == [expected]
        assert told[0]["choices"][0]["finish_reason"] == "length"
        assert [c for c in chunks if "cache_report" in c] == []


def test_a_mark_that_the_template_leaves_no_place_is_told(
    client: httpx.Client, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And is no error; in the explicit mode nothing is written then."""
    engine.cache_report = CacheReport(NOTHING)
    monkeypatch.setattr(engine.tokenizer, "chat_text", lambda *_: "always the same")
    body = marked(client, part("a", **MARK), prompt_cache_options={"mode": "explicit"})

    assert asked(engine) == CacheControl(write_limit=0)
    (told,) = body["prompt_cache"]["breakpoints"]
    assert (told["status"], told["num_tokens"]) == ("refused", 0)
    assert "rendered" in told["reason"]


def test_several_prompts_are_told_of_in_their_order(
    client: httpx.Client, engine: FakeEngine
) -> None:
    """Whole, as lists; streamed, with the end of each prompt."""
    engine.cache_report = CacheReport(NOTHING, (LeaseOutcome(3, 60.0),))
    fields = {"prompt": ["one", "three"], "return_cache_report": True}
    body = post(client, COMPLETIONS, **fields)
    assert [told["prompt_tokens"] for told in body["cache_report"]] == [3, 5]
    assert len(body["prompt_cache"]) == 2

    chunks = read_events(client.post(COMPLETIONS, json=BOTH | fields | {"stream": True}))
    lengths = [
        chunk["cache_report"]["prompt_tokens"] for chunk in chunks if "cache_report" in chunk
    ]
    assert sorted(lengths) == [3, 5]


def test_written_tokens_are_told_beside_cached_ones(client: httpx.Client) -> None:
    """Whole and streamed, cold and warm."""
    cold = post(client, COMPLETIONS)["usage"]["prompt_tokens_details"]
    assert cold == {"cached_tokens": 0, "cache_write_tokens": 7}
    chunks = read_events(client.post(COMPLETIONS, json=BOTH | {"stream": True}))
    warm = chunks[-1]["usage"]["prompt_tokens_details"]
    assert warm == {"cached_tokens": 6, "cache_write_tokens": 1}


@pytest.mark.parametrize("url", [COMPLETIONS, CHATS])
def test_prewarming_says_nothing(client: httpx.Client, engine: FakeEngine, url: str) -> None:
    """One empty choice whatever else is asked for, and no token is counted; leases as asked."""
    fields = {
        "prompt_cache_options": {"prewarm": True, "ttl": "1h"}, "n": 3, "best_of": 5,
        "temperature": 0.7, "min_tokens": 3, "stop": ["b"],
    }  # fmt: skip
    body = post(client, url, **fields)

    (choice,) = body["choices"]
    assert choice.get("text", choice.get("message", {}).get("content")) == ""
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", None)
    assert choice["logprobs"] is None
    assert body["usage"]["completion_tokens"] == 0
    params = engine.calls[-1]["params"]
    assert (params.max_tokens, params.num_branches, params.stop) == (1, 1, ())
    end = body["usage"]["prompt_tokens"]
    assert asked(engine) == CacheControl(breakpoints=(Breakpoint(end, 3600),))


@pytest.mark.parametrize("url", [COMPLETIONS, CHATS])
def test_prewarming_streamed(client: httpx.Client, url: str) -> None:
    """The same in chunks."""
    body = BOTH | {"prompt_cache_options": {"prewarm": True}, "stream": True, "logprobs": None}
    chunks = read_events(client.post(url, json=body))

    texts = [
        choice.get("text") or choice.get("delta", {}).get("content")
        for chunk in chunks for choice in chunk["choices"]
    ]  # fmt: skip
    assert not any(texts)
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    assert chunks[-1]["usage"]["completion_tokens"] == 0


def test_prewarming_a_completion_of_no_tokens(client: httpx.Client) -> None:
    """The natural way to ask for it; an echo, too, is left out."""
    options = {"prewarm": True}
    body = post(client, COMPLETIONS, prompt_cache_options=options, max_tokens=0)
    assert body["choices"][0]["text"] == ""
    body = post(client, COMPLETIONS, prompt_cache_options=options, max_tokens=2, echo=True)
    assert body["choices"][0]["text"] == ""


def test_responses_ask_and_tell_the_same(client: httpx.Client, engine: FakeEngine) -> None:
    """Breakpoints in the input, behind instructions and an earlier turn; whole and streamed."""
    engine.cache_report = CacheReport(NOTHING, (LeaseOutcome(9, 60.0),))
    first = client.post("/v1/responses", json={"input": "one", "max_output_tokens": 2}).json()
    content = [{"type": "input_text", "text": "LONG", **MARK}, {"type": "input_text", "text": "q"}]
    body = {
        "input": [{"type": "message", "role": "user", "content": content}],
        "previous_response_id": first["id"],
        "prompt_cache_options": {"mode": "explicit", "ttl": "30m"},
        "prompt_cache_key": "k1",
        "return_cache_report": True,
    }
    told = {
        "mode": "explicit",
        "breakpoints": [{"num_tokens": 9, "ttl_s": 60, "status": "granted"}],
    }
    whole = client.post("/v1/responses", json=body).json()
    assert whole["prompt_cache"] == told
    end = engine.prompts[-1].index("LONGq") + len("LONG")
    expected = CacheControl(breakpoints=(Breakpoint(end, 1800),), write_limit=end, session="k1")
    assert asked(engine) == expected

    events = client.post("/v1/responses", json=body | {"stream": True}).text.split("\n\n")
    ends = ("event: response.completed", "event: response.incomplete")
    (closing,) = [event for event in events if event.startswith(ends)]
    response = json.loads(closing.partition("data: ")[2])["response"]
    assert response["prompt_cache"] == told
    assert response["cache_report"] == whole["cache_report"]
    (explained,) = client.get(f"/v1/prefixkv/explain/{response['id']}").json()["prompts"]
    assert explained == response["cache_report"]


def test_prewarming_a_response(client: httpx.Client, engine: FakeEngine) -> None:
    """Nothing is said; a wrong mark is named by its place in the input."""
    options = {"prewarm": True, "ttl": "5m"}
    body = client.post("/v1/responses", json={"input": "one", "prompt_cache_options": options})
    assert body.json()["output"][0]["content"][0]["text"] == ""
    assert body.json()["usage"]["output_tokens"] == 0
    end = body.json()["usage"]["input_tokens"]
    assert asked(engine) == CacheControl(breakpoints=(Breakpoint(end, 300),))
    assert body.json()["store"] is False  # there is no answer to go on from
    assert client.get(f"/v1/responses/{body.json()['id']}").status_code == 404

    content = [{"type": "input_text", "text": "a", "cache_control": 5}]
    answer = client.post("/v1/responses", json={"input": [{"role": "user", "content": content}]})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "input.0.content.0.cache_control"
