"""Where an engine runs: what is chosen, what is refused, and what is left for its pool."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from tiny_models import byte_tokenizer, tiny_engine, tiny_model

from prefixkv.config import EngineConfig
from prefixkv.device import choose_backend, choose_device
from prefixkv.device_memory import bytes_for_cache
from prefixkv.errors import ConfigError
from prefixkv.kernels.plan_options import PlanOptions
from prefixkv.memory import Memory
from prefixkv.model import LanguageModel
from prefixkv.sampling_params import SamplingParams

CUDA = torch.device("cuda")


def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def with_gpus(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)


def test_auto_takes_a_gpu_if_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the CPU."""
    without_gpu(monkeypatch)
    assert choose_device("auto") == choose_device("cpu") == torch.device("cpu")
    with_gpus(monkeypatch, 2)
    assert choose_device("auto") == choose_device("cuda") == CUDA
    assert choose_device("cuda:1") == torch.device("cuda:1")
    assert choose_device("cpu") == torch.device("cpu")


@pytest.mark.parametrize("name", ["gpu", "cuda:", "cuda:-1", "cuda:x", "", "mps", "cuda:1234"])
def test_other_names_are_refused(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """With the names that there are."""
    with_gpus(monkeypatch, 9)
    with pytest.raises(ConfigError, match="must be auto, cpu, cuda or cuda:N"):
        choose_device(name)


def test_a_gpu_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is loaded."""
    without_gpu(monkeypatch)
    with pytest.raises(ConfigError, match=r"device is 'cuda', but torch .* sees 0 of them"):
        choose_device("cuda")
    with_gpus(monkeypatch, 2)
    with pytest.raises(ConfigError, match="sees 2"):
        choose_device("cuda:2")


def test_a_model_that_is_elsewhere_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine does not move what it was given."""
    with_gpus(monkeypatch, 1)
    with pytest.raises(ConfigError, match="device is 'cuda', but the model is on cpu"):
        tiny_engine(device="cuda")
    assert tiny_engine(device="auto").device == torch.device("cpu")  # the model says where


def test_backends_know_their_devices() -> None:
    """Auto is Triton on a GPU, for what its kernels take; the CPU's cannot read a pool there."""
    facts = LanguageModel.from_transformers(tiny_model(dtype=torch.float32)).facts
    assert choose_backend(facts, "auto", CUDA).name == "triton"
    assert choose_backend(facts, "reference", CUDA).name == "reference"
    with pytest.raises(ConfigError, match="cpu backend cannot read a pool on cuda"):
        choose_backend(facts, "cpu", CUDA)
    exact = LanguageModel.from_transformers(tiny_model(dtype=torch.float64)).facts
    assert choose_backend(exact, "auto", CUDA).name == "reference"
    with pytest.raises(ConfigError, match=r"not torch\.float64"):
        choose_backend(exact, "triton", CUDA)


def test_a_step_runs_with_its_gpu_as_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton launches on the current device of the thread, wherever the tensors are."""
    entered: list[torch.device] = []

    @contextmanager
    def device(device: torch.device) -> Iterator[None]:
        entered.append(device)
        yield
        entered.append(torch.device("cpu"))

    monkeypatch.setattr(torch.cuda, "device", device)
    engine = tiny_engine()
    compute = engine._compute

    def seen(batch: Any) -> Any:
        assert entered == [torch.device("cuda:1")]
        engine.device = torch.device("cpu")
        return compute(batch)

    monkeypatch.setattr(engine, "_compute", seen)
    engine.device = torch.device("cuda:1")
    engine.add([5, 6, 7], SamplingParams(max_tokens=1, temperature=0.0))
    (delta,) = engine.step()
    assert delta.error is None
    assert entered == [torch.device("cuda:1"), torch.device("cpu")]


@pytest.mark.parametrize("share", [0, -0.1, 1.01, float("nan")])
def test_a_share_is_a_share(share: float) -> None:
    """In (0, 1]."""
    with pytest.raises(ConfigError, match="gpu_memory_utilization is"):
        EngineConfig(gpu_memory_utilization=share)


class FakeMemory:
    """A device of 1,000,000 bytes, of which some are in use; a step needs 50,000."""

    def __init__(self, used: int) -> None:
        self.used = used
        self.was_run = False

    def now(self) -> Memory:
        return Memory(1_000_000, 1_000_000 - self.used)

    def peak_of(self, run: Callable[[], None]) -> int:
        run()
        self.was_run = True
        return 50_000


def test_the_pool_gets_what_weights_and_a_step_leave() -> None:
    """The share, less what is in use, the largest step, and partials of 2 requests of 5 chunks.

    Where prompts are split, partials of all tokens of a step.
    """
    model = LanguageModel.from_transformers(tiny_model(), byte_tokenizer())
    config = EngineConfig(gpu_memory_utilization=0.5, max_num_seqs=2, max_model_len=80)
    options = PlanOptions(token_bytes=8, partial_bytes=200, tile_rows=4, chunk_tokens=16)
    memory = FakeMemory(used=300_000)
    found = bytes_for_cache(model, config, options, memory)
    assert found == 500_000 - 300_000 - 50_000 - 2 * 5 * 100
    assert memory.was_run
    config = replace(config, max_num_batched_tokens=20)
    found = bytes_for_cache(model, config, replace(options, split_prompts=True), memory)
    assert found == 500_000 - 300_000 - 50_000 - 20 * 5 * 100


def test_a_share_that_leaves_nothing_is_refused_with_the_arithmetic() -> None:
    """Weights of others count too."""
    model = LanguageModel.from_transformers(tiny_model(), byte_tokenizer())
    config = EngineConfig(gpu_memory_utilization=0.3)
    with pytest.raises(ConfigError, match=r"0\.3 of .* in use and a step needs .* leaves nothing"):
        bytes_for_cache(model, config, None, FakeMemory(used=280_000))
