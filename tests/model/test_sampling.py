"""Sampling keeps the tokens that transformers keeps, draws them as often as their weights say, and
depends on nothing but its own row."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from prefixkv.sampling import Sampler, SamplingRow, kept_weights, uniform
from prefixkv.sampling_params import SamplingParams


def random_logits(num_rows: int, vocab_size: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, vocab_size, generator=generator, dtype=torch.float64) * 3


def draw_many(logits: torch.Tensor, params: SamplingParams, count: int) -> np.ndarray:
    rows = [SamplingRow(params, 7, 0, position) for position in range(count)]
    tokens = Sampler().sample(logits.expand(count, -1), rows)
    return np.bincount(tokens, minlength=logits.shape[-1])


def warped(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    warpers = LogitsProcessorList([TemperatureLogitsWarper(params.temperature)])
    if params.top_k > 0:
        warpers.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        warpers.append(TopPLogitsWarper(params.top_p))
    if params.min_p > 0:
        warpers.append(MinPLogitsWarper(params.min_p))
    no_tokens: Any = torch.empty(len(logits), 0, dtype=torch.int64)
    return torch.as_tensor(warpers(no_tokens, logits.clone()))


@pytest.mark.parametrize("vocab_size", [17, 5000])
@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [*itertools.product([0.7, 1.9], [0, 5, 9999], [1.0, 0.6, 0.9999], [0.0, 0.05])],
)
def test_the_kept_set_and_its_weights_are_those_of_transformers(
    vocab_size: int, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    logits = random_logits(4, vocab_size)
    weights = kept_weights(logits, [params] * 4)
    expected = warped(logits, params).softmax(dim=-1)

    assert torch.equal(weights > 0, expected > 0)
    torch.testing.assert_close(weights / weights.sum(-1, keepdim=True), expected)


def test_rows_of_one_batch_keep_their_own_settings() -> None:
    logits = random_logits(4, 300)
    settings = [
        SamplingParams(top_k=3),
        SamplingParams(top_p=0.5),
        SamplingParams(),
        SamplingParams(temperature=0.3, min_p=0.2),
    ]
    together = kept_weights(logits, settings)
    alone = [kept_weights(logits[i : i + 1], [p])[0] for i, p in enumerate(settings)]

    assert torch.equal(together, torch.stack(alone))


def test_greedy_takes_the_lowest_id_among_equals() -> None:
    logits = torch.zeros(2, 1000)
    logits[0, [77, 400]] = 5.0
    rows = [SamplingRow(SamplingParams(temperature=0), 1, 0, 0)] * 2

    assert Sampler().sample(logits, rows) == [77, 0]


def test_top_p_among_equals_keeps_the_fewest_and_lowest() -> None:
    weights = kept_weights(torch.zeros(1, 4096), [SamplingParams(top_p=0.5)])

    assert torch.equal(torch.nonzero(weights[0]).squeeze(-1), torch.arange(2048))


def test_a_draw_does_not_depend_on_the_batch() -> None:
    logits = random_logits(12, 3000).float()
    settings = [SamplingParams(temperature=t) for t in (0, 0.8, 1.3)]
    settings += [SamplingParams(top_p=0.8), SamplingParams(top_k=40), SamplingParams(min_p=0.1)]
    rows = [SamplingRow(p, 5 + i, i % 3, 10 * i) for i, p in enumerate(settings * 2)]
    together = Sampler().sample(logits, rows)
    alone = [Sampler().sample(logits[i : i + 1], [row])[0] for i, row in enumerate(rows)]
    order = torch.randperm(12, generator=torch.Generator().manual_seed(1)).tolist()
    shuffled = Sampler().sample(logits[order], [rows[i] for i in order])

    assert together == alone
    assert shuffled == [together[i] for i in order]


def test_seed_branch_and_position_each_change_the_number() -> None:
    numbers = [uniform(*key) for key in itertools.product([-1, 0, 2**63 - 1], [0, 1], range(50))]

    assert len(set(numbers)) == len(numbers)
    assert all(0 <= number < 1 for number in numbers)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.6),
        SamplingParams(top_k=4),
        SamplingParams(top_p=0.7, min_p=0.05),
    ],
)
def test_draws_follow_the_distribution(params: SamplingParams) -> None:
    """Chi-square over 20,000 draws with fixed seeds; the bound is its 99.9 % point for <= 11."""
    logits = random_logits(1, 12, seed=3) / 2
    count = 20_000
    expected = (warped(logits, params).softmax(dim=-1)[0] * count).numpy()
    observed = draw_many(logits, params, count)
    kept = expected > 0

    assert observed[~kept].sum() == 0
    assert ((observed[kept] - expected[kept]) ** 2 / expected[kept]).sum() < 31.3


@pytest.mark.parametrize("temperature", [1e-300, 1e-12, 1e300])
def test_extreme_temperatures_draw_valid_tokens(temperature: float) -> None:
    logits = random_logits(1, 50).float()
    counts = draw_many(logits, SamplingParams(temperature=temperature), 200)

    if temperature < 1:
        assert counts[int(logits.argmax())] == 200
    else:
        assert (counts > 0).sum() > 40


def test_no_row_gives_no_token() -> None:
    assert Sampler().sample(torch.empty(0, 10), []) == []
