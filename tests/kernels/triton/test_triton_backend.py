"""What the Triton backend serves, and how often it uploads a plan."""

from typing import TYPE_CHECKING

import pytest
import torch

from prefixkv.kernels import triton_backend
from prefixkv.kernels.backend import get_backend
from prefixkv.kernels.triton_backend import TritonBackend
from prefixkv.kernels.triton_plan import DevicePlan

if TYPE_CHECKING:
    from tests.kernels.conftest import MakeForest


def test_what_cannot_be_served_has_a_reason(backend: TritonBackend) -> None:
    """None for sizes that work, a sentence for those that don't."""
    assert backend.name == "triton"
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        assert backend.supports(dtype, 80, 21, 3) is None
    assert "float64" in (backend.supports(torch.float64, 64, 9, 3) or "")
    assert "not 60" in (backend.supports(torch.float32, 60, 9, 3) or "")
    assert "not 512" in (backend.supports(torch.float32, 512, 9, 3) or "")
    assert "9 query heads" in (backend.supports(torch.float32, 64, 9, 4) or "")
    assert "more than 32" in (backend.supports(torch.float32, 64, 33, 1) or "")


def test_a_plan_is_uploaded_once(
    make_forest: "MakeForest", backend: TritonBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All layers share it; another plan, even at the same address, is another one."""
    uploads = []

    def upload(plan: object, *rest: object) -> object:
        uploads.append(1)  # not the plan itself: it would keep its address
        return DevicePlan(*[None] * 14)  # type: ignore[arg-type]

    monkeypatch.setattr(triton_backend, "upload_plan", upload)
    forest = make_forest()
    for _ in range(20):
        plan = forest.plan()
        for _ in range(3):
            backend._on_device(plan, forest.pool, 2, torch.float32)
        del plan

    assert len(uploads) == 20
    assert len(backend._plans) <= triton_backend._REMEMBERED


def test_each_backend_has_its_own_plans() -> None:
    """Nothing is shared between two of them."""
    assert get_backend("triton", torch.float32) is not get_backend("triton", torch.float32)
