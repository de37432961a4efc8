"""Tenants over a real engine: whose cache a key sees, and what the operator's key does to it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from asked_engine import AskedEngine
from tiny_models import tiny_engine

from prefixkv.api.access.key_file import collect_keys
from prefixkv.api.app import create_app
from tests.api.live_server import eventually, running

KEYS = """
keys:
- {name: alice, key: sk-alice}
- {name: bob, key: sk-bob, salt: team}
- {name: carol, key: sk-carol, salt: team}
"""
PROMPT = "a prompt that fills some blocks of sixteen tokens each, so that there is what to find"


@pytest.fixture(scope="module")
def engine() -> AskedEngine:
    """Return the engine of `url`."""
    return AskedEngine(tiny_engine(num_blocks=80))


@pytest.fixture(scope="module")
def url(engine: AskedEngine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Return where a server with three tenants and an operator listens."""
    file: Path = tmp_path_factory.mktemp("keys") / "keys.yaml"
    file.write_text(KEYS)
    with running(create_app(engine, ["tiny"], keys=collect_keys((), file, "sk-root"))) as port:
        yield f"http://127.0.0.1:{port}"


def num_cached(url: str, name: str, prompt: str = PROMPT, **fields: Any) -> int:
    """Return how many of the prompt's tokens `name` finds."""
    body = {"prompt": prompt, "max_tokens": 1, "temperature": 0, **fields}
    headers = {"Authorization": f"Bearer sk-{name}"}
    answer = httpx.post(f"{url}/v1/completions", json=body, headers=headers).raise_for_status()
    cached: int = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    return cached


def test_tenants_share_only_where_the_operator_says_so(url: str) -> None:
    """By tokens found: one's own, those of a key with the same salt, nobody else's."""
    all_but_one = len(PROMPT) - 1
    assert num_cached(url, "alice") == 0
    assert num_cached(url, "alice") == all_but_one
    assert num_cached(url, "bob") == 0
    assert num_cached(url, "carol") == all_but_one
    assert num_cached(url, "root") == 0
    # a salt that a client names divides what is its own, and is not the server's
    assert num_cached(url, "alice", cache_salt="team") == 0
    assert num_cached(url, "carol", cache_salt="mine") == 0
    assert num_cached(url, "bob", cache_salt="mine") == all_but_one


def test_a_reset_forgets_everything_of_everybody(url: str, engine: AskedEngine) -> None:
    """And the server goes on."""
    prompt = f"another one, {PROMPT}"
    for name in ("alice", "bob"):
        num_cached(url, name, prompt)
        assert num_cached(url, name, prompt) == len(prompt) - 1
    headers = {"Authorization": "Bearer sk-root"}
    assert httpx.post(f"{url}/reset_prefix_cache", headers=headers).json() == {"success": True}
    for name in ("alice", "bob"):
        assert num_cached(url, name, prompt) == 0
    eventually(engine.is_idle)
