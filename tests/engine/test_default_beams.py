"""Beams of the default model are those of `transformers.generate(num_beams=w)`.

In float64, where rounding decides about no beam. 6 prompts by each width; the whole matrix of
parameters in `make beams`, which sets PREFIXKV_BEAMS=all.
"""

import os
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
import transformers as hf
from default_model_prompts import PROMPTS, left_padded
from engine_runs import assert_idle

from prefixkv import default_model
from prefixkv.config import EngineConfig
from prefixkv.engine import Engine
from prefixkv.model import LanguageModel
from prefixkv.outputs import BranchOutput
from prefixkv.sampling_params import SamplingParams

pytestmark = pytest.mark.default_model

T = 6
WHOLE_MATRIX = os.environ.get("PREFIXKV_BEAMS") == "all"
PENALTIES = [0.5, 1.0, 2.0] if WHOLE_MATRIX else [1.0]
STOPPING = [False, True, "never"] if WHOLE_MATRIX else [False]
ENDS = [False, True] if WHOLE_MATRIX else [False]


class Case(NamedTuple):
    """One search; with `ends` a token that its beams meet ends them."""

    width: int
    penalty: float = 1.0
    stopping: Any = False
    ends: bool = False


MATRIX = [Case(w, p, s, e) for w in (2, 4, 8) for p in PENALTIES for s in STOPPING for e in ENDS]


@cache
def reference_model() -> Any:
    load: Any = hf.AutoModelForCausalLM.from_pretrained  # untyped
    return load(default_model.fetch(), dtype=torch.float64).eval()


@cache
def engine() -> Engine:
    model = LanguageModel.load(str(default_model.fetch()), dtype="float64")
    return Engine(model, EngineConfig(num_blocks=200))


@cache
def prompts() -> list[list[int]]:
    return [engine().tokenizer.encode(text) for text in PROMPTS[:6]]


def reference(case: Case, number: int, end: int | None) -> tuple[list[list[int]], list[float]]:
    """Token ids, cut behind the end token, and scores."""
    if end is not None:
        return generate(case, (number,), end)
    beams = slice(number * case.width, (number + 1) * case.width)
    token_ids, scores = generate(case, tuple(range(len(prompts()))), None)
    return token_ids[beams], scores[beams]


@cache
def generate(
    case: Case, numbers: tuple[int, ...], end: int | None
) -> tuple[list[list[int]], list[float]]:
    """The beams of these prompts, one after the other."""
    ids, mask = left_padded([prompts()[number] for number in numbers])
    output = reference_model().generate(
        ids, attention_mask=mask,
        max_new_tokens=T, do_sample=False, num_beams=case.width, num_return_sequences=case.width,
        length_penalty=case.penalty, early_stopping=case.stopping, eos_token_id=end,
        pad_token_id=0, return_dict_in_generate=True, output_scores=True,
    )  # fmt: skip
    found = output.sequences[:, ids.shape[1] :].tolist()
    cut = [row[: row.index(end) + 1] if end in row else row for row in found]
    return cut, output.sequences_scores.tolist()


def search(case: Case, number: int, end: int | None) -> list[BranchOutput]:
    params = SamplingParams(
        n=case.width, use_beam_search=True, max_tokens=T, ignore_eos=True,
        length_penalty=case.penalty, early_stopping=case.stopping,
        stop_token_ids=(end,) if end is not None else (),
    )  # fmt: skip
    request = engine().add(prompts()[number], params)
    outputs = [BranchOutput(index) for index in range(case.width)]
    while engine().has_work:
        for delta in engine().step():
            assert delta.error is None
            outputs[delta.index].add(delta)
    assert_idle(engine())
    if end is None:
        computed = len(prompts()[number]) - request.usage.num_cached_tokens + case.width * (T - 1)
        assert request.usage.num_computed_tokens == computed
    return outputs


@pytest.mark.parametrize("number", range(6))
@pytest.mark.parametrize("case", MATRIX, ids=str)
def test_beams_of_the_default_model_are_those_of_transformers(case: Case, number: int) -> None:
    end = reference(Case(case.width), number, None)[0][0][2] if case.ends else None
    token_ids, scores = reference(case, number, end)
    outputs = search(case, number, end)
    assert [output.token_ids for output in outputs] == token_ids
    assert [output.score for output in outputs] == pytest.approx(scores, abs=1e-4)
