"""The openai package as a client, and its types as the judge of our bodies."""

from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from openai.types import Completion, CompletionUsage, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from prefixkv.errors import QueueFull
from tests.api.fake_engine import FakeEngine
from tests.api.live_server import eventually
from tests.api.sse import read_events

MESSAGES: list[Any] = [{"role": "user", "content": "hi"}]


@pytest.fixture
def sdk(port: int) -> Iterator[openai.OpenAI]:
    """Return the SDK pointed at the server."""
    base_url = f"http://127.0.0.1:{port}/v1"
    with openai.OpenAI(base_url=base_url, api_key="none", max_retries=0, timeout=20) as sdk:
        yield sdk


def test_chats(sdk: openai.OpenAI) -> None:
    """A chat, whole and streamed."""
    whole = sdk.chat.completions.create(model="m", messages=MESSAGES, max_completion_tokens=4)
    assert whole.choices[0].message.content == "abcd"
    assert whole.usage is not None
    assert whole.usage.prompt_tokens_details is not None
    assert whole.usage.prompt_tokens_details.cached_tokens == 0

    stream = sdk.chat.completions.create(
        model="m", messages=MESSAGES, max_tokens=4, stream=True,
        stream_options={"include_usage": True}, extra_body={"top_k": 5, "cache_salt": "s"},
    )  # fmt: skip
    chunks = list(stream)
    texts = [choice.delta.content or "" for chunk in chunks for choice in chunk.choices]
    assert "".join(texts) == "abcd"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 4


def test_the_accumulating_stream(sdk: openai.OpenAI) -> None:
    """The SDK's own accumulator needs index, object and role."""
    with sdk.chat.completions.stream(model="m", messages=MESSAGES, stop="d") as stream:
        final = stream.get_final_completion()

    assert final.choices[0].message.content == "abc"
    assert final.choices[0].finish_reason == "stop"


def test_completions(sdk: openai.OpenAI) -> None:
    """A completion, whole and streamed."""
    whole = sdk.completions.create(model="m", prompt=["x", "y"], max_tokens=2)
    assert [choice.text for choice in whole.choices] == ["ab", "ab"]
    stream = sdk.completions.create(model="m", prompt="x", max_tokens=2, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == "ab"


def test_models(sdk: openai.OpenAI) -> None:
    """The list and one card."""
    assert [model.id for model in sdk.models.list()] == ["m", "org/other", "gpt-5.6"]
    assert sdk.models.retrieve("m").owned_by == "prefixkv"


def test_errors_become_the_sdks_own(sdk: openai.OpenAI, engine: FakeEngine) -> None:
    """Status, code and param survive the SDK, whole and inside a stream."""
    with pytest.raises(openai.BadRequestError) as refused:
        sdk.completions.create(model="m", prompt="x", max_tokens=0)
    assert refused.value.param == "max_tokens"
    with pytest.raises(openai.NotFoundError) as unknown:
        sdk.completions.create(model="nope", prompt="x")
    assert unknown.value.code == "model_not_found"
    engine.error = QueueFull("full")
    with pytest.raises(openai.RateLimitError):
        sdk.completions.create(model="m", prompt="x")
    engine.error, engine.fail_after = None, 2
    stream = sdk.chat.completions.create(model="m", messages=MESSAGES, stream=True)
    with pytest.raises(openai.APIError, match="The server failed"):
        list(stream)


def test_leaving_an_sdk_stream_aborts(sdk: openai.OpenAI, engine: FakeEngine) -> None:
    """Closing the iterator is a disconnect."""
    engine.step_s = 0.01
    with sdk.completions.create(model="m", prompt="x", max_tokens=10_000, stream=True) as stream:
        next(iter(stream))

    eventually(lambda: engine.num_aborts == 1)


def test_bodies_are_valid_by_the_sdks_types(client: httpx.Client) -> None:
    """Strict validation of raw JSON: right types, no missing key."""
    chat = client.post("/v1/chat/completions", json={"messages": MESSAGES}).json()
    parsed = ChatCompletion.model_validate(chat, strict=True)
    assert isinstance(parsed.usage, CompletionUsage)
    text = client.post("/v1/completions", json={"prompt": ["x", "y"]}).json()
    Completion.model_validate(text, strict=True)
    Model.model_validate(client.get("/v1/models/m").json(), strict=True)


def test_chunks_are_valid_by_the_sdks_types(client: httpx.Client) -> None:
    """Strict validation of every chunk, usage included."""
    stream = {"stream": True, "stream_options": {"include_usage": True}, "stop": "k"}
    chat = client.post("/v1/chat/completions", json={"messages": MESSAGES, **stream})
    for chunk in read_events(chat):
        ChatCompletionChunk.model_validate(chunk, strict=True)
    text = client.post("/v1/completions", json={"prompt": "x", **stream})
    for chunk in read_events(text):
        for choice in chunk["choices"]:
            # the SDK reuses the type of whole answers here, whose reason is never null
            choice["finish_reason"] = choice["finish_reason"] or "stop"
        Completion.model_validate(chunk, strict=True)
