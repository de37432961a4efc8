"""Log-probabilities in the shapes of OpenAI, of both endpoints, whole and streamed."""

import math
from typing import Any

import httpx
import openai
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from prefixkv.api.replies.logprobs import ChatLogprobs, CompletionLogprobs
from prefixkv.outputs import TokenLogprobs
from tests.api.fake_engine import ByteTokenizer, FakeEngine
from tests.api.sse import read_events

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
MESSAGES: list[Any] = [{"role": "user", "content": "hi"}]
SPECIAL = 300
NAMES = {SPECIAL: b"<end>", 301: "日本".encode(), 302: b"a"}


class Pieces(ByteTokenizer):
    """Ids below 256 are bytes, others have names; some share one."""

    special_token_ids = frozenset({SPECIAL})

    def token_bytes(self, token_id: int) -> bytes:
        return NAMES.get(token_id) or bytes([token_id] if token_id < 256 else [])


def entries(*token_ids: int, top: tuple[tuple[int, float], ...] = ()) -> list[TokenLogprobs]:
    return [TokenLogprobs(token_id, -2.0, 5, top) for token_id in token_ids]


# -- the shapes ----------------------------------------------------------------------------------


def test_offsets_of_a_completion_count_whole_characters() -> None:
    """Over chunks as well; a part of a character stands where the character will stand."""
    body = CompletionLogprobs(Pieces())
    first = body(entries(97, *"é".encode(), 301))
    second = body(entries(98, SPECIAL, 99))

    assert first["tokens"] == ["a", "bytes:\\xc3", "bytes:\\xa9", "日本"]
    assert first["text_offset"] == [0, 1, 1, 2]
    assert second["tokens"] == ["b", "<end>", "c"]
    assert second["text_offset"] == [4, 5, 5]
    assert first["token_logprobs"] == [-2.0] * 4


def test_offsets_fit_an_echo_that_spells_special_tokens() -> None:
    """A special token counts where the echo has it, and nowhere else; an added space does not."""
    body = CompletionLogprobs(Pieces(), "a<end>b")
    assert body(entries(SPECIAL, 97, SPECIAL, 98, 99))["text_offset"] == [0, 0, 1, 6, 7]
    assert CompletionLogprobs(Pieces(), "ab")(entries(32, 97, 98))["text_offset"] == [0, 0, 1]
    assert CompletionLogprobs(Pieces(), " a")(entries(32, 97, 98))["text_offset"] == [0, 1, 2]


def test_top_logprobs_of_a_completion_hold_the_chosen_token() -> None:
    """Likeliest first; where two tokens have one text, the likelier counts."""
    top = ((302, -0.5), (97, -1.0), (0xC3, -1.5))

    assert CompletionLogprobs(Pieces())(entries(98, top=top))["top_logprobs"] == [
        {"a": -0.5, "bytes:\\xc3": -1.5, "b": -2.0}
    ]
    assert CompletionLogprobs(Pieces())(entries(98))["top_logprobs"] == [{"b": -2.0}]


def test_a_chat_tells_the_bytes_of_each_token() -> None:
    """Half a character reads as its bytes; a special token has a name and no bytes."""
    (half, end) = ChatLogprobs(Pieces())(entries(0xC3, SPECIAL, top=((97, -0.5),)))["content"]

    assert half == {
        "token": "\\xc3", "logprob": -2.0, "bytes": [0xC3],
        "top_logprobs": [{"token": "a", "logprob": -0.5, "bytes": [97]}],
    }  # fmt: skip
    assert (end["token"], end["bytes"]) == ("<end>", None)


def test_very_unlikely_tokens_stay_numbers() -> None:
    """JSON has no infinity; OpenAI's types document -9999 for it."""
    entry = TokenLogprobs(97, -math.inf, 9, ((98, -1e30),))

    assert ChatLogprobs(Pieces())([entry])["content"][0]["logprob"] == -9999.0
    body = CompletionLogprobs(Pieces())([entry])
    assert (body["token_logprobs"], body["top_logprobs"]) == (
        [-9999.0],
        [{"b": -9999.0, "a": -9999.0}],
    )


def test_tokens_without_bytes_have_an_empty_name() -> None:
    assert CompletionLogprobs(Pieces())(entries(303))["tokens"] == [""]
    assert ChatLogprobs(Pieces())(entries(303))["content"][0]["token"] == ""


# -- the service ---------------------------------------------------------------------------------


