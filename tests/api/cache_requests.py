"""Requests that say something of the cache, and what the fake engine was asked for them."""

from typing import Any

import httpx

from prefixkv.cache_control import CacheControl
from tests.api.fake_engine import FakeEngine

COMPLETIONS = "/v1/completions"
CHATS = "/v1/chat/completions"
BOTH: dict[str, Any] = {
    "prompt": "one two", "messages": [{"role": "user", "content": "one two"}], "max_tokens": 3,
}  # fmt: skip
MARK = {"prompt_cache_breakpoint": {"mode": "explicit"}}
HEAD = len("<user>")


def part(text: str, **more: Any) -> dict[str, Any]:
    """A text part of a message."""
    return {"type": "text", "text": text, **more}


def asked(engine: FakeEngine) -> CacheControl | None:
    """Return what the engine was asked of its cache last."""
    control: CacheControl | None = engine.calls[-1]["cache_control"]
    return control


def post(client: httpx.Client, url: str, **fields: Any) -> dict[str, Any]:
    """Send a request and return its body."""
    response = client.post(url, json=BOTH | fields)
    assert response.status_code == 200, response.text
    body: dict[str, Any] = response.json()
    return body


def marked(client: httpx.Client, *parts: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """Send a chat of one message with `parts`."""
    return post(client, CHATS, messages=[{"role": "user", "content": list(parts)}], **fields)
