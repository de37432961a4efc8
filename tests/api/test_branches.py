"""`n`, `best_of` and beams over HTTP: choices, their order, their chunks, and what is refused."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from tests.api.fake_engine import ALPHABET, FakeEngine
from tests.api.sse import read_events

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
HELLO: list[Any] = [{"role": "user", "content": "hi"}]
BOTH: dict[str, Any] = {"prompt": "hello", "messages": HELLO, "max_tokens": 3}


def texts(body: dict[str, Any]) -> list[str]:
    """Return the texts of whole choices in the order in which they stand."""
    return [c["text"] if "text" in c else c["message"]["content"] for c in body["choices"]]


def text_of(choice: dict[str, Any]) -> str:
    """Return what a chunk adds."""
    return str(choice["text"] if "text" in choice else choice["delta"].get("content") or "")


def checked(url: str, body: dict[str, Any]) -> dict[str, Any]:
    """Validate a whole answer by the strict types of the SDK."""
    kind = ChatCompletion if url == CHATS else Completion
    kind.model_validate(body, strict=True)
    return body


@pytest.fixture
def sdk(port: int) -> Iterator[openai.OpenAI]:
    """Return the SDK pointed at the server."""
    base_url = f"http://127.0.0.1:{port}/v1"
    with openai.OpenAI(base_url=base_url, api_key="none", max_retries=0, timeout=20) as sdk:
        yield sdk


# -- whole answers -------------------------------------------------------------------------------


@pytest.mark.parametrize("url", [COMPLETIONS, CHATS])
def test_n_choices_in_their_order(client: httpx.Client, url: str) -> None:
    """The prompt counts once, each choice's tokens count, and nothing is cached when cold."""
    body = checked(url, client.post(url, json={**BOTH, "n": 16}).json())

    assert [choice["index"] for choice in body["choices"]] == list(range(16))
    assert texts(body) == [ALPHABET[i : i + 3] for i in range(16)]
    usage = body["usage"]
    assert usage["completion_tokens"] == 16 * 3
    assert usage["prompt_tokens"] in (5, 20)
    assert usage["prompt_tokens_details"]["cached_tokens"] == 0
    assert all("score" not in choice for choice in body["choices"])


def test_choices_end_each_for_its_own_reason(client: httpx.Client) -> None:
    """Reasons, stop strings and log-probabilities belong to their choice."""
    request = {"prompt": "x", "n": 3, "max_tokens": 3, "stop": "c", "logprobs": 0}
    choices = checked(COMPLETIONS, client.post(COMPLETIONS, json=request).json())["choices"]

    assert [(c["text"], c["finish_reason"], c["stop_reason"]) for c in choices] == [
        ("ab", "stop", "c"),
        ("b", "stop", "c"),
        ("", "stop", "c"),
    ]
    assert [len(choice["logprobs"]["tokens"]) for choice in choices] == [3, 2, 1]
    assert [choice["logprobs"]["text_offset"][0] for choice in choices] == [0, 0, 0]


def test_choices_of_several_prompts(client: httpx.Client, engine: FakeEngine) -> None:
    """The index is prompt * n + i, as at OpenAI; each prompt counts once, and runs once."""
    request = {"prompt": ["one", "three"], "n": 2, "max_tokens": 3}
    body = checked(COMPLETIONS, client.post(COMPLETIONS, json=request).json())

    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    assert texts(body) == ["abc", "bcd", "abc", "bcd"]
    assert engine.prompts == ["one", "three"]
    assert body["usage"]["prompt_tokens"] == 8
    assert body["usage"]["completion_tokens"] == 4 * 3


@pytest.mark.parametrize("url", [COMPLETIONS, CHATS])
def test_best_of_returns_the_best_first(client: httpx.Client, url: str) -> None:
    """What was drawn and not returned counts too; a score says what it was ranked by."""
    body = checked(url, client.post(url, json={**BOTH, "n": 2, "best_of": 4}).json())

    assert [choice["index"] for choice in body["choices"]] == [0, 1]
    assert texts(body) == [ALPHABET[3:6], ALPHABET[2:5]]
    assert [choice["score"] for choice in body["choices"]] == [-0.5, -1.0]
    assert body["usage"]["completion_tokens"] == 4 * 3


