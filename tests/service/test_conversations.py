"""Conversations over a real engine: a turn begins with exactly the tokens of the turn before."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from recording_engine import LETTERS, PAIRS, RecordingEngine, recording_engine
from tiny_models import CHAT_TEMPLATE, EOS

from prefixkv.api.app import create_app
from tests.api.live_server import running

# what a random model may say: letters and their pairs, one word in many spellings
SAID: dict[str, Any] = {"temperature": 1.5, "max_tokens": 9}
USER = {"role": "user", "content": "hi"}
CHATS, RESPONSES = "/v1/chat/completions", "/v1/responses"


@pytest.fixture(scope="module")
def engine() -> RecordingEngine:
    """An engine of a tiny random model that knows pairs of letters."""
    return recording_engine()


@pytest.fixture(scope="module")
def client(engine: RecordingEngine) -> Iterator[httpx.Client]:
    """A client of a server of that engine."""
    with (
        running(create_app(engine, ["m"])) as port,
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client,
    ):
        yield client


@pytest.fixture
def said(engine: RecordingEngine) -> dict[str, Any]:
    """Return fields that let the model say letters, and end."""
    letters = [*LETTERS, *(a + b for a, b in PAIRS), EOS]
    return {**SAID, "allowed_token_ids": engine.tokenizer.hf.convert_tokens_to_ids(letters)}


def chat(client: httpx.Client, **body: Any) -> tuple[list[str], dict[str, Any]]:
    """Return the answers and the usage of a chat, streamed or not."""
    answer = client.post(CHATS, json=body).raise_for_status()
    if not body.get("stream"):
        parsed = answer.json()
        return [c["message"]["content"] for c in parsed["choices"]], parsed["usage"]
    told: dict[int, str] = {}
    for event in answer.text.split("\n\n")[:-2]:
        chunk = json.loads(event.removeprefix("data: "))
        (choice,) = chunk["choices"]
        content = choice["delta"].get("content", "")
        told[choice["index"]] = told.get(choice["index"], "") + content
    return [told[index] for index in sorted(told)], chunk["usage"]


def cached(usage: dict[str, Any]) -> int:
    """Return the cached tokens of either kind of usage."""
    details = usage.get("prompt_tokens_details") or usage["input_tokens_details"]
    count: int = details["cached_tokens"]
    return count


@pytest.mark.parametrize("stream", [False, True])
def test_five_turns_hit_all_that_was_before(
    client: httpx.Client, engine: RecordingEngine, said: dict[str, Any], stream: bool
) -> None:
    """Prompt and answer of each turn but the last token, which nobody had to compute."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": f"begin {stream}"}]
    before: list[int] = []
    num_told, has_drifted = 0, False
    for turn in range(5):
        (text,), usage = chat(client, messages=messages, seed=turn, stream=stream, **said)
        prompt = engine.prompts[-1]
        assert prompt[: len(before)] == before
        if before:
            assert cached(usage) == len(engine.prompts[-2]) + num_told - 1
            anew = engine.tokenizer.render_chat(messages)
            has_drifted |= anew[: len(before)] != before
        before, num_told = engine.whole(), usage["completion_tokens"]
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": f"{turn}"}]

    assert has_drifted


def test_each_of_several_answers_can_be_gone_on_from(
    client: httpx.Client, engine: RecordingEngine, said: dict[str, Any]
) -> None:
    """Samples, ranked ones, and beams: the next turn has the exact tokens of the one chosen."""
    letters = said["allowed_token_ids"][:-1]
    for fields in ({"seed": 3, "n": 3}, {"seed": 4, "n": 2, "best_of": 4}):
        texts, _ = chat(client, messages=[USER], **{**said, "allowed_token_ids": letters}, **fields)
        number = len(engine.prompts) - 1
        for index, text in enumerate(texts):
            history = [USER, {"role": "assistant", "content": text}, USER]
            _, usage = chat(client, messages=history, max_tokens=1)
            whole = engine.whole(index, number)
            assert engine.prompts[-1][: len(whole)] == whole
            assert cached(usage) == len(whole) - 1
    texts, _ = chat(client, messages=[USER], n=2, use_beam_search=True, max_tokens=5)
    number = len(engine.prompts) - 1
    for index, text in enumerate(texts):
        chat(client, messages=[USER, {"role": "assistant", "content": text}, USER], max_tokens=1)
        whole = engine.whole(index, number)
        assert engine.prompts[-1][: len(whole)] == whole


@pytest.mark.parametrize("path", [CHATS, RESPONSES])
def test_what_a_stop_string_cut_off_is_not_remembered(
    client: httpx.Client, engine: RecordingEngine, said: dict[str, Any], path: str
) -> None:
    """The prompt of the next turn says what was told, with the tokens that said it."""
    said.update(allowed_token_ids=said["allowed_token_ids"][:-1], max_tokens=40)
    c = engine.tokenizer.encode("c")
    halves = 0
    for seed in range(5):
        stop: dict[str, Any] = {"stop": ["b"]}
        if not seed:
            stop = {"stop_token_ids": c, "include_stop_str_in_output": True}
            stop["logit_bias"] = {c[0]: 5}
        fields = {"seed": seed, **stop, **said}
        if path == CHATS:
            (text,), _ = chat(client, messages=[USER], **fields)
            history = [USER, {"role": "assistant", "content": text}, USER]
            chat(client, messages=history, max_tokens=1)
        else:
            first = respond(client, input="hi", **fields)
            text = output_text(first)
            respond(client, input="hi", previous_response_id=first["id"], max_tokens=1)
        assert text.endswith("c") or seed
        assert "b" not in text or not seed
        answer = engine.answers[-2][0]
        beginnings = [engine.tokenizer.decode(answer[:k]) for k in range(len(answer) + 1)]
        num_told = max(k for k, said_by_k in enumerate(beginnings) if text.startswith(said_by_k))
        whole = engine.prompts[-2] + answer[:num_told]
        assert engine.prompts[-1][: len(whole)] == whole
        halves += beginnings[num_told] != text
        spelled = engine.tokenizer.decode(engine.prompts[-1], skip_special_tokens=False)
        assert f"<|im_start|>assistant\n{text}<|im_end|>" in spelled
    assert halves  # a stop string was found inside a token


