"""Cache controls on a real server: breakpoints pin, modes limit, and misses are explained."""

import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from tests.api.sse import read_events
from tests.service.conftest import Server, start

SERVER = "leasing_server"
BLOCK_SIZE = 4
NUM_BLOCKS = 384
MARK = {"prompt_cache_breakpoint": {"mode": "explicit"}}
HEAD = len("Suser\n")  # a special token, and bytes
UNIQUE = count()
SALTED: dict[str, Any] = {}


@pytest.fixture(scope="module")
def leasing_server(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with room for the leases of all tests here, in half of its pool."""
    log = tmp_path_factory.mktemp("log") / "server.log"
    sizes = ("--num-blocks", str(NUM_BLOCKS), "--block-size", str(BLOCK_SIZE))
    server = start(log, str(tiny_folder), *sizes)
    yield server
    assert server.stop() == 0


@pytest.fixture(autouse=True)
def own_salt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep what one test sends from being found by another."""
    monkeypatch.setitem(SALTED, "cache_salt", fresh())


def part(text: str, **more: Any) -> dict[str, Any]:
    """A text part of a message."""
    return {"type": "text", "text": text, **more}


def chat(client: httpx.Client, *parts: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """Send one message; return the body, valid by the strict types of the SDK."""
    messages = [{"role": "user", "content": list(parts)}]
    body = {"messages": messages, "max_tokens": 2, "temperature": 0} | SALTED | fields
    answer = client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    told: dict[str, Any] = answer.json()
    ChatCompletion.model_validate(told, strict=True)
    return told


def cached(body: dict[str, Any]) -> int:
    """Return how many tokens were found."""
    tokens: int = body["usage"]["prompt_tokens_details"]["cached_tokens"]
    return tokens


def written(body: dict[str, Any]) -> int:
    """Return how many tokens were written."""
    tokens: int = body["usage"]["prompt_tokens_details"]["cache_write_tokens"]
    return tokens


def breakpoints(body: dict[str, Any]) -> list[dict[str, Any]]:
    """Return what became of the breakpoints."""
    told: list[dict[str, Any]] = body["prompt_cache"]["breakpoints"]
    return told


def fresh(length: int = 40) -> str:
    """Return a text that was never sent."""
    return f"{next(UNIQUE):04}".ljust(length, "x")


def press(client: httpx.Client) -> None:
    """Take all of the pool for other prompts."""
    prompts = [fresh(300) for _ in range(NUM_BLOCKS * BLOCK_SIZE // 300 + 1)]
    client.post("/v1/completions", json={"prompt": prompts, "max_tokens": 1}).raise_for_status()


def test_a_marked_prefix_outlives_pressure_to_the_token(client: httpx.Client) -> None:
    """Wherever in a block it ends; without the mark nearly all is gone."""
    pinned = [fresh(40 + rest) for rest in range(BLOCK_SIZE)]
    plain = fresh()
    for text in pinned:
        (told,) = breakpoints(chat(client, part(text, **MARK), part("one")))
        assert told == {"num_tokens": HEAD + len(text), "ttl_s": 1800, "status": "granted"}
    chat(client, part(plain), part("one"))
    press(client)

    assert cached(chat(client, part(plain), part("two"))) < HEAD + BLOCK_SIZE
    for text in pinned:
        assert cached(chat(client, part(text), part("two"))) == HEAD + len(text)


def test_a_lease_ends(client: httpx.Client) -> None:
    """After its lifetime it is as all else; what the server applied is told."""
    short, long = fresh(), fresh()
    brief = {"prompt_cache_breakpoint": {"mode": "explicit", "ttl": 0.2}}
    (told,) = breakpoints(chat(client, part(short, **brief)))
    assert (told["status"], told["ttl_s"]) == ("granted", 0.2)
    hours = {"cache_control": {"type": "ephemeral", "ttl": "9h"}}
    (told,) = breakpoints(chat(client, part(long, **hours)))
    assert told["ttl_s"] == 3600
    time.sleep(0.3)
    press(client)

    assert cached(chat(client, part(short))) < HEAD + BLOCK_SIZE
    assert cached(chat(client, part(long))) >= HEAD + len(long)


def test_of_five_breakpoints_the_last_four_are_written(client: httpx.Client) -> None:
    """The first is refused, and said to be; at once in a stream."""
    parts = [part(f"{i}{fresh(6)}", **MARK) for i in range(5)]
    told = breakpoints(chat(client, *parts))
    assert [point["status"] for point in told] == ["refused", *["granted"] * 4]
    assert [point["num_tokens"] for point in told] == [HEAD + 7 * (i + 1) for i in range(5)]
    assert "4" in told[0]["reason"]

    messages = [{"role": "user", "content": parts}]
    chunks = read_events(
        client.post(
            "/v1/chat/completions",
            json={"messages": messages, "stream": True, "max_tokens": 2} | SALTED,
        )
    )
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk, strict=True)
    assert breakpoints(chunks[-1]) == told


def test_the_explicit_mode_writes_up_to_the_last_breakpoint(client: httpx.Client) -> None:
    """As LangChain sends it; the same request again finds that and no more."""
    options = {"mode": "explicit", "ttl": "30m"}
    parts = [part(fresh(41), **MARK), part(fresh(41))]
    first = chat(client, *parts, prompt_cache_options=options, prompt_cache_key="k")
    again = chat(client, *parts, prompt_cache_options=options, prompt_cache_key="k")

    assert (cached(first), written(first)) == (0, HEAD + 41)
    assert (cached(again), written(again)) == (HEAD + 41, 0)
    assert [point["status"] for point in breakpoints(again)] == ["granted"]


def test_the_explicit_mode_without_breakpoints_writes_nothing(client: httpx.Client) -> None:
    """But it does read."""
    text = fresh()
    for _ in range(2):
        body = chat(client, part(text), prompt_cache_options={"mode": "explicit"})
        assert (cached(body), written(body)) == (0, 0)
    implicit = chat(client, part(text))
    length = implicit["usage"]["prompt_tokens"]
    assert (cached(implicit), written(implicit)) == (0, length)

    assert cached(chat(client, part(text), prompt_cache_options={"mode": "explicit"})) == length - 1


def test_pydantic_ai_marks_in_the_implicit_mode(client: httpx.Client) -> None:
    """All is cached, and the mark is kept when the rest is gone."""
    text = fresh()
    first = chat(client, part(text, **MARK), part("q"))
    length = first["usage"]["prompt_tokens"]
    assert written(first) == length
    assert cached(chat(client, part(text, **MARK), part("q"))) == length - 1
    press(client)

    assert HEAD + 40 <= cached(chat(client, part(text, **MARK), part("q"))) < HEAD + 40 + BLOCK_SIZE


def test_prewarming(client: httpx.Client) -> None:
    """Nothing is said, and the next request finds the prompt, even after pressure if it asked."""
    text = fresh()
    warm = chat(client, part(text), prompt_cache_options={"prewarm": True, "ttl": "5m"}, n=2)
    length = warm["usage"]["prompt_tokens"]
    assert [choice["message"]["content"] for choice in warm["choices"]] == [""]
    assert warm["usage"]["completion_tokens"] == 0
    assert breakpoints(warm) == [{"num_tokens": length, "ttl_s": 300, "status": "granted"}]
    press(client)

    assert cached(chat(client, part(text))) == length - 1


def test_a_miss_explains_itself(client: httpx.Client) -> None:
    """First sight, a difference, a whole hit, and what was evicted; by its id, too."""
    start, one, two = fresh(20), "the cat sat", "the dog sat"

    def reason(*texts: str) -> dict[str, Any]:
        body = chat(client, *map(part, texts), return_cache_report=True)
        report: dict[str, Any] = body["cache_report"]
        told = client.get(f"/v1/prefixkv/explain/{body['id']}").json()["prompts"]
        assert told == [report]
        assert report["cached_tokens"] == cached(body)
        return report

    reason(start, one)
    differs = reason(start, two)
    assert differs["reason"] == "differs"
    assert differs["position"] == HEAD + 20 + len("the ")
    assert (differs["before"], differs["prompt_token"]) == ("xxxxthe ", "d")
    assert (differs["prompt"], differs["cached"]) == ("dog sat<|im_end|>", "cat sat<|im_end|>")
    assert reason(start, two)["reason"] == "none"
    press(client)
    evicted = reason(start, one)
    assert (evicted["reason"], evicted["cached_tokens"]) == ("evicted", 0)
    assert client.get("/v1/prefixkv/explain/nobody").status_code == 404
