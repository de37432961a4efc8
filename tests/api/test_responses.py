"""/v1/responses: shapes by the SDK's own types, stored conversations, and what is refused."""

import json
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter
from starlette.testclient import TestClient

from prefixkv.api.access.api_keys import ApiKeys, key_digest, make_key
from prefixkv.api.app import create_app
from prefixkv.errors import QueueFull
from tests.api.fake_engine import ALPHABET, FakeEngine

URL = "/v1/responses"
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


@pytest.fixture
def sdk(port: int) -> Iterator[openai.OpenAI]:
    """Return the SDK pointed at the server."""
    base_url = f"http://127.0.0.1:{port}/v1"
    with openai.OpenAI(base_url=base_url, api_key="none", max_retries=0, timeout=20) as sdk:
        yield sdk


def create(client: httpx.Client, **body: Any) -> dict[str, Any]:
    """Return a response that is valid by the SDK's types, all members strict."""
    answer = client.post(URL, json={"input": "hi", "max_output_tokens": 3, **body})
    assert answer.status_code == 200, answer.text
    parsed: dict[str, Any] = answer.json()
    Response.model_validate(parsed, strict=True)
    return parsed


def stream(client: httpx.Client, **body: Any) -> list[dict[str, Any]]:
    """Return the events of a response, each valid and numbered, named alike in line and data."""
    answer = client.post(URL, json={"input": "hi", "stream": True, "max_output_tokens": 3, **body})
    assert answer.headers["content-type"].startswith("text/event-stream"), answer.text
    events = []
    for event in answer.text.split("\n\n")[:-1]:
        name, data = event.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
        EVENT.validate_python(events[-1], strict=True)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def text_of(response: dict[str, Any]) -> str:
    """Return the answer."""
    text: str = response["output"][0]["content"][0]["text"]
    return text


def test_a_response_has_every_key_clients_read(client: httpx.Client) -> None:
    """The whole object, with what counts where the request says nothing."""
    body = create(client)
    name = body.pop("id").removeprefix("resp_")

    assert isinstance(body.pop("created_at"), int)
    assert body == {
        "object": "response",
        "completed_at": None,
        "status": "incomplete",
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"},
        "model": "m",
        "output": [
            {
                "id": f"msg_{name}",
                "type": "message",
                "status": "incomplete",
                "role": "assistant",
                "content": [
                    {"type": "output_text", "text": "abc", "annotations": [], "logprobs": []}
                ],
            }
        ],
        "usage": {
            "input_tokens": 20,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 20},
            "output_tokens": 3,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": 23,
        },
        "background": False,
        "instructions": None,
        "max_output_tokens": 3,
        "max_tool_calls": None,
        "metadata": {},
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "prompt_cache_key": None,
        "reasoning": {"effort": None, "summary": None},
        "safety_identifier": None,
        "service_tier": "default",
        "store": True,
        "temperature": 1.0,
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        "tools": [],
        "top_logprobs": 0,
        "top_p": 1.0,
        "truncation": "disabled",
        "user": None,
    }


def test_a_stream_tells_the_same_as_a_whole_response(client: httpx.Client) -> None:
    """The documented events in order; the last one holds what a plain request would get."""
    fields: dict[str, Any] = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    whole = create(client, **fields, stop="c")
    events = stream(client, **fields, stop="c")
    names = [event["type"].removeprefix("response.") for event in events]

    assert names == [
        "created", "in_progress", "output_item.added", "content_part.added",
        "output_text.delta", "output_text.delta", "output_text.delta",
        "output_text.done", "content_part.done", "output_item.done", "completed",
    ]  # fmt: skip
    deltas = [event for event in events if "delta" in event]
    assert "".join(event["delta"] for event in deltas) == text_of(whole) == "ab"
    final = events[-1]["response"]
    assert final["status"] == whole["status"] == "completed"
    part = final["output"][0]["content"][0]
    assert part == whole["output"][0]["content"][0]
    assert [entry for event in deltas for entry in event["logprobs"]] == part["logprobs"]
    assert [len(entry["top_logprobs"]) for entry in part["logprobs"]] == [2, 2, 2]
    assert stream(client)[-1]["type"] == "response.incomplete"
    ignored = ("id", "created_at", "completed_at", "output", "usage")
    assert {k: v for k, v in final.items() if k not in ignored} == {
        k: v for k, v in whole.items() if k not in ignored
    }


