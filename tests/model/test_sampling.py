"""Sampling keeps the tokens that transformers keeps, draws them as often as their weights say, and
depends on nothing but its own row."""

import itertools
from dataclasses import replace
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

from prefixkv.logits_rules import compile_rules
from prefixkv.sampling import Sampled, Sampler, SamplingRow, kept_weights, uniform
from prefixkv.sampling_params import SamplingParams


class NoWords:
    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        raise AssertionError("no rule here has a word")


def random_logits(num_rows: int, vocab_size: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, vocab_size, generator=generator, dtype=torch.float64) * 3


def chosen(logits: torch.Tensor, rows: list[SamplingRow]) -> list[int]:
    tokens = [sampled.token_id for sampled in Sampler().sample(logits, rows)]
    assert None not in tokens
    return [token for token in tokens if token is not None]


def draw_many(logits: torch.Tensor, params: SamplingParams, count: int) -> np.ndarray:
    rows = [SamplingRow(params, 7, 0, position) for position in range(count)]
    tokens = chosen(logits.expand(count, -1), rows)
    return np.bincount(tokens, minlength=logits.shape[-1])


def warped(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    warpers = LogitsProcessorList([TemperatureLogitsWarper(params.temperature)])
    if params.min_p > 0:
        warpers.append(MinPLogitsWarper(params.min_p))
    if params.top_k > 0:
        warpers.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        warpers.append(TopPLogitsWarper(params.top_p))
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

    assert chosen(logits, rows) == [77, 0]


def test_top_p_among_equals_keeps_the_fewest_and_lowest() -> None:
    weights = kept_weights(torch.zeros(1, 4096), [SamplingParams(top_p=0.5)])

    assert torch.equal(torch.nonzero(weights[0]).squeeze(-1), torch.arange(2048))


def test_a_draw_does_not_depend_on_the_batch() -> None:
    logits = random_logits(12, 3000).float()
    settings = [SamplingParams(temperature=t) for t in (0, 0.8, 1.3)]
    settings += [SamplingParams(top_p=0.8), SamplingParams(top_k=40), SamplingParams(min_p=0.1)]
    rows = [SamplingRow(p, 5 + i, i % 3, 10 * i) for i, p in enumerate(settings * 2)]
    together = chosen(logits, rows)
    alone = [chosen(logits[i : i + 1], [row])[0] for i, row in enumerate(rows)]
    order = torch.randperm(12, generator=torch.Generator().manual_seed(1)).tolist()
    shuffled = chosen(logits[order], [rows[i] for i in order])

    assert together == alone
    assert shuffled == [together[i] for i in order]


def test_seed_branch_and_position_each_change_the_number() -> None:
    numbers = [uniform(*key) for key in itertools.product([-1, 0, 2**63 - 1], [0, 1], range(50))]

    assert len(set(numbers)) == len(numbers)
    assert all(0 <= number < 1 for number in numbers)


def p_value(observed: np.ndarray, weights: np.ndarray) -> float:
    """Chi-square: how likely draws from `weights` differ by as much; rare tokens count as one."""
    expected = weights / weights.sum() * observed.sum()
    rare = expected < 10
    assert observed[weights == 0].sum() == 0
    expected = np.append(expected[~rare], expected[rare].sum())
    counts = np.append(observed[~rare], observed[rare].sum())[expected > 0]
    expected = expected[expected > 0]
    statistic = torch.tensor(((counts - expected) ** 2 / expected).sum()) / 2
    freedom = torch.tensor((len(expected) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, statistic))


def test_the_p_value_is_that_of_the_tables() -> None:
    """The 99.9 % point of 11 degrees of freedom is 31.26."""
    weights = np.ones(12)
    observed = np.full(12, 1000.0)
    observed[0] += (31.264 * 1000 * 11 / 12) ** 0.5
    observed[1:] -= (31.264 * 1000 * 11 / 12) ** 0.5 / 11

    assert p_value(observed, weights) == pytest.approx(0.001, rel=0.01)


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [*itertools.product([0.6, 1.7], [0, 5], [1.0, 0.7], [0.0, 0.1])],
)
def test_draws_follow_the_distribution(
    temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    """Draws with fixed seeds follow what transformers makes of the logits."""
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    logits = random_logits(1, 12, seed=3) / 2
    observed = draw_many(logits, params, 10_000)

    assert p_value(observed, warped(logits, params).softmax(dim=-1)[0].numpy()) > 1e-4


def test_draws_follow_the_distribution_under_rules() -> None:
    """Bias, penalties and exclusion shift it before the temperature does."""
    params = SamplingParams(
        temperature=1.4, frequency_penalty=0.5, repetition_penalty=1.5, logit_bias={1: 1.0},
        allowed_token_ids=tuple(range(10)), top_p=0.9,
    )  # fmt: skip
    tokens, num_prompt_tokens = [0, 0, 1, 2, 2, 3], 2
    rules = compile_rules(params, NoWords(), eos_token_ids=[], vocab_size=12)
    logits = random_logits(1, 12, seed=3) / 2
    rows = [SamplingRow(params, 5, 1, i, rules, tokens, num_prompt_tokens) for i in range(10_000)]
    observed = np.bincount(chosen(logits.expand(len(rows), -1), rows), minlength=12)
    shifted = logits.clone()
    shifted[0, 1] += 1
    for token_id in (0, 1, 2, 3):
        shifted[0, token_id] *= 1.5 if shifted[0, token_id] < 0 else 1 / 1.5
    shifted[0, [1, 2, 3]] -= torch.tensor([0.5, 1.0, 0.5], dtype=torch.float64)
    shifted[0, 10:] = -torch.inf

    assert p_value(observed, warped(shifted, params).softmax(dim=-1)[0].numpy()) > 1e-4


def test_a_row_without_a_token_left_gives_none_and_leaves_its_neighbours_alone() -> None:
    """Greedy or drawn."""
    logits = random_logits(3, 12)
    for temperature in (0.0, 1.0):
        params = SamplingParams(
            temperature=temperature,
            allowed_token_ids=(4, 5),
            stop_token_ids=(4,),
            min_tokens=1,
            logprobs=1,
        )
        rules = compile_rules(params, NoWords(), eos_token_ids=[], vocab_size=12)
        assert rules is not None
        stuck = replace(rules, bad_ids=(5,))
        rows = [
            SamplingRow(SamplingParams(), 1, 0, 0),
            SamplingRow(params, 1, 0, 0, stuck, [1], 1),
            SamplingRow(params, 1, 0, 0, rules, [1], 1),
        ]
        first, none, last = Sampler().sample(logits, rows)

        assert none == Sampled(None)
        assert last.token_id == 5
        assert first == Sampler().sample(logits[:1], rows[:1])[0]


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
