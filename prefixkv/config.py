"""Options of the engine, validated once."""

import math
from dataclasses import dataclass

from prefixkv.errors import ConfigError

DEFAULT_MODEL = "smollm2-135m"

BLOCK_SIZES = (1, 2, 4, 8, 16, 32, 64, 128)
"""Tokens a block that there are kernels for; below 16 is for tests and for counting."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Limits of one step and of the queue.

    Args:
        max_num_seqs: requests that may run at once.
        max_num_batched_tokens: the token budget of a step.
        max_prefill_chunk: prompt tokens of one request in one step, at most; None leaves it to the
            budget. A short chunk keeps the streams of other requests smooth.
        max_num_waiting: requests that may wait; None means any number.
        max_num_scored_tokens: tokens of a step, at most, of requests that want log-probabilities of
            their prompt: each takes a row of logits.
        max_leased_share: share of the pool's blocks that leases may hold; 0 turns leases off.
        max_lease_ttl_s: how long a lease lasts at most.
    """

    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    max_prefill_chunk: int | None = None
    max_num_waiting: int | None = None
    max_num_scored_tokens: int = 512
    max_leased_share: float = 0.5
    max_lease_ttl_s: float = 3600

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_num_scored_tokens"):
            require_positive(name, getattr(self, name))
        for name in ("max_prefill_chunk", "max_num_waiting"):
            if getattr(self, name) is not None:
                require_positive(name, getattr(self, name))
        require_lease_limits(self.max_leased_share, self.max_lease_ttl_s)


def require_lease_limits(max_leased_share: float, max_lease_ttl_s: float) -> None:
    """Raise ConfigError unless they bound leases."""
    if not 0 <= max_leased_share <= 1:
        raise ConfigError(f"max_leased_share is {max_leased_share}; it must be in [0, 1]")
    if not (max_lease_ttl_s > 0 and math.isfinite(max_lease_ttl_s)):
        raise ConfigError(f"max_lease_ttl_s is {max_lease_ttl_s}; it must be positive and finite")


def require_block_size(value: int) -> None:
    """Raise ConfigError unless there are kernels for blocks of `value` tokens."""
    if value not in BLOCK_SIZES:
        raise ConfigError(f"block_size is {value}; it must be one of {BLOCK_SIZES}")


def require_positive(name: str, value: object) -> None:
    """Raise ConfigError unless `value` is an integer >= 1."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{name} is {value!r}; it must be an integer >= 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """All options of an engine; what is None is chosen when the model is known.

    Args:
        model: a local folder, a GGUF file, a hub id, or the name of the default model.
        dtype: of weights and KV: "auto", "float32", "bfloat16", "float16" or "float64".
        max_model_len: tokens of one request; None means the model's context, or the pool if that
            is smaller.
        block_size: tokens a block.
        device: of the model and the pool: "auto" (a GPU if there is one), "cpu", "cuda", "cuda:N".
        num_blocks: size of the pool; None means `kv_cache_memory_bytes`.
        kv_cache_memory_bytes: size of the pool; None means a quarter of the free memory on a CPU,
            and `gpu_memory_utilization` on a GPU.
        gpu_memory_utilization: share of a GPU's memory for weights, a step and the pool together.
        enable_prefix_caching: False computes every prompt anew.
        attention_backend: "auto" (the fastest on the device), "triton", "cpu" or "reference".
        batch_invariant_attention: give a token's attention the same bits whatever else is in its
            step: other requests, other chunks of its prompt, hits in the cache. Slower. The rest of
            the model is torch's, whose results do not depend on the batch on a CPU in bfloat16 and
            in float32 with packed linear layers, as loaded models have them, and may elsewhere.
        seed: of the seeds of requests that have none; None draws it at random.
        max_leased_share, max_lease_ttl_s: bounds of leases, which keep prefixes findable.

    The others are those of `SchedulerConfig`.
    """

    model: str = DEFAULT_MODEL
    dtype: str = "auto"
    device: str = "auto"
    max_model_len: int | None = None
    block_size: int = 16
    num_blocks: int | None = None
    kv_cache_memory_bytes: int | None = None
    gpu_memory_utilization: float = 0.9
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    max_prefill_chunk: int | None = None
    max_num_waiting: int | None = None
    enable_prefix_caching: bool = True
    attention_backend: str = "auto"
    batch_invariant_attention: bool = False
    seed: int | None = None
    max_leased_share: float = 0.5
    max_lease_ttl_s: float = 3600

    def __post_init__(self) -> None:
        require_block_size(self.block_size)
        for name in ("num_blocks", "kv_cache_memory_bytes", "max_model_len"):
            if getattr(self, name) is not None:
                require_positive(name, getattr(self, name))
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ConfigError(
                f"gpu_memory_utilization is {self.gpu_memory_utilization}; it must be in (0, 1]"
            )
        require_lease_limits(self.max_leased_share, self.max_lease_ttl_s)
        if self.num_blocks is not None and self.kv_cache_memory_bytes is not None:
            raise ConfigError(
                f"num_blocks ({self.num_blocks}) and kv_cache_memory_bytes "
                f"({self.kv_cache_memory_bytes}) both set the size of the pool: give one"
            )

    def scheduler_config(self) -> SchedulerConfig:
        """The scheduler's part."""
        return SchedulerConfig(
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_prefill_chunk=self.max_prefill_chunk,
            max_num_waiting=self.max_num_waiting,
            max_leased_share=self.max_leased_share,
            max_lease_ttl_s=self.max_lease_ttl_s,
        )
