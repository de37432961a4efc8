"""Greedy output is that of `transformers.generate`, token for token, in every configuration."""

import random
from typing import Any

import pytest
import torch
from engine_runs import assert_idle, greedy, run
from tiny_models import reference_output, tiny_engine, tiny_model

NUM_TOKENS = 8
NAN = float("nan")


def make_prompts(count: int, seed: int = 0) -> list[list[int]]:
    """Prompts that share beginnings of any length, some of them twice."""
    rng = random.Random(seed)
    prompts: list[list[int]] = []
    for _ in range(count):
        prefix: list[int] = []
        if prompts and rng.random() < 0.7:
            other = rng.choice(prompts)
            prefix = other[: rng.randint(1, len(other))]
        prompts.append(prefix + [rng.randrange(3, 259) for _ in range(rng.randint(0, 30))])
        if not prompts[-1]:
            prompts[-1] = [5]
    return prompts


@pytest.fixture(scope="module", params=["llama", "mistral"])
def model(request: Any) -> Any:
    return tiny_model(request.param)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return make_prompts(7)


@pytest.fixture(scope="module")
def expected(model: Any, prompts: list[list[int]]) -> list[list[int]]:
    return [reference_output(model, prompt, NUM_TOKENS) for prompt in prompts]


@pytest.mark.parametrize("chunk", [1, 7, 64, None])
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_alone_cold_and_warm(
    model: Any, prompts: list[list[int]], expected: list[list[int]], chunk: int, block_size: int
) -> None:
    """One request at a time, computed and then found; the pool is NaN wherever nobody wrote."""
    engine = tiny_engine(model, max_prefill_chunk=chunk, block_size=block_size, num_blocks=600)
    engine.kv_cache.fill(NAN)
    for prompt, tokens in zip(prompts, expected, strict=True):
        for warm in (False, True):
            result, (request,) = run(engine, [prompt], NUM_TOKENS)
            assert list(result.token_ids.values()) == [tokens]
            if warm:
                assert request.usage.num_cached_tokens == len(prompt) - 1
                assert request.usage.num_computed_tokens == len(tokens)
    assert_idle(engine)


@pytest.mark.parametrize("chunk", [1, 7, 64, None])
@pytest.mark.parametrize("budget", [16, 2048])
def test_mixed_cold_and_warm(
    model: Any, prompts: list[list[int]], expected: list[list[int]], chunk: int, budget: int
) -> None:
    """All at once: chunks of prompts beside decodes, shared beginnings, twins; then again, warm."""
    engine = tiny_engine(
        model, max_prefill_chunk=chunk, max_num_batched_tokens=budget, num_blocks=200
    )
    engine.kv_cache.fill(NAN)
    for warm in (False, True):
        result, requests = run(engine, prompts, NUM_TOKENS)
        assert [result.token_ids[r.request_id] for r in requests] == expected
        if warm:
            assert [r.usage.num_cached_tokens for r in requests] == [len(p) - 1 for p in prompts]
    assert_idle(engine)


@pytest.mark.parametrize("chunk", [7, None])
def test_after_forced_preemption(
    model: Any, prompts: list[list[int]], expected: list[list[int]], chunk: int | None
) -> None:
    """A pool far too small for all: requests are preempted, recomputed, and end the same."""
    needed = max(-(-(len(prompt) + NUM_TOKENS) // 4) for prompt in prompts)
    engine = tiny_engine(model, num_blocks=needed + 4, max_prefill_chunk=chunk)
    engine.kv_cache.fill(NAN)
    result, requests = run(engine, prompts, NUM_TOKENS)

    assert [result.token_ids[r.request_id] for r in requests] == expected
    assert engine.scheduler.num_preemptions > 0
    assert_idle(engine)


def test_every_running_request_preempted_at_every_step(
    model: Any, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    """Preemption at any point of a request changes nothing."""
    engine = tiny_engine(model, max_prefill_chunk=5)
    requests = [engine.add(prompt, greedy(NUM_TOKENS)) for prompt in prompts]
    outputs: dict[str, list[int]] = {}
    while engine.has_work:
        for delta in engine.step():
            outputs.setdefault(delta.request_id, []).extend(delta.token_ids)
        engine.scheduler.preempt_all()
        engine.check_invariants()

    assert [outputs[r.request_id] for r in requests] == expected
    assert [r.usage.num_cached_tokens for r in requests] != [0] * len(requests)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_what_nobody_wrote_is_never_read(backend: str, prompts: list[list[int]]) -> None:
    """Pools of NaN, zeros and 1e4 give bit-equal logits in runs of the same schedule."""
    dtype = torch.float64 if backend == "reference" else torch.float32
    model = tiny_model("mistral", dtype=dtype)
    runs = []
    for value in (NAN, 0.0, 1e4):
        engine = tiny_engine(
            model, attention_backend=backend, max_num_batched_tokens=24, num_blocks=60
        )
        engine.kv_cache.fill(value)
        result, _ = run(engine, prompts * 2, NUM_TOKENS, poison_value=value)
        assert engine.scheduler.num_cached_tokens > 0
        runs.append(result)
    for other in runs[1:]:
        assert other.token_ids == runs[0].token_ids
        assert len(other.logits) == len(runs[0].logits)
        pairs = zip(other.logits, runs[0].logits, strict=True)
        assert all(torch.equal(mine, first) for mine, first in pairs)


def test_without_prefix_caching_the_output_is_the_same(
    model: Any, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    """`enable_prefix_caching=False` computes everything anew and changes no token."""
    engine = tiny_engine(model, enable_prefix_caching=False)
    result, requests = run(engine, prompts * 2, NUM_TOKENS)

    assert [result.token_ids[r.request_id] for r in requests] == expected * 2
    assert {r.usage.num_cached_tokens for r in requests} == {0}


def test_two_identical_prompts_at_once(model: Any) -> None:
    """The second computes P - (P - 1) // b * b prompt tokens; both answers are the serial one."""
    prompt = [(i * 37) % 256 + 3 for i in range(37)]
    expected = reference_output(model, prompt, NUM_TOKENS)
    engine = tiny_engine(model, block_size=16)
    result, (first, second) = run(engine, [prompt, prompt], NUM_TOKENS)

    assert list(result.token_ids.values()) == [expected, expected]
    decoded = len(expected) - 1
    assert first.usage.num_computed_tokens == 37 + decoded
    assert second.usage.num_computed_tokens == 37 - 36 // 16 * 16 + decoded
    assert second.usage.num_cached_tokens == 32
