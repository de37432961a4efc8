"""A multiple choice as lm-eval asks for it: what choices share is computed once, scores are right.

The real lm-eval runs in `make lm-eval`.
"""

from typing import Any

import httpx
import pytest
from asked_engine import AskedEngine
from tiny_models import byte_tokenizer, tiny_engine

from prefixkv.api.app import create_app
from tests.api.live_server import running
from tests.clients.lm_eval.rivers import num_rows, requests

EQUAL = 1e-12  # in float64, of rows that were computed beside others


def scores(answer: dict[str, Any], num_context: int) -> tuple[float, list[float], bool]:
    """What lm-eval reads: the choice's log-likelihood, each of its parts, whether it is greedy."""
    (choice,) = answer["choices"]
    logprobs = choice["logprobs"]
    values = logprobs["token_logprobs"][num_context:-1]
    tops = logprobs["top_logprobs"][num_context:-1]
    is_greedy = all(v == max(top.values()) for v, top in zip(values, tops, strict=True))
    return sum(values), values, is_greedy


def test_the_shared_context_of_choices_is_computed_once() -> None:
    """Each token once, and one row a choice; cold, every token of every request. Scores agree."""
    engine = AskedEngine(tiny_engine(num_blocks=900))
    asked = list(requests(byte_tokenizer().encode))
    prompts = [body["prompt"][0] for body, _ in asked]
    found: dict[str, list[tuple[float, list[float], bool]]] = {"warm": [], "again": [], "cold": []}
    num_computed = {}
    with (
        running(create_app(engine, ["tiny"])) as port,
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client,
    ):
        for kind, scored in found.items():
            before = engine.ask()["num_computed_tokens"]
            for i, (body, num_context) in enumerate(asked):
                salt = {"cache_salt": f"cold {i}"} if kind == "cold" else {}
                answer = client.post("/v1/completions", json={**body, **salt})
                scored.append(scores(answer.raise_for_status().json(), num_context))
            num_computed[kind] = engine.ask()["num_computed_tokens"] - before

    assert len(asked) == 24
    assert num_computed["cold"] == sum(map(len, prompts))
    assert num_computed["warm"] == num_rows(prompts) < num_computed["cold"] / 5
    assert num_computed["again"] == len(asked)  # the row that the next token is drawn from
    assert found["again"] == found["warm"]  # the very same: they were kept
    for (warm, values, greedy), (cold, cold_values, cold_greedy) in zip(
        found["warm"], found["cold"], strict=True
    ):
        assert warm == pytest.approx(cold, abs=EQUAL)
        assert values == pytest.approx(cold_values, abs=EQUAL)
        assert greedy == cold_greedy