def test_salts_stay_apart(
    client: httpx.Client, engine: RecordingEngine, said: dict[str, Any]
) -> None:
    """The same conversation under another salt is encoded anew."""
    question = {"role": "user", "content": "salted"}
    for seed in range(4):
        (text,), _ = chat(client, messages=[question], cache_salt="a", seed=seed, **said)
        whole = engine.whole()
        history = [question, {"role": "assistant", "content": text}, USER]
        anew = engine.tokenizer.render_chat(history)
        for salt in ("b", None):
            chat(client, messages=history, cache_salt=salt, max_tokens=1)
            assert engine.prompts[-1] == anew
        chat(client, messages=history, cache_salt="a", max_tokens=1)
        assert engine.prompts[-1][: len(whole)] == whole


def respond(client: httpx.Client, **body: Any) -> dict[str, Any]:
    """Return a response."""
    body["max_output_tokens"] = body.pop("max_tokens")
    answer: dict[str, Any] = client.post(RESPONSES, json=body).raise_for_status().json()
    return answer


def output_text(response: dict[str, Any]) -> str:
    """Return the answer."""
    text: str = response["output"][0]["content"][0]["text"]
    return text


@pytest.mark.parametrize("instructions", [None, "be brief"])
def test_the_same_previous_response_twice_is_a_fork(
    client: httpx.Client,
    engine: RecordingEngine,
    said: dict[str, Any],
    instructions: str | None,
) -> None:
    """Two answers by two seeds behind the same exact tokens, and only what is new is computed."""
    said["instructions"] = instructions
    first = respond(client, input=f"fork {instructions}", seed=1, **said)
    whole = engine.whole()
    num_known = len(engine.prompts[-1]) + first["usage"]["output_tokens"] - 1
    books = engine.engine
    texts = []
    for seed, num_reused in ((1, num_known), (2, None)):
        num_computed, num_free = books.num_computed_tokens, len(books.cache.pool.free)
        second = respond(client, input="on", previous_response_id=first["id"], seed=seed, **said)
        prompt, usage = engine.prompts[-1], second["usage"]
        assert prompt[: len(whole)] == whole
        assert cached(usage) == (len(prompt) - 1 if num_reused is None else num_reused)
        num_new = len(prompt) + usage["output_tokens"] - 1 - cached(usage)
        assert books.num_computed_tokens - num_computed == num_new
        assert num_free - len(books.cache.pool.free) <= num_new // 4 + 2
        texts.append(output_text(second))
    assert texts[0] != texts[1]
    assert engine.prompts[-1] == engine.prompts[-2]


def test_five_turns_by_ids_and_then_by_text(
    client: httpx.Client, engine: RecordingEngine, said: dict[str, Any]
) -> None:
    """Nothing is ever encoded again, also where the client itself sends the whole history."""
    history: list[dict[str, Any]] = []
    before: list[int] = []
    previous: dict[str, Any] = {}
    for turn in range(5):
        item: dict[str, Any] = {"role": "user", "content": f"turn {turn}"}
        last = {"previous_response_id": previous["id"]} if previous else {}
        previous = respond(client, input=[item], seed=turn, **last, **said)
        assert engine.prompts[-1][: len(before)] == before
        before = engine.whole()
        history += [item, *previous["output"]]
    items = [*history, {"role": "user", "content": "and?"}]
    resent = respond(client, input=items, seed=9, **said)
    assert engine.prompts[-1][: len(before)] == before
    assert cached(resent["usage"]) >= len(before) - 1
    # other instructions are another beginning
    respond(client, input="x", previous_response_id=previous["id"], instructions="new", **said)
    messages = [{"role": "system", "content": "new"}]
    for item in history:
        content = item["content"]
        text = content if isinstance(content, str) else content[0]["text"]
        messages.append({"role": item["role"], "content": text})
    messages.append({"role": "user", "content": "x"})
    assert engine.prompts[-1] == engine.tokenizer.render_chat(messages)


@pytest.mark.parametrize("content", ["m.content | trim", "m.content if loop.last else ''"])
def test_a_template_that_rewrites_history(
    client: httpx.Client,
    engine: RecordingEngine,
    said: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    content: str,
) -> None:
    """A chat gets what the template makes of it; a stored response stays as it was."""
    template = CHAT_TEMPLATE.replace("m.content", content)
    monkeypatch.setattr(engine.tokenizer.hf, "chat_template", template)
    space, *_ = engine.tokenizer.encode(" ")
    letters = [i for letter in LETTERS for i in engine.tokenizer.encode(letter)]
    said.update(allowed_token_ids=[space, *letters], logit_bias={space: 20})
    question = {"role": "user", "content": content}
    (text,), _ = chat(client, messages=[question], **said)
    assert text != text.strip()
    history = [question, {"role": "assistant", "content": text}, USER]
    chat(client, messages=history, max_tokens=1)
    assert engine.prompts[-1] == engine.tokenizer.render_chat(history)

    first = respond(client, input=content, **said)
    whole = engine.whole()
    respond(client, input="hi", previous_response_id=first["id"], **said)
    if "trim" in content:
        assert engine.prompts[-1][: len(whole)] == whole
    else:
        assert engine.prompts[-1] == engine.tokenizer.render_chat(history)
