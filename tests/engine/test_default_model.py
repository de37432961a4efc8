"""The default model in float32: greedy output is that of `transformers.generate`."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from default_model_prompts import MIN_MARGIN, NUM_TOKENS, PROMPTS, left_padded
from engine_runs import assert_idle, run

from prefixkv import default_model
from prefixkv.config import EngineConfig
from prefixkv.engine import Engine
from prefixkv.model import LanguageModel

pytestmark = pytest.mark.default_model


@pytest.fixture(scope="module")
def folder() -> Path:
    return default_model.fetch()


@pytest.fixture(scope="module")
def model(folder: Path) -> LanguageModel:
    return LanguageModel.load(str(folder), dtype="float32")


@pytest.fixture(scope="module")
def prompts(model: LanguageModel) -> list[list[int]]:
    assert model.tokenizer is not None
    return [model.tokenizer.encode(text) for text in PROMPTS]


@pytest.fixture(scope="module")
def reference(folder: Path) -> Any:
    load: Any = hf.AutoModelForCausalLM.from_pretrained  # untyped
    return load(folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def expected(reference: Any, prompts: list[list[int]]) -> list[list[int]]:
    """What the reference says, which is sure of itself at each step."""
    ids, mask = left_padded(prompts)
    output = reference.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=NUM_TOKENS,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
        pad_token_id=0,
    )
    best = torch.stack(output.logits).topk(2).values
    assert float((best[..., 0] - best[..., 1]).min()) >= MIN_MARGIN
    assert len(output.logits) == NUM_TOKENS
    tokens: list[list[int]] = output.sequences[:, ids.shape[1] :].tolist()
    return tokens


def make_engine(model: LanguageModel, **options: Any) -> Engine:
    engine = Engine(model, EngineConfig(num_blocks=400, **options))
    engine.kv_cache.fill(float("nan"))
    return engine


def test_alone_cold_then_all_at_once_warm(
    model: LanguageModel, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    """Every third prompt alone; then all in one batch, the others cold; then all of them found."""
    engine = make_engine(model)
    for prompt, tokens in list(zip(prompts, expected, strict=True))[::3]:
        result, _ = run(engine, [prompt], NUM_TOKENS, poison_value=None)
        assert list(result.token_ids.values()) == [tokens]
    for _ in range(2):
        result, requests = run(engine, prompts, NUM_TOKENS, poison_value=None)
        assert [result.token_ids[r.request_id] for r in requests] == expected

    assert [r.usage.num_cached_tokens for r in requests] == [len(p) - 1 for p in prompts]
    assert_idle(engine)


def test_mixed_cold_in_chunks_of_seven(
    model: LanguageModel, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    """Chunks of seven prompt tokens beside the decodes of others, on an empty cache."""
    engine = make_engine(model, max_prefill_chunk=7, max_num_batched_tokens=64)
    result, requests = run(engine, prompts, NUM_TOKENS, poison_value=None)

    assert [result.token_ids[r.request_id] for r in requests] == expected
    assert_idle(engine)


def test_a_long_prompt_through_the_gathered_path_cold_and_warm(
    model: LanguageModel, prompts: list[list[int]], reference: Any
) -> None:
    """Prompts far above 16 rows, and a warm one that is cut in the middle of a block."""
    long = [token for prompt in prompts for token in prompt]
    engine = make_engine(model)
    for prompt, cached in ((long, 0), (long, len(long) - 1), (long[:-9] + long[:50], -1)):
        result, (request,) = run(engine, [prompt], 4, poison_value=None)
        (tokens,) = result.token_ids.values()
        with torch.no_grad():
            logits = reference(torch.tensor([prompt + tokens[:-1]])).logits[0, len(prompt) - 1 :]
        best = logits.max(dim=-1)
        assert [float(row[t]) for row, t in zip(logits, tokens, strict=True)] == pytest.approx(
            best.values.tolist(), abs=MIN_MARGIN
        )
        if cached >= 0:
            assert request.usage.num_cached_tokens == cached
        else:
            assert request.usage.num_cached_tokens >= len(long) - 9
    assert_idle(engine)