def test_the_sdk_speaks_it(sdk: openai.OpenAI, engine: FakeEngine) -> None:
    """Whole, streamed, through its accumulator, stored, listed, deleted, and its own errors."""
    stop: Any = {"extra_body": {"stop": "d", "seed": 1}}
    first = sdk.responses.create(model="m", input="hi", instructions="be nice", **stop)
    assert first.output_text == "abc"
    assert sdk.responses.retrieve(first.id).output_text == "abc"
    (item,) = sdk.responses.input_items.list(first.id).data
    assert item.type == "message"
    going_on: Any = {"previous_response_id": first.id, **stop}
    with sdk.responses.stream(model="m", input="on", **going_on) as events:
        list(events)
        final = events.get_final_response()
    assert final.output_text == "abc"
    chunks = sdk.responses.create(model="m", input="hi", stream=True)
    assert "".join(c.delta for c in chunks if c.type == "response.output_text.delta") == ALPHABET
    with pytest.raises(openai.BadRequestError, match="synchronous"):
        sdk.responses.cancel(first.id)
    sdk.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        sdk.responses.retrieve(first.id)
    with pytest.raises(openai.NotFoundError) as gone:
        sdk.responses.create(model="m", input="x", previous_response_id=first.id)
    assert (gone.value.code, gone.value.param) == (
        "previous_response_not_found",
        "previous_response_id",
    )
    engine.error = QueueFull("full")
    with pytest.raises(openai.RateLimitError):
        sdk.responses.create(model="m", input="x", stream=True)
    engine.error, engine.fail_after = None, 2
    with pytest.raises(openai.APIError, match="The server failed"):
        list(sdk.responses.create(model="m", input="x", stream=True))


def test_a_stream_that_fails_says_so_twice(client: httpx.Client, engine: FakeEngine) -> None:
    """A failed response, then the error itself; nothing is stored, and no secret told."""
    engine.fail_after = 2
    *_, failed, error = stream(client)

    assert (failed["type"], failed["response"]["status"]) == ("response.failed", "failed")
    assert failed["response"]["error"]["code"] == "server_error"
    assert error["error"]["code"] == "internal_error"
    assert "secret" not in json.dumps([failed, error])
    assert client.get(f"{URL}/{failed['response']['id']}").status_code == 404


def test_previous_responses_are_gone_on_from(client: httpx.Client, engine: FakeEngine) -> None:
    """Twice: a fork. Instructions are those of the request, not of the response before."""
    first = create(client, instructions="be nice", metadata={"k": "v"}, user="u")
    for text in ("one", "two"):
        second = create(
            client, input=text, previous_response_id=first["id"], instructions="be nice"
        )
        assert second["previous_response_id"] == first["id"]
        assert (
            second["usage"]["input_tokens_details"]["cached_tokens"] >= 36
        )  # the fake knows prompts
    third = create(client, input="x", previous_response_id=second["id"], instructions="be rude")
    create(client, input="y", previous_response_id=third["id"])
    beginning = "<user>hi\n<assistant>abc\n<user>"

    assert engine.prompts[1:] == [
        f"<system>be nice\n{beginning}one\n<assistant>",
        f"<system>be nice\n{beginning}two\n<assistant>",
        f"<system>be rude\n{beginning}two\n<assistant>abc\n<user>x\n<assistant>",
        f"{beginning}two\n<assistant>abc\n<user>x\n<assistant>abc\n<user>y\n<assistant>",
    ]
    stored = client.get(f"{URL}/{first['id']}")
    assert client.get(f"{URL}/{first['id']}?stream=true").status_code == 400
    assert (stored.json(), stored.headers["content-type"]) == (first, "application/json")


def test_what_is_not_stored_cannot_be_found(client: httpx.Client) -> None:
    """Declined, of another salt, or never there: the same 404."""
    declined = create(client, store=False)
    salted = create(client, cache_salt="a")
    errors = []
    for id_, fields in [
        (declined["id"], {}), (salted["id"], {}), (salted["id"], {"cache_salt": "b"}),
        ("resp_x", {}),
    ]:  # fmt: skip
        body = {"input": "x", "previous_response_id": id_, **fields}
        answer = client.post(URL, json=body)
        assert answer.status_code == 404, answer.text
        errors.append(answer.json()["error"] | {"message": ""})
    assert errors == [errors[0]] * 4
    assert client.get(f"{URL}/{declined['id']}").status_code == 404
    assert client.delete(f"{URL}/{declined['id']}").status_code == 404
    assert client.post(f"{URL}/{declined['id']}/cancel").status_code == 404
    assert create(client, previous_response_id=salted["id"], cache_salt="a")


