"""The served default model, as a user meets it."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

pytestmark = pytest.mark.default_model

SERVER = "default_server"
QUESTION: dict[str, Any] = {"role": "user", "content": "What is the capital of France?"}


def chat(client: httpx.Client, messages: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
    response = client.post(
        "/v1/chat/completions", json={"messages": messages, "temperature": 0, **fields}
    )
    assert response.status_code == 200, response.text
    body: dict[str, Any] = response.json()
    return body


def test_it_knows_paris_and_finds_its_own_turns_again(client: httpx.Client) -> None:
    """A cold answer, an exact resend, and a second turn that continues the first."""
    first = chat(client, [QUESTION])
    usage = first["usage"]
    answer = first["choices"][0]["message"]["content"]
    assert "Paris" in answer
    assert first["choices"][0]["finish_reason"] == "stop"
    assert usage["prompt_tokens_details"]["cached_tokens"] == 0

    resend = chat(client, [QUESTION])
    assert resend["choices"][0]["message"]["content"] == answer
    computed = (
        resend["usage"]["prompt_tokens"]
        - (resend["usage"]["prompt_tokens_details"]["cached_tokens"])
    )
    assert computed == 1

    history: list[dict[str, Any]] = [QUESTION, {"role": "assistant", "content": answer}]
    second = chat(client, [*history, {"role": "user", "content": "And of Italy?"}])
    cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached >= usage["prompt_tokens"] + usage["completion_tokens"] - 1
    assert "Rome" in second["choices"][0]["message"]["content"]


def test_content_as_string_parts_or_null_renders_alike(client: httpx.Client) -> None:
    """The same text gives the same tokens however a client wraps it."""
    text = "Name a colour."
    plain = chat(client, [{"role": "user", "content": text}], max_tokens=4)
    parts = [{"type": "text", "text": "Name a "}, {"type": "text", "text": "colour."}]
    wrapped = chat(client, [{"role": "user", "content": parts}], max_tokens=4)
    assert wrapped["usage"]["prompt_tokens"] == plain["usage"]["prompt_tokens"]
    assert (
        wrapped["usage"]["prompt_tokens_details"]["cached_tokens"]
        == plain["usage"]["prompt_tokens"] - 1
    )
    empty: list[dict[str, Any]] = [{"role": "assistant", "content": ""}, QUESTION]
    null: list[dict[str, Any]] = [{"role": "assistant", "content": None}, QUESTION]
    assert (
        chat(client, null, max_tokens=1)["usage"]["prompt_tokens"]
        == chat(client, empty, max_tokens=1)["usage"]["prompt_tokens"]
    )


def test_two_identical_prompts_at_once(client: httpx.Client) -> None:
    """The second waits for the first: it computes P - (P - 1) // 16 * 16 tokens of the prompt."""
    messages = [{"role": "user", "content": "Tell me about the sea. " * 20}]
    with ThreadPoolExecutor() as pool:
        answers = [pool.submit(chat, client, messages, max_tokens=24) for _ in range(2)]
        first, second = (answer.result() for answer in answers)
    prompt_tokens = first["usage"]["prompt_tokens"]
    cached = sorted(a["usage"]["prompt_tokens_details"]["cached_tokens"] for a in (first, second))
    assert prompt_tokens % 16 != 0
    assert cached[1] == (prompt_tokens - 1) // 16 * 16
    alone = chat(client, messages, max_tokens=24)
    texts = {a["choices"][0]["message"]["content"] for a in (first, second, alone)}
    assert len(texts) == 1


def test_the_openai_client_streams(client: httpx.Client) -> None:
    """As in the README: text in pieces, usage at the end."""
    sdk = openai.OpenAI(base_url=str(client.base_url.join("/v1")), api_key="none")
    with sdk.chat.completions.create(
        model="smollm2-135m",
        messages=[{"role": "user", "content": "What is the capital of France?"}],
        temperature=0,
        stream=True,
    ) as stream:
        chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert "Paris" in text
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.prompt_tokens_details is not None
    assert isinstance(chunks[-1].usage.prompt_tokens_details.cached_tokens, int)


def test_a_completion_goes_on_with_the_text(client: httpx.Client) -> None:
    """Sixteen tokens unless told otherwise; text and token ids are the same prompt."""
    by_text = client.post(
        "/v1/completions", json={"prompt": "The capital of France is", "temperature": 0}
    ).json()
    assert by_text["choices"][0]["text"].startswith(" Paris")
    assert by_text["usage"]["completion_tokens"] == 16
    assert by_text["choices"][0]["finish_reason"] == "length"
