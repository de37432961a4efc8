"""Threads of torch in the engine's tests."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _threads(request: pytest.FixtureRequest) -> Iterator[None]:
    """Tiny tensors gain nothing from threads, and lose much on a busy machine."""
    before = torch.get_num_threads()
    if request.node.get_closest_marker("default_model") is None:
        torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