@pytest.mark.parametrize("url", [COMPLETIONS, CHATS])
def test_beams_come_best_first(client: httpx.Client, engine: FakeEngine, url: str) -> None:
    """As vLLM's users ask for them: `n` is the width, and all of it comes back."""
    fields = {"n": 3, "use_beam_search": True, "length_penalty": 0.8, "early_stopping": "never"}
    body = checked(url, client.post(url, json={**BOTH, **fields}).json())
    params = engine.calls[0]["params"]

    assert (params.n, params.use_beam_search) == (3, True)
    assert (params.length_penalty, params.early_stopping) == (0.8, "never")
    scores = [choice["score"] for choice in body["choices"]]
    assert len(scores) == 3
    assert scores == sorted(scores, reverse=True)


def test_fields_of_beams_have_neutral_defaults(client: httpx.Client, engine: FakeEngine) -> None:
    """Absent or null: one sample, nothing searched."""
    names = ("n", "best_of", "use_beam_search", "length_penalty", "early_stopping")
    for fields in ({}, dict.fromkeys(names), {"n": 1.0, "best_of": 1, "early_stopping": True}):
        assert client.post(COMPLETIONS, json={"prompt": "x", **fields}).status_code == 200
        params = engine.calls[-1]["params"]
        assert (params.n, params.num_branches, params.is_ranked) == (1, 1, False)


def test_the_models_own_sampling_is_not_for_beams(client: httpx.Client, engine: FakeEngine) -> None:
    """Its repetition penalty would be refused beside them, though the client sent none."""
    engine.sampling_defaults = {"temperature": 0.2, "repetition_penalty": 1.1}
    request = {"prompt": "x", "use_beam_search": True, "n": 2}

    assert client.post(COMPLETIONS, json=request).status_code == 200
    assert engine.calls[0]["params"].repetition_penalty == 1.0


# -- streams -------------------------------------------------------------------------------------


