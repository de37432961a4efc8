"""With `batch_invariant_attention` a request says the same, to the last bit, in any company."""

from typing import Any

import pytest
import torch
from engine_company import alone, together

from prefixkv.kernels import cpu


@pytest.mark.parametrize(
    ("backend", "dtype"),
    [("cpu", torch.float32), ("cpu", torch.bfloat16), ("reference", torch.float32)],
)
def test_company_changes_no_bit(
    backend: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither who shares its beginning, nor what was found, nor how its prompt was cut."""
    monkeypatch.setattr(cpu, "PLAN_CHUNK", 8)
    options: dict[str, Any] = {"attention_backend": backend, "batch_invariant_attention": True}

    assert together(dtype, **options) == alone(dtype, **options)


def test_without_it_company_changes_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: prompts of many rows take another path than what is found."""
    monkeypatch.setattr(cpu, "PLAN_CHUNK", 8)

    assert together(torch.float32) != alone(torch.float32)
