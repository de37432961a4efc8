"""Does the time to the first token tell what others have cached under another salt?

One prompt is cached under salt "a". Then, again and again in random order, three requests are
timed: the prompt under a salt of its own ("other"), a new prompt under a salt of its own
("fresh"), and the prompt under "a" ("same"). If salts share nothing, "other" takes as long as
"fresh": a sign test of the pairs finds no difference. The control is that the same test of "same"
against "fresh", over as many pairs, does find one.

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

from prefixkv.async_engine import AsyncEngine
from prefixkv.sampling_params import SamplingParams

sys.path.append(str(Path(__file__).parents[1] / "tests" / "doubles"))
from tiny_models import tiny_engine  # a double of the tests, found just now

PROMPT_TOKENS = 400
ONE = SamplingParams(temperature=0, max_tokens=1)
MAX_P, CONTROL_P = 0.01, 1e-6


async def first_token(engine: AsyncEngine, prompt: Sequence[int], salt: str) -> tuple[float, int]:
    """Seconds to the first token, and how many tokens were said to be cached."""
    began = time.perf_counter()
    async for delta in engine.generate(prompt, ONE, cache_salt=salt):
        return time.perf_counter() - began, delta.usage.num_cached_tokens
    raise AssertionError("a request without a token")


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
    rng = random.Random(seed)
    secret = [rng.randrange(3, 250) for _ in range(PROMPT_TOKENS)]
    await first_token(engine, secret, "a")
    times: dict[str, list[float]] = {"other": [], "fresh": [], "same": []}
    for i in range(-5, num_rounds):  # the first ones warm up
        fresh = [rng.randrange(3, 250) for _ in range(PROMPT_TOKENS)]
        asked = {"other": (secret, f"b{i}"), "fresh": (fresh, f"c{i}"), "same": (secret, "a")}
        for kind in rng.sample(list(asked), 3):
            before = (await engine.stats())["num_computed_tokens"]
            seconds, num_cached = await first_token(engine, *asked[kind])
            computed = (await engine.stats())["num_computed_tokens"] - before
            expected = PROMPT_TOKENS - 1 if kind == "same" else 0
            assert num_cached == expected, (kind, num_cached)
            assert computed == PROMPT_TOKENS - expected, (kind, computed)
            if i >= 0:
                times[kind].append(seconds)
    await engine.stop()
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
    print(f"another salt against a fresh prompt: p = {p_other:.3g} (must be over {MAX_P})")
    print(f"the same salt against a fresh prompt: p = {p_same:.3g} (must be under {CONTROL_P})")
    return int(p_other <= MAX_P or p_same >= CONTROL_P)


if __name__ == "__main__":
    sys.exit(main())
