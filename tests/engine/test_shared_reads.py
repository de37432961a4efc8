"""Sequences of a step that share blocks read them together, and nobody's logits show it."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from engine_runs import Run, run
from tiny_models import tiny_engine, tiny_model

from prefixkv.engine import Engine
from prefixkv.kernels import cpu
from prefixkv.kernels.backend import AttentionBackend
from prefixkv.kernels.plan import ROW_CNT, Plan

PREFIX = list(range(10, 50))
PROMPTS = [[*PREFIX, 100 + i, 7] for i in range(4)] + [[*PREFIX[:25], 60, 61]]


def run_watched(share: bool, monkeypatch: pytest.MonkeyPatch) -> tuple[Run, int]:
    """Decode PROMPTS over a poisoned pool; and the most rows of any item of few rows."""
    monkeypatch.setattr(cpu, "PLAN_CHUNK", 8)
    engine: Engine = tiny_engine(tiny_model(dtype=torch.float32), max_prefill_chunk=16)
    assert engine.backend.name == "cpu"
    assert engine._plan_options is not None
    engine._plan_options = replace(engine._plan_options, share=share)
    most_rows = 0
    backend: AttentionBackend = engine.backend
    attend = backend.attend

    def watch(pool: torch.Tensor, layer: int, query: torch.Tensor, plan: Plan, scale: float) -> Any:
        nonlocal most_rows
        if len(plan.positions) == len(PROMPTS):  # all of them decode
            most_rows = max(most_rows, int(plan.work[:, ROW_CNT].max()))
        return attend(pool, layer, query, plan, scale)

    monkeypatch.setattr(backend, "attend", watch)
    engine.kv_cache.fill(float("nan"))
    run(engine, [PREFIX], 1)  # so that all of them find it
    result, _ = run(engine, PROMPTS, 8)
    return result, most_rows


def test_shared_reads_change_no_bit_of_any_logit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows read their common blocks by one item; all logits are those of rows that read alone."""
    shared, most_rows = run_watched(True, monkeypatch)
    alone, one_row = run_watched(False, monkeypatch)

    assert (most_rows, one_row) == (5, 1)
    assert list(shared.token_ids.values()) == list(alone.token_ids.values())
    assert len(shared.logits) == len(alone.logits)
    for a, b in zip(shared.logits, alone.logits, strict=True):
        assert torch.equal(a, b)
