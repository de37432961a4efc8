"""A whole engine on interpreted Triton kernels: the tokens that the reference backend gives."""

from typing import Any

import pytest
import torch
from engine_company import COMPANY, alone, together
from engine_runs import outputs_of, poison
from tiny_models import tiny_engine, tiny_model

from prefixkv.engine import Engine
from prefixkv.kernels import triton_backend, upload
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


def count_uploads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The list gets the number of arrays of each upload."""
    staged: list[int] = []
    stage = upload._stage

    def count(arrays: Any, firsts: Any, *, pinned: bool) -> torch.Tensor:
        staged.append(len(arrays))
        return stage(arrays, firsts, pinned=pinned)

    monkeypatch.setattr(upload, "_stage", count)
    return staged


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


def test_a_step_is_uploaded_in_one_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens, slots and the plans of all windows; copies of blocks, where there are any, apart."""
    engine = tiny_engine(
        tiny_model("mistral", dtype=torch.float32), attention_backend="triton", num_blocks=40
    )
    staged = count_uploads(monkeypatch)
    engine.add(PROMPTS[0], SamplingParams(temperature=0.0, n=1, max_tokens=3, ignore_eos=True))
    engine.add(PROMPTS[2], SamplingParams(temperature=0.0, n=1, max_tokens=3, ignore_eos=True))
    while engine.has_work:
        staged.clear()
        engine.step()
        assert staged == [4 + 8]  # both layers have one window, hence one plan


def test_copies_are_uploaded_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """One more upload in a step whose branches part inside a block."""
    engine = tiny_engine(tiny_model(dtype=torch.float32), attention_backend="triton", num_blocks=40)
    staged = count_uploads(monkeypatch)
    engine.add(SHARED, SamplingParams(temperature=1.0, n=2, seed=7, max_tokens=2, ignore_eos=True))
    engine.step()
    staged.clear()
    engine.step()
    assert staged[:2] == [1, 4 + 8]  # what is drawn at random needs its numbers beside


def test_company_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request alone, cold and whole says what it says in chunks, beside those it shares with."""
    monkeypatch.setattr(triton_backend, "PLAN_CHUNK", 8)
    options: dict[str, Any] = {"attention_backend": "triton", "batch_invariant_attention": True}

    prompts = COMPANY[1:3]  # that is enough of what takes the interpreter long
    assert together(torch.float32, prompts, **options) == alone(torch.float32, prompts, **options)
