"""What a GPU's memory has left for the pool, beside weights and a step."""

from collections.abc import Callable
from typing import Protocol

import torch

from prefixkv.config import EngineConfig
from prefixkv.errors import ConfigError
from prefixkv.kernels.plan_options import PlanOptions
from prefixkv.memory import Memory, memory_of
from prefixkv.model import LanguageModel
from prefixkv.sampling import Sampler, SamplingRow
from prefixkv.sampling_params import SamplingParams

_GIB = 2**30


class DeviceMemory(Protocol):
    """What there is to know of the memory of a device, in bytes."""

    def now(self) -> Memory:
        """All of it, and what no process holds."""
        ...

    def peak_of(self, run: Callable[[], None]) -> int:
        """What `run` holds at most beyond what was held before."""
        ...


class CudaMemory:
    """Of one CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def now(self) -> Memory:
        """See `DeviceMemory`; first gives back what torch only keeps in reserve."""
        torch.cuda.empty_cache()
        return memory_of(self._device)

    def peak_of(self, run: Callable[[], None]) -> int:
        """See `DeviceMemory`; counts what torch allocates."""
        torch.cuda.reset_peak_memory_stats(self._device)
        before = torch.cuda.memory_allocated(self._device)
        run()
        return torch.cuda.max_memory_allocated(self._device) - before


def bytes_for_cache(
    model: LanguageModel, config: EngineConfig, options: PlanOptions | None, memory: DeviceMemory
) -> int:
    """Return what of the share that `gpu_memory_utilization` gives us is left for the pool.

    What is held already, by us and by others, counts; so does what the largest step needs, which
    is run once to know it, and the partials of a step of requests of full length.

    Raises: ConfigError if nothing is left.
    """
    step = memory.peak_of(lambda: _run_largest_step(model, config))
    step += _partial_bytes(model, config, options)
    total, free = memory.now()
    share = int(total * config.gpu_memory_utilization)
    left = share - (total - free) - step
    if left <= 0:
        raise ConfigError(
            f"gpu_memory_utilization {config.gpu_memory_utilization} of {total / _GIB:.2f} GiB is "
            f"{share / _GIB:.2f} GiB; {(total - free) / _GIB:.2f} are in use and a step needs "
            f"{step / _GIB:.2f}, which leaves nothing for the KV cache"
        )
    return left


class _NoAttention:
    """Takes the place of attention where only the memory of a step matters."""

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        return torch.zeros_like(query)


def _run_largest_step(model: LanguageModel, config: EngineConfig) -> None:
    """Run as many tokens, rows of logits and draws as a step may have."""
    limits = config.scheduler_config()
    device = model.device
    positions = torch.arange(limits.max_num_batched_tokens, device=device)
    positions %= model.facts.max_context
    num_rows = max(limits.max_num_seqs, limits.max_num_scored_tokens)
    rows = positions[: min(num_rows, len(positions))]
    logits = model.forward(torch.zeros_like(positions), positions, _NoAttention(), rows)
    params = SamplingParams(temperature=1.0, top_p=0.9, top_k=50, min_p=0.01)
    num_drawn = min(limits.max_num_seqs, len(logits))
    Sampler().sample(logits[:num_drawn], [SamplingRow(params, 0, 0, i) for i in range(num_drawn)])


def _partial_bytes(model: LanguageModel, config: EngineConfig, options: PlanOptions | None) -> int:
    if options is None or options.chunk_tokens is None:
        return 0
    length = min(config.max_model_len or model.facts.max_context, model.facts.max_context)
    rows = config.max_num_batched_tokens if options.split_prompts else config.max_num_seqs
    num_partials = rows * -(-length // options.chunk_tokens)
    return num_partials * options.partial_bytes // 2  # which are written and read again