@pytest.mark.parametrize("url", [COMPLETIONS, CHATS])
@pytest.mark.parametrize("fields", [{"n": 3}, {"n": 3, "best_of": 3}])
def test_a_stream_of_several_choices(
    client: httpx.Client, url: str, fields: dict[str, Any]
) -> None:
    """Each has its index, its text and one finish; usage comes once, at the very last."""
    request = {**BOTH, **fields, "stop": "d", "stream": True}
    chunks = read_events(client.post(url, json=request))
    told = {0: "", 1: "", 2: ""}
    for chunk in chunks:
        if url == CHATS:
            ChatCompletionChunk.model_validate(chunk, strict=True)
        (choice,) = chunk["choices"]
        told[choice["index"]] += text_of(choice)
    finishes = Counter(c["choices"][0]["index"] for c in chunks if c["choices"][0]["finish_reason"])

    assert told == {0: "abc", 1: "bc", 2: "c"}
    assert finishes == {0: 1, 1: 1, 2: 1}
    assert [i for i, chunk in enumerate(chunks) if "usage" in chunk] == [len(chunks) - 1]
    assert chunks[-1]["usage"]["completion_tokens"] == 3 + 3 + 2
    assert chunks[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_each_choice_of_a_chat_begins_with_its_role(client: httpx.Client) -> None:
    """Once, before its first text, whatever is told in between."""
    request = {"messages": HELLO, "n": 3, "max_tokens": 2, "stream": True}
    deltas: dict[int, list[dict[str, Any]]] = {0: [], 1: [], 2: []}
    for chunk in read_events(client.post(CHATS, json=request)):
        (choice,) = chunk["choices"]
        deltas[choice["index"]].append(choice["delta"])

    for index, mine in deltas.items():
        letters = [{"content": letter} for letter in ALPHABET[index : index + 2]]
        assert mine == [{"role": "assistant", "content": ""}, *letters]


def test_a_stream_of_prompts_with_several_choices_each(client: httpx.Client) -> None:
    """Indices as in the whole answer; with include_usage the sum comes once, in its own chunk."""
    request = {"prompt": ["one", "three"], "n": 2, "max_tokens": 3, "stream": True, "logprobs": 0}
    chunks = read_events(
        client.post(COMPLETIONS, json={**request, "stream_options": {"include_usage": True}})
    )
    told = {index: "" for index in range(4)}
    offsets: dict[int, list[int]] = {index: [] for index in range(4)}
    for chunk in chunks[:-1]:
        (choice,) = chunk["choices"]
        told[choice["index"]] += choice["text"]
        offsets[choice["index"]] += choice["logprobs"]["text_offset"]

    assert told == {0: "abc", 1: "bcd", 2: "abc", 3: "bcd"}
    assert set(map(tuple, offsets.values())) == {(0, 1, 2)}
    assert [i for i, chunk in enumerate(chunks) if chunk.get("usage")] == [len(chunks) - 1]
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["prompt_tokens"] == 8
    assert chunks[-1]["usage"]["completion_tokens"] == 12
    plain = read_events(client.post(COMPLETIONS, json=request))
    assert [i for i, chunk in enumerate(plain) if "usage" in chunk] == [len(plain) - 1]
    assert plain[-1]["usage"]["completion_tokens"] == 12


def test_leaving_a_stream_of_several_choices_aborts_once(
    sdk: openai.OpenAI, engine: FakeEngine
) -> None:
    """All choices of a prompt are one request of the engine."""
    engine.step_s = 0.01
    with sdk.completions.create(
        model="m", prompt="x", n=4, max_tokens=10_000, stream=True
    ) as stream:
        assert {next(iter(stream)).choices[0].index for _ in range(4)} == {0, 1, 2, 3}
    response = httpx.post(f"{sdk.base_url}completions", json={"prompt": "x"}, timeout=20)

    assert response.status_code == 200
    assert engine.num_aborts == 1


# -- the SDK -------------------------------------------------------------------------------------


def test_the_sdk_reads_choices_and_scores(sdk: openai.OpenAI) -> None:
    """Whole, ranked and accumulated from a stream."""
    whole = sdk.chat.completions.create(model="m", messages=HELLO, n=3, max_tokens=2)
    assert [choice.message.content for choice in whole.choices] == ["ab", "bc", "cd"]
    ranked = sdk.completions.create(model="m", prompt="x", n=1, best_of=3, max_tokens=2)
    assert [choice.text for choice in ranked.choices] == ["cd"]
    beams = sdk.completions.create(
        model="m", prompt="x", n=2, max_tokens=2, extra_body={"use_beam_search": True}
    )
    assert [(choice.model_extra or {})["score"] for choice in beams.choices] == [-0.5, -1.0]
    with sdk.chat.completions.stream(model="m", messages=HELLO, n=3, stop="d") as stream:
        final = stream.get_final_completion()
    assert [choice.message.content for choice in final.choices] == ["abc", "bc", "c"]
    assert [choice.message.role for choice in final.choices] == ["assistant"] * 3


# -- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"n": 129}, "n", "less than or equal to 128"),
        ({"best_of": 129}, "best_of", "less than or equal to 128"),
        ({"n": 3, "best_of": 2}, "best_of", "at least n, which is 3"),
        ({"best_of": 2, "stream": True}, "best_of", "stream: true"),
        ({"use_beam_search": True, "stream": True, "n": 2}, "stream", "use_beam_search"),
        ({"use_beam_search": True, "best_of": 3, "n": 2}, "best_of", "use_beam_search"),
        ({"use_beam_search": True, "presence_penalty": 1}, "presence_penalty", "use_beam_search"),
        ({"use_beam_search": True, "frequency_penalty": 1}, "frequency_penalty", "use_beam_search"),
        ({"use_beam_search": True, "repetition_penalty": 2}, "repetition_penalty", "combined"),
        ({"use_beam_search": True, "logit_bias": {"7": 1}}, "logit_bias", "use_beam_search"),
        ({"use_beam_search": True, "allowed_token_ids": [7]}, "allowed_token_ids", "combined"),
        ({"use_beam_search": True, "bad_words": "x"}, "bad_words", "use_beam_search"),
        ({"use_beam_search": True, "min_tokens": 1}, "min_tokens", "use_beam_search"),
        ({"use_beam_search": True, "stop": "x"}, "stop", "use_beam_search"),
        ({"use_beam_search": True, "logprobs": True}, "logprobs", "use_beam_search"),
    ],
)
@pytest.mark.parametrize("url", [COMPLETIONS, CHATS])
def test_what_cannot_be_is_refused(
    client: httpx.Client, url: str, fields: dict[str, Any], param: str, said: str
) -> None:
    """The field is named, and the message says why; the engine's refusals come as they are."""
    if url == COMPLETIONS and fields.get("logprobs") is True:
        fields = {**fields, "logprobs": 1}
    response = client.post(url, json={**BOTH, **fields})

    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert (error["param"], error["type"]) == (param, "invalid_request_error")
    assert said in error["message"]
