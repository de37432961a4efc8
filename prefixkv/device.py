"""Where the model and the pool are, and which backend serves them there."""

import re
from contextlib import AbstractContextManager, nullcontext
from typing import cast

import torch

from prefixkv.errors import ConfigError
from prefixkv.kernels.backend import AttentionBackend, BackendName, get_backend
from prefixkv.model import LanguageModel, ModelFacts


def choose_device(name: str) -> torch.device:
    """Return the device of that name; with "auto", a GPU if there is one.

    Raises: ConfigError unless it is "auto", "cpu", "cuda" or "cuda:N", and there.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cpu":
        return torch.device("cpu")
    if not re.fullmatch(r"cuda(:\d{1,3})?", name):
        raise ConfigError(f"device is {name!r}; it must be auto, cpu, cuda or cuda:N")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    device = torch.device(name)
    if (device.index or 0) >= count:
        raise ConfigError(f"device is {name!r}, but torch {torch.__version__} sees {count} of them")
    return device


def device_of(model: LanguageModel, name: str) -> torch.device:
    """Return where the model is. Raises ConfigError if `name` says that it is somewhere else."""
    wanted = model.device if name == "auto" else choose_device(name)
    if (wanted.type, wanted.index or 0) != (model.device.type, model.device.index or 0):
        raise ConfigError(f"device is {name!r}, but the model is on {model.device}")
    return model.device


def current(device: torch.device) -> AbstractContextManager[object]:
    """Make a GPU the current one of this thread, which is the one that Triton launches on."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def choose_backend(
    facts: ModelFacts, name: str, device: torch.device, *, batch_invariant: bool = False
) -> AttentionBackend:
    """Return the attention backend of that name; ConfigError if it cannot serve the model there.

    Args:
        batch_invariant: see `EngineConfig.batch_invariant_attention`.
    """
    try:
        backend = get_backend(
            cast(BackendName, name), facts.dtype, device, batch_invariant=batch_invariant
        )
    except ValueError as error:
        raise ConfigError(f"attention_backend: {error}") from None
    reason = backend.supports(facts.dtype, facts.head_dim, facts.num_heads, facts.num_kv_heads)
    if reason is not None:
        raise ConfigError(f"attention_backend: {reason}")
    return backend
