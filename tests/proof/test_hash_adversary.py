"""Whatever the digest does, what is exposed stays the same; only reuse suffers.

The state machines of tests/core run with the same digests, and count every collision exactly.
"""

import random
from typing import Any

import pytest
from digests import DIGESTS, ChosenChains
from engine_runs import assert_idle, run
from fake_executor import IDENTITY, FakeExecutor, serial_output
from tiny_models import reference_output, tiny_engine, tiny_model

from prefixkv.hashing import DigestFunction
from prefixkv.identity import ModelIdentity

BLOCK_SIZE = 3
TENANT = ModelIdentity(architecture="fake", salt="tenant")
ADVERSARIES: dict[str, DigestFunction] = DIGESTS | {
    "chosen: two beginnings": ChosenChains(
        (IDENTITY, (0, 0, 1)), (IDENTITY, (0, 1, 1)), BLOCK_SIZE
    ),
    "chosen: two tenants": ChosenChains((TENANT, (0, 0, 1)), (IDENTITY, (0, 0, 1)), BLOCK_SIZE),
    "chosen: two depths": ChosenChains(
        (IDENTITY, (0, 0, 1, 1, 1, 1)), (IDENTITY, (1, 1, 1)), BLOCK_SIZE
    ),
}
BEGINNINGS = [[0, 0, 1], [0, 1, 1], [1, 1, 1], [0, 0, 1, 1, 1, 1]]


def play(digest: DigestFunction, seed: int) -> tuple[FakeExecutor, dict[str, list[int]]]:
    """One schedule of requests that share beginnings; the same for each digest."""
    rng = random.Random(seed)
    executor = FakeExecutor(
        rng.randint(8, 20), BLOCK_SIZE, max_num_batched_tokens=12, digest=digest
    )
    expected = {}
    for _ in range(12):
        prompt = rng.choice(BEGINNINGS) + [rng.randrange(2) for _ in range(rng.randint(1, 7))]
        identity = rng.choice([IDENTITY, IDENTITY, TENANT])
        request = executor.add(prompt, rng.randint(1, 5), identity)
        expected[request.request_id] = serial_output(prompt, request.max_tokens)
        for _ in range(rng.randrange(3)):
            executor.step()
    executor.run()
    return executor, expected


def play_all(digest: DigestFunction) -> tuple[int, int]:
    """Play all schedules; collisions, and tokens found in the cache."""
    num_collisions = num_cached = 0
    for seed in range(60):
        executor, expected = play(digest, seed)
        assert executor.finished == expected
        num_collisions += executor.cache.stats.num_collisions
        num_cached += executor.scheduler.num_cached_tokens
    return num_collisions, num_cached


@pytest.fixture(scope="module")
def num_cached_by_good() -> int:
    return play_all(DIGESTS["good"])[1]


@pytest.mark.parametrize("name", ADVERSARIES)
def test_the_same_schedule_gives_the_same_outputs(name: str, num_cached_by_good: int) -> None:
    """Each request ends with its serial output; collisions are counted and cost reuse."""
    num_collisions, num_cached = play_all(ADVERSARIES[name])

    assert (num_collisions > 0) == (name != "good")
    assert 0 < num_cached <= num_cached_by_good
    assert (num_cached < num_cached_by_good) == (name != "good")


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model()


@pytest.mark.parametrize("name", ["constant", "one bit", "last token"])
def test_a_real_model_gives_the_same_tokens(name: str, model: Any) -> None:
    """Real K and V behind colliding digests: not one token changes, cold or warm."""
    prompts = [[5, 6, 7, 8, tail, 9, 10, 11, 12] for tail in (20, 21, 22)]
    prompts += [[6, 5, *prompt[2:]] for prompt in prompts]
    engine = tiny_engine(model)
    engine.cache.digest = DIGESTS[name]
    for _ in range(2):
        result, requests = run(engine, prompts, 6)
        outputs = [result.token_ids[request.request_id] for request in requests]
        assert outputs == [reference_output(model, prompt, 6) for prompt in prompts]
    assert engine.cache.stats.num_collisions > 0
    assert_idle(engine)
