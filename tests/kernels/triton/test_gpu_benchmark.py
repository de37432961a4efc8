"""The GPU benchmark's own check of results: it finds none wrong, and finds one that is."""

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from prefixkv.kernels import triton_backend
from prefixkv.kernels.triton_backend import TritonBackend

ROOT = Path(__file__).parents[3]


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    """The session and the correctness part, which are no part of the package."""
    monkeypatch.syspath_prepend(str(ROOT))
    monkeypatch.setattr(triton_backend, "PLAN_CHUNK", 32)
    session = importlib.import_module("benchmarks.gpu_session")
    correctness = importlib.import_module("benchmarks.gpu_correctness")
    # one shape and two of its batches will do
    monkeypatch.setattr(correctness, "SMOKE_CONFIGS", correctness.SMOKE_CONFIGS[:1])
    all_batches = correctness.batches_for

    def batches_for(*args: Any) -> dict[str, Any]:
        return {name: all_batches(*args)[name] for name in ("decode", "shared prefix")}

    monkeypatch.setattr(correctness, "batches_for", batches_for)
    return session, correctness


def kernels_are_right(modules: tuple[Any, Any], path: Path) -> bool:
    gpu_session, correctness = modules
    session = gpu_session.Session(torch.device("cpu"), True, 60.0, path)
    correctness.run(session, 0.0)
    assert path.exists()
    verdict: bool = session.checks[0]["met"]
    return verdict


def test_kernels_are_right(modules: tuple[Any, Any], tmp_path: Path) -> None:
    """Decode, shared prefixes, writes and copies, in float32."""
    assert kernels_are_right(modules, tmp_path / "report.json")


def test_a_wrong_result_is_reported(
    modules: tuple[Any, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An output that is off by a hundredth in one token."""
    attend = TritonBackend.attend

    def wrong(*args: Any, **options: Any) -> Tensor:
        out = attend(*args, **options)
        out[-1] += 1e-2
        return out

    monkeypatch.setattr(TritonBackend, "attend", wrong)
    assert not kernels_are_right(modules, tmp_path / "report.json")
