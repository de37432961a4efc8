"""Processed logits are those of transformers' own processors, in the order of vLLM, and a row does
not depend on its neighbours."""

from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation import logits_process as hf

from prefixkv.logits_processing import RuledRow, apply_rules
from prefixkv.logits_rules import compile_rules
from prefixkv.sampling_params import SamplingParams

VOCAB_SIZE = 12
EOS = 11


class Letters:
    """One token a letter; a space has no token."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return ["abcdefgh".index(char) for char in text.strip()]


LETTERS = Letters()
ids = st.integers(0, VOCAB_SIZE - 1)
parameters = st.fixed_dictionaries(
    {},
    optional={
        "presence_penalty": st.sampled_from([-2.0, 0.5, 2.0]),
        "frequency_penalty": st.sampled_from([-1.5, 0.25, 2.0]),
        "repetition_penalty": st.sampled_from([0.5, 1.25, 3.0]),
        "logit_bias": st.dictionaries(ids, st.sampled_from([-100.0, -1.5, 0.25, 100.0])),
        "allowed_token_ids": st.lists(st.integers(3, 10), min_size=1).map(
            lambda allowed: (*allowed, 9)
        ),
        "bad_words": st.lists(st.text("abc", min_size=1, max_size=3), max_size=5).map(tuple),
        "min_tokens": st.integers(0, 8),
        "stop_token_ids": st.lists(st.integers(0, 3), max_size=2).map(tuple),
    },
)
histories = st.tuples(st.lists(ids, min_size=1, max_size=6), st.lists(st.integers(0, 3)))


def random_logits(num_rows: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(num_rows, VOCAB_SIZE, generator=generator, dtype=torch.float64) * 3
    return logits.to(dtype)


def processed(
    logits: torch.Tensor, rows: list[tuple[SamplingParams, list[int], list[int]]]
) -> torch.Tensor:
    """Apply the rules of (params, prompt, output), one per row of `logits`."""
    scores = logits.clone()
    ruled = []
    for i, (params, prompt, output) in enumerate(rows):
        rules = compile_rules(params, LETTERS, eos_token_ids=[EOS], vocab_size=VOCAB_SIZE)
        if rules is not None:
            ruled.append(RuledRow(i, rules, prompt + output, len(prompt)))
    if ruled:
        apply_rules(scores, ruled)
    return scores


def oracle(
    logits: torch.Tensor, params: SamplingParams, prompt: list[int], output: list[int]
) -> torch.Tensor:
    """One row, by transformers where it has the processor and else by the formula, as in vLLM."""
    scores: Any = logits[None].clone()
    everything: Any = torch.tensor([prompt + output])
    generated: Any = torch.tensor([output], dtype=torch.int64)
    if params.allowed_token_ids is not None:
        allowed = sorted(set(params.allowed_token_ids))
        keep = hf.PrefixConstrainedLogitsProcessor(lambda batch, tokens: allowed, num_beams=1)
        scores = keep(everything, scores)
    if params.bad_words:
        words = [LETTERS.encode(word) for word in params.bad_words]
        scores = hf.NoBadWordsLogitsProcessor(words)(generated, scores)
    if params.min_tokens:
        ends = [EOS, *params.stop_token_ids]
        longer = hf.MinNewTokensLengthLogitsProcessor(len(prompt), params.min_tokens, ends)
        scores = longer(everything, scores)
    if params.logit_bias:
        bias: Any = {(token_id,): value for token_id, value in params.logit_bias.items()}
        scores = hf.SequenceBiasLogitsProcessor(bias)(generated, scores)
    penalty = float(params.repetition_penalty)
    scores = hf.RepetitionPenaltyLogitsProcessor(penalty)(everything, scores)
    for token_id, count in Counter(output).items():
        scores[0, token_id] -= params.frequency_penalty * count
        scores[0, token_id] -= params.presence_penalty
    return torch.as_tensor(scores[0])


@given(st.lists(st.tuples(parameters, histories), min_size=1, max_size=5))
def test_all_rules_together(rows: list[tuple[dict[str, Any], tuple[list[int], list[int]]]]) -> None:
    """Any parameters over any tokens, several rows at once; and alone bit for bit the same."""
    logits = random_logits(len(rows))
    batch = [(SamplingParams(**params), *history) for params, history in rows]
    together = processed(logits, batch)

    for i, row in enumerate(batch):
        torch.testing.assert_close(together[i], oracle(logits[i], *row), rtol=1e-12, atol=1e-12)
        assert torch.equal(processed(logits[i : i + 1], [row])[0], together[i])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "params",
    [
        {"presence_penalty": 1.5},
        {"frequency_penalty": 0.75},
        {"repetition_penalty": 1.3},
        {"repetition_penalty": 0.7},
        {"logit_bias": {0: 2.5, 3: -100.0}},
        {"allowed_token_ids": (1, 5, 6)},
        {"bad_words": ("a", "bc", "dbc")},
        {"min_tokens": 9, "stop_token_ids": (2,)},
    ],
)
def test_each_rule_alone(params: dict[str, Any], dtype: torch.dtype) -> None:
    """What it does not concern stays as it is, bit for bit."""
    logits = random_logits(2, dtype=dtype)
    rows = [(SamplingParams(**params), [3, 3, 7], [0, 1, 1]), (SamplingParams(), [0], [1])]
    scores = processed(logits, rows)

    torch.testing.assert_close(scores[0], oracle(logits[0], *rows[0]))
    assert not torch.equal(scores[0], logits[0])
    assert torch.equal(scores[1], logits[1])
    concerned = {0, 1, 2, 3, 5, 6, 7, EOS}
    if "allowed_token_ids" not in params:
        others = [token_id for token_id in range(VOCAB_SIZE) if token_id not in concerned]
        assert torch.equal(scores[0, others], logits[0, others])


def test_presence_and_frequency_count_the_output_only_repetition_the_prompt_too() -> None:
    logits = torch.ones(1, VOCAB_SIZE)
    counted = SamplingParams(presence_penalty=1.0, frequency_penalty=0.5)
    repeated = SamplingParams(repetition_penalty=2.0)

    assert processed(logits, [(counted, [3, 3], [4, 4])])[0, 3:6].tolist() == [1, -1, 1]
    assert processed(logits, [(repeated, [3, 3], [4, 4])])[0, 3:6].tolist() == [0.5, 0.5, 1]
    assert processed(logits, [(repeated, [3], [])])[0, 3:6].tolist() == [0.5, 1, 1]


@settings(max_examples=50)
@given(
    st.floats(min_value=5e-324, max_value=1e308), st.sampled_from([torch.float32, torch.float64])
)
def test_extreme_repetition_penalties_stay_finite(penalty: float, dtype: torch.dtype) -> None:
    """No infinity and no NaN, whatever the penalty: a draw needs a finite maximum."""
    logits = torch.tensor([[0.0, 5.0, -5.0, 1e30, -1e30]], dtype=dtype).repeat(1, 3)[:, :12]
    scores = processed(logits, [(SamplingParams(repetition_penalty=penalty), list(range(12)), [])])

    assert torch.isfinite(scores).all()
    assert (scores.sign() == logits.sign()).all()
