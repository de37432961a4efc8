"""Does the time of an answer tell what the holder of another API key has cached?

One prompt is cached by key "a". Then, again and again in random order, three requests are timed:
the prompt by key "b" ("other"), a new prompt by key "b" ("fresh"), and the prompt by "a" ("same");
those of "b" under a `cache_salt` of its own each time, so that none of them is warm. If salts share
nothing, "other" takes as long as "fresh": a sign test of the pairs finds no difference. The control
is that the same test of "same" against "fresh", over as many pairs, does find one.

Besides, no request may be told of cached tokens, nor compute fewer, because of another salt.
"""

import argparse
import asyncio
import json
import math
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import httpx

from prefixkv.api.access.key_file import collect_keys
from prefixkv.api.app import create_app
from prefixkv.async_engine import AsyncEngine

sys.path.append(str(Path(__file__).parents[1] / "tests" / "doubles"))
from tiny_models import tiny_engine  # a double of the tests, found just now

PROMPT_TOKENS = 400
MAX_P, CONTROL_P = 0.01, 1e-6


async def ask(
    client: httpx.AsyncClient, prompt: Sequence[int], key: str, salt: str | None
) -> tuple[float, int]:
    """Seconds to an answer of one token, and how many tokens were said to be cached."""
    body = {"prompt": prompt, "max_tokens": 1, "temperature": 0, "cache_salt": salt}
    headers = {"Authorization": f"Bearer {key}"}
    began = time.perf_counter()
    answer = await client.post("/v1/completions", json=body, headers=headers)
    seconds = time.perf_counter() - began
    return seconds, answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


def sign_test(pairs: Sequence[tuple[float, float]]) -> float:
    """Two-sided probability of at least so unequal a number of signs, were they a coin's."""
    n = len(pairs)
    larger = sum(a > b for a, b in pairs)
    extreme = min(larger, n - larger)
    return min(1.0, 2 * sum(math.comb(n, k) for k in range(extreme + 1)) / 2.0**n)


async def measure(num_rounds: int, seed: int) -> dict[str, list[float]]:
    """Time each of the three kinds once a round, in random order; check their counts."""
    engine = AsyncEngine(tiny_engine(num_blocks=2000))
    await engine.start()
    app = create_app(engine, ["tiny"], keys=collect_keys(("a", "b"), None, None))
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        times = await measure_with(client, engine, num_rounds, random.Random(seed))
    await engine.stop()
    return times


async def measure_with(
    client: httpx.AsyncClient, engine: AsyncEngine, num_rounds: int, rng: random.Random
) -> dict[str, list[float]]:
    """Measure over one server."""
    secret = [rng.randrange(3, 250) for _ in range(PROMPT_TOKENS)]
    await ask(client, secret, "a", None)
    times: dict[str, list[float]] = {"other": [], "fresh": [], "same": []}
    for i in range(-5, num_rounds):  # the first ones warm up
        fresh = [rng.randrange(3, 250) for _ in range(PROMPT_TOKENS)]
        asked: dict[str, tuple[list[int], str, str | None]] = {
            "other": (secret, "b", f"{i}"),
            "fresh": (fresh, "b", f"{i}"),
            "same": (secret, "a", None),
        }
        for kind in rng.sample(list(asked), 3):
            before = (await engine.stats())["num_computed_tokens"]
            seconds, num_cached = await ask(client, *asked[kind])
            computed = (await engine.stats())["num_computed_tokens"] - before
            expected = PROMPT_TOKENS - 1 if kind == "same" else 0
            assert num_cached == expected, (kind, num_cached)
            assert computed == PROMPT_TOKENS - expected, (kind, computed)
            if i >= 0:
                times[kind].append(seconds)
    return times


def main() -> int:
    """Print medians and both tests; return 1 unless only the control finds a difference."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    times = asyncio.run(measure(options.rounds, options.seed))
    p_other = sign_test(list(zip(times["other"], times["fresh"], strict=True)))
    p_same = sign_test(list(zip(times["same"], times["fresh"], strict=True)))
    print(json.dumps({kind: f"{1e3 * median(found):.3f} ms" for kind, found in times.items()}))
    print(f"another key against a fresh prompt: p = {p_other:.3g} (must be over {MAX_P})")
    print(f"the same key against a fresh prompt: p = {p_same:.3g} (must be under {CONTROL_P})")
    return int(p_other <= MAX_P or p_same >= CONTROL_P)


if __name__ == "__main__":
    sys.exit(main())
