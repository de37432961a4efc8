"""Log-probabilities are those of log_softmax, of the logits that no parameter has changed."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from prefixkv.logits_rules import compile_rules
from prefixkv.logprobs import token_logprobs
from prefixkv.sampling import Sampler, SamplingRow
from prefixkv.sampling_params import SamplingParams

VOCAB_SIZE = 30


class NoWords:
    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        raise AssertionError("no rule here has a word")


def random_logits(num_rows: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(num_rows)
    logits = torch.randn(num_rows, VOCAB_SIZE, generator=generator, dtype=torch.float64) * 5
    return logits.to(dtype)


@given(st.lists(st.tuples(st.integers(0, VOCAB_SIZE - 1), st.integers(0, 20)), min_size=1))
def test_they_are_those_of_log_softmax(rows: list[tuple[int, int]]) -> None:
    """Chosen, rank and the likeliest, for rows that want different numbers of them."""
    logits = random_logits(len(rows))
    told = token_logprobs(logits, torch.tensor([t for t, _ in rows]), [n for _, n in rows])
    expected = logits.log_softmax(dim=-1)

    for i, (token_id, count) in enumerate(rows):
        order = expected[i].argsort(descending=True).tolist()
        assert told[i].token_id == token_id
        assert told[i].logprob == pytest.approx(float(expected[i, token_id]), abs=1e-12)
        assert told[i].rank == order.index(token_id) + 1
        assert [ids for ids, _ in told[i].top] == order[:count]
        assert [p for _, p in told[i].top] == pytest.approx(expected[i, order[:count]].tolist())


def test_equals_stand_by_id_and_share_the_best_rank() -> None:
    (told,) = token_logprobs(torch.zeros(1, 5), torch.tensor([3]), [20])

    assert [token_id for token_id, _ in told.top] == [0, 1, 2, 3, 4]
    assert told.rank == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_lower_precision_is_computed_in_float32(dtype: torch.dtype) -> None:
    logits = random_logits(3, dtype)
    told = token_logprobs(logits, torch.tensor([1, 2, 3]), [0, 0, 0])
    expected = logits.double().log_softmax(dim=-1)

    assert [t.logprob for t in told] == pytest.approx(
        [float(expected[i, i + 1]) for i in range(3)], abs=1e-5
    )


def test_the_sampler_tells_what_a_row_wants_and_no_more() -> None:
    """By `logprobs` of its parameters, or the chosen one's alone where a row wants just that."""
    params: Any = {"temperature": 0, "logit_bias": {7: 100.0}}
    plain, asked = SamplingParams(**params), SamplingParams(**params, logprobs=3)
    rules = compile_rules(plain, NoWords(), eos_token_ids=[], vocab_size=VOCAB_SIZE)
    rows = [
        SamplingRow(plain, 0, 0, 1, rules, [1], 1),
        SamplingRow(asked, 0, 0, 1, rules, [1], 1),
        SamplingRow(plain, 0, 0, 1, rules, [1], 1, wants_logprob=True),
    ]
    logits = random_logits(3)
    before = logits.clone()
    results = Sampler().sample(logits, rows)
    expected = logits.log_softmax(dim=-1)

    assert torch.equal(logits, before)
    assert [result.token_id for result in results] == [7, 7, 7]
    assert results[0].logprobs is None
    assert results[1].logprobs is not None
    assert len(results[1].logprobs.top) == 3
    assert results[2].logprobs is not None
    assert results[2].logprobs.top == ()
    assert results[2].logprobs.logprob == pytest.approx(float(expected[2, 7]), abs=1e-12)
