"""A whole engine on interpreted Triton kernels: the tokens that the reference backend gives."""

import pytest
import torch
from engine_runs import outputs_of, poison
from tiny_models import tiny_engine, tiny_model

from prefixkv.engine import Engine
from prefixkv.sampling_params import SamplingParams

SHARED = list(range(5, 16))  # 11 tokens: 2 blocks of 4, and 3 tokens of a third
PROMPTS = [[*SHARED, 40, 41, 42], [*SHARED, 50], [7, 7, 7], SHARED]


def tokens_of(engine: Engine) -> list[list[list[int]]]:
    """Two requests of two samples each, then two that find their beginnings in the cache."""
    found = []
    for prompts, n in ((PROMPTS[:2], 2), (PROMPTS[2:], 1)):
        params = SamplingParams(n=n, temperature=1.0, seed=7, max_tokens=3, ignore_eos=True)
        requests = [engine.add(prompt, params) for prompt in prompts]
        poison(engine, torch.nan)
        outputs = outputs_of(engine, *requests)
        found += [[output.token_ids for output in branches] for branches in outputs]
    return found


@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_the_tokens_are_those_of_the_reference(kind: str) -> None:
    """Chunked prompts, forks that copy a block, windows, and hits in the cache."""
    model = tiny_model(kind, dtype=torch.float32)
    options = {"max_num_batched_tokens": 16, "num_blocks": 40, "seed": 1}

    found = {
        name: tokens_of(tiny_engine(model, attention_backend=name, **options))
        for name in ("reference", "triton")
    }

    assert found["triton"] == found["reference"]
    assert len({tuple(ids) for branches in found["triton"] for ids in branches}) > 2
