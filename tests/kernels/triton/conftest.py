"""Tests of the Triton kernels in Triton's interpreter, under a guard.

They need a process of their own, started with TRITON_INTERPRET=1: triton reads it when it is first
imported, which transformers does, and its own library stays what it was then. `make kernels-check`
starts one.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from interpreter_guard import guarded
from torch import Tensor

from prefixkv.kernels.backend import get_backend
from prefixkv.kernels.triton_backend import TritonBackend

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip these tests, and say so, where kernels are compiled."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        return
    skip = pytest.mark.skip(reason="needs TRITON_INTERPRET=1: make kernels-check")
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def _guard(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every kernel of every test runs guarded, its programs in a shuffled order."""
    with guarded(seed=len(request.node.name)):
        yield


@pytest.fixture
def backend() -> TritonBackend:
    """The backend under test."""
    backend = get_backend("triton", torch.float32)
    assert isinstance(backend, TritonBackend)
    return backend


@pytest.fixture(autouse=True)
def _poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `torch.empty` gives holds NaN: reading what nobody wrote shows."""
    empty = torch.empty

    def poisoned(*size: Any, **options: Any) -> Tensor:
        tensor: Tensor = empty(*size, **options)
        return tensor.fill_(torch.nan) if tensor.is_floating_point() else tensor

    monkeypatch.setattr(torch, "empty", poisoned)
