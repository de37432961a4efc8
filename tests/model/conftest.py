"""Fixtures of the model tests: attention that is plain to see, and the default model."""

from pathlib import Path

import pytest
import torch

from prefixkv import default_model
from prefixkv.model import LanguageModel


class DenseAttention:
    """Attention over a packed batch of sequences that start at position 0, by one big mask."""

    def __init__(self, model: LanguageModel, lengths: list[int]) -> None:
        self._windows = model.facts.windows
        self._sequence = torch.cat([torch.full((n,), i) for i, n in enumerate(lengths)])
        self.positions = torch.cat([torch.arange(n) for n in lengths])
        self.layers: list[int] = []

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        self.layers.append(layer)
        num_groups = query.shape[1] // key.shape[1]
        key, value = (t.repeat_interleave(num_groups, dim=1) for t in (key, value))
        scores = torch.einsum("qhd,khd->hqk", query, key) * scale
        visible = self._sequence[:, None] == self._sequence
        distance = self.positions[:, None] - self.positions
        visible &= distance >= 0
        window = self._windows[layer]
        if window is not None:
            visible &= distance < window
        probabilities = scores.masked_fill(~visible, -torch.inf).softmax(dim=-1)
        return torch.einsum("hqk,khd->qhd", probabilities, value)


@pytest.fixture(scope="session")
def default_folder() -> Path:
    return default_model.fetch()


@pytest.fixture(scope="session")
def smollm2(default_folder: Path) -> LanguageModel:
    return LanguageModel.load(default_model.NAME)


@pytest.fixture(scope="session")
def dense_attention() -> type[DenseAttention]:
    return DenseAttention