@pytest.mark.parametrize("num_top", [0, 2, 20, 2.0])
def test_a_completion(client: httpx.Client, num_top: float) -> None:
    """Four parallel lists, as many as tokens, valid by the strict types of the SDK."""
    request = {"prompt": "x", "max_tokens": 3, "logprobs": num_top}
    body = client.post(COMPLETIONS, json=request).json()
    Completion.model_validate(body, strict=True)
    logprobs = body["choices"][0]["logprobs"]

    assert logprobs["tokens"] == ["a", "b", "c"]
    assert logprobs["token_logprobs"] == [-6.5] * 3
    assert logprobs["text_offset"] == [0, 1, 2]
    assert [len(top) for top in logprobs["top_logprobs"]] == [num_top + 1] * 3


def test_a_streamed_completion_adds_up_to_the_whole(client: httpx.Client) -> None:
    """The lists of all chunks, joined, are those of the whole answer, for each prompt."""
    request = {"prompt": ["x", "y"], "max_tokens": 4, "logprobs": 1}
    whole = client.post(COMPLETIONS, json=request).json()
    joined: list[dict[str, list[Any]]] = [{}, {}]
    for chunk in read_events(client.post(COMPLETIONS, json={**request, "stream": True})):
        choice = chunk["choices"][0]
        for name, values in choice["logprobs"].items():
            joined[choice["index"]].setdefault(name, []).extend(values)

    assert joined == [choice["logprobs"] for choice in whole["choices"]]


def test_a_chat_whole_and_streamed(client: httpx.Client) -> None:
    """One entry a token, valid by the strict types, and the same streamed."""
    request = {"messages": MESSAGES, "max_tokens": 3, "logprobs": True, "top_logprobs": 2}
    body = client.post(CHATS, json=request).json()
    ChatCompletion.model_validate(body, strict=True)
    content = body["choices"][0]["logprobs"]["content"]
    chunks = read_events(client.post(CHATS, json={**request, "stream": True}))
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk, strict=True)
    told = [c["choices"][0]["logprobs"] for c in chunks]

    assert [entry["token"] for entry in content] == ["a", "b", "c"]
    assert content[0] == {
        "token": "a", "logprob": -6.5, "bytes": [97],
        "top_logprobs": [
            {"token": "A", "logprob": -0.25, "bytes": [65]},
            {"token": "B", "logprob": -0.5, "bytes": [66]},
        ],
    }  # fmt: skip
    assert [entry for one in told if one is not None for entry in one["content"]] == content


def test_a_chat_without_alternatives(client: httpx.Client) -> None:
    request = {"messages": MESSAGES, "max_tokens": 1, "logprobs": True}
    (choice,) = client.post(CHATS, json=request).json()["choices"]

    assert choice["logprobs"]["content"][0]["top_logprobs"] == []


def test_tokens_whose_text_is_held_back_are_told_at_once(
    client: httpx.Client, engine: FakeEngine
) -> None:
    """A chunk without text carries them, so that none is lost."""
    engine.num_hidden_steps = 2
    request = {"messages": MESSAGES, "max_tokens": 4, "logprobs": True, "stream": True}
    chunks = read_events(client.post(CHATS, json=request))
    told = [c["choices"][0]["logprobs"] for c in chunks]

    assert sum(len(one["content"]) for one in told if one is not None) == 4
    assert chunks[1]["choices"][0]["delta"] == {}


def test_nothing_is_told_unless_asked_for(client: httpx.Client) -> None:
    """Null, false and absent ask for nothing."""
    for fields in ({}, {"logprobs": None}, {"logprobs": False}, {"top_logprobs": None}):
        for url, body in ((COMPLETIONS, {"prompt": "x"}), (CHATS, {"messages": MESSAGES})):
            choice = client.post(url, json={**body, **fields}).json()["choices"][0]
            assert choice["logprobs"] is None


def test_the_sdk_reads_both_and_accumulates_a_stream(port: int) -> None:
    """Through the openai package, its accumulator included."""
    base_url = f"http://127.0.0.1:{port}/v1"
    with openai.OpenAI(base_url=base_url, api_key="none", max_retries=0, timeout=20) as sdk:
        text = sdk.completions.create(model="m", prompt="x", max_tokens=2, logprobs=1)
        assert text.choices[0].logprobs is not None
        assert text.choices[0].logprobs.tokens == ["a", "b"]
        with sdk.chat.completions.stream(
            model="m", messages=MESSAGES, stop="d", logprobs=True, top_logprobs=1
        ) as stream:
            final = stream.get_final_completion()

    logprobs = final.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert [entry.token for entry in logprobs.content][:3] == ["a", "b", "c"]
