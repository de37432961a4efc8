"""A step does not wait for its device: on torch's meta device there is nothing to wait for.

Its tensors know shapes and dtypes but no values, so whatever reads one on the host (`item`, a
branch on a tensor, a mask as an index) fails, as does an operation over tensors of two devices.
"""

from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import tiny_model

from prefixkv.attention_step import StepAttention
from prefixkv.kernels.plan import Plan, build_plan
from prefixkv.kernels.reference import ReferenceBackend
from prefixkv.kernels.upload import upload_arrays
from prefixkv.kv_cache import KVCache
from prefixkv.logits_rules import LogitsRules, compile_rules
from prefixkv.model import LanguageModel
from prefixkv.sampling import Sampler, SamplingRow
from prefixkv.sampling_params import SamplingParams
from prefixkv.sizing import cache_shape

META = torch.device("meta")
NUM_ROWS, VOCAB = 5, 40


class Encoder:
    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())[:3]


def rules(**options: Any) -> LogitsRules:
    found = compile_rules(
        SamplingParams(**options), Encoder(), eos_token_ids=frozenset([0]), vocab_size=VOCAB
    )
    assert found is not None
    return found


def rows() -> list[SamplingRow]:
    """Everything that a row can ask for at once."""
    ruled: dict[str, Any] = {
        "logit_bias": {3: 1.0}, "repetition_penalty": 1.2, "presence_penalty": 0.5,
        "frequency_penalty": 0.1, "min_tokens": 4, "bad_words": ("\x02\x03",),
        "allowed_token_ids": (1, 2, 3, 4),
    }  # fmt: skip
    params = [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.7, top_k=5, top_p=0.9, min_p=0.1),
        SamplingParams(temperature=0.0, logprobs=3),
        SamplingParams(temperature=1.0, logprobs=0),
    ]
    found = [SamplingRow(one, 1, 0, 7) for one in params]
    return [
        *found,
        SamplingRow(
            SamplingParams(temperature=1.0, **ruled), 1, 0, 7, rules(**ruled), [5, 2, 3], 1
        ),
    ]


def test_drawing_waits_for_nothing() -> None:
    """Rules, penalties, top_k, top_p, log-probabilities: all are still on the way."""
    logits = torch.empty(NUM_ROWS, VOCAB, device=META)
    draws = Sampler().draw(logits, rows())
    assert draws.tokens.device == draws.is_stuck.device == META
    assert draws.logprobs is not None
    assert draws.logprobs.ranks.device == META
    with pytest.raises((NotImplementedError, RuntimeError), match="meta"):
        draws.read()


class Kernels(ReferenceBackend):
    """Writes and reads nothing; checks where all that it is given is."""

    def write_kv(self, *arguments: Any) -> None:
        pool, _, key, value, slots = arguments
        assert pool.device == key.device == value.device == slots.device == META

    def attend(
        self, pool: torch.Tensor, layer: int, query: torch.Tensor, plan: Plan, scale: float
    ) -> torch.Tensor:
        assert query.device == META
        return torch.empty_like(query)


@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_the_model_waits_for_nothing(kind: str) -> None:
    """From the upload of a step to its logits; only the look for what is not finite waits."""
    model = LanguageModel.from_transformers(tiny_model(kind, dtype=torch.float32))
    facts = model.facts
    model.hf.to(META)  # type: ignore[arg-type] # its stub knows no device
    pool = torch.empty(0, *([1] * 5), device=META)
    cache, ids = KVCache(pool, cache_shape(facts, 4)), np.arange(6)
    plan = build_plan([[1, 2]], [6], [6], 4)
    token_ids, positions, slots, logits_rows = upload_arrays([ids, ids, ids + 4, ids[:2]], META)
    attention = StepAttention(
        cache, Kernels(), slots, {window: plan for window in facts.windows}, facts.windows
    )
    logits = model.forward(token_ids, positions, attention, logits_rows)
    assert logits.device == META
    assert logits.shape == (2, facts.vocab_size)
    with pytest.raises((NotImplementedError, RuntimeError), match="meta"):
        attention.find_finite_rows()