def test_ids_are_those_of_requests_and_never_twice_the_same(client: httpx.Client) -> None:
    """A client may send one id again, or one that cannot stand in a path."""
    ids = [
        client.post(URL, json={"input": "hi"}, headers={"x-request-id": "a b/c"}).json()["id"]
        for _ in range(2)
    ]

    assert ids[0] == "resp_a_b_c"
    assert ids[1].startswith("resp_a_b_c-")
    assert [client.get(f"{URL}/{id_}").json()["id"] for id_ in ids] == ids
    for id_ in ids:
        client.delete(f"{URL}/{id_}")


def test_fields_that_change_nothing_are_accepted(client: httpx.Client, engine: FakeEngine) -> None:
    """As openai-agents, LangChain and pydantic-ai send them; vLLM's extras reach the engine."""
    create(
        client, include=["reasoning.encrypted_content"], tools=[], tool_choice="auto",
        parallel_tool_calls=False, truncation="disabled", background=False, service_tier="auto",
        reasoning={"effort": "low"}, text={"format": {"type": "text"}, "verbosity": "low"},
        safety_identifier="s", prompt_cache_key="k", user="u", metadata={"a": "b"}, n=1,
        stream=False, surprise=1, top_k=5, min_p=0.1, seed=3, priority=2, temperature=0.5,
        stream_options=None, max_tool_calls=3, prompt_cache_options={"mode": "explicit"},
    )  # fmt: skip
    params, call = engine.calls[0]["params"], engine.calls[0]

    assert (params.top_k, params.min_p, params.seed, params.temperature) == (5, 0.1, 3, 0.5)
    assert (params.max_tokens, call["priority"]) == (3, 2)


def test_a_tenant_sees_its_own_responses_only(engine: FakeEngine) -> None:
    """Another key's response is as if it had never been, whatever its id."""
    keys = ApiKeys(make_key(name, key_digest(name)) for name in ("a", "b"))
    client = TestClient(create_app(engine, ["m"], keys=keys))
    made = client.post(URL, json={"input": "hi"}, headers={"Authorization": "Bearer a"}).json()[
        "id"
    ]
    for name, status in (("a", 200), ("b", 404)):
        headers = {"Authorization": f"Bearer {name}"}
        follow = {"input": "x", "previous_response_id": made}
        assert client.get(f"{URL}/{made}", headers=headers).status_code == status
        assert client.post(URL, json=follow, headers=headers).status_code == status
    assert client.delete(f"{URL}/{made}", headers={"Authorization": "Bearer b"}).status_code == 404


def test_a_stored_conversation_is_rendered_beside_the_event_loop(
    client: httpx.Client, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However short the body: what it goes on from may be long, and streams must not wait."""
    threads: list[int] = []
    render = engine.tokenizer.chat_text

    def rendered(*arguments: Any, **kwargs: Any) -> str:
        threads.append(threading.get_ident())
        return render(*arguments, **kwargs)

    monkeypatch.setattr(engine.tokenizer, "chat_text", rendered)
    first = create(client)
    (loop,) = threads
    create(client, previous_response_id=first["id"])
    assert loop not in threads[1:] != []


def test_responses_that_run_at_once_have_ids_of_their_own(
    client: httpx.Client, engine: FakeEngine
) -> None:
    """Whatever ids clients send: the later one would be stored in place of the other."""
    engine.step_s = 0.01
    headers = {"X-Request-Id": "at-once"}
    body = {"input": "first", "stream": True, "max_output_tokens": 50}
    with client.stream("POST", URL, json=body, headers=headers) as first:
        lines = first.iter_lines()
        assert next(lines) == "event: response.created"
        ours = json.loads(next(lines).removeprefix("data: "))["response"]["id"]
        second = client.post(URL, json={"input": "x", "max_output_tokens": 1}, headers=headers)
        list(lines)
    assert (ours, second.json()["id"].startswith("resp_at-once-")) == ("resp_at-once", True)
    (item,) = client.get(f"{URL}/{ours}/input_items").json()["data"]
    assert item["content"][0]["text"] == "first"
