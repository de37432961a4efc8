"""How large the pool is, for a model and what was asked."""

from prefixkv.config import EngineConfig
from prefixkv.device_memory import CudaMemory, bytes_for_cache
from prefixkv.kernels.plan_options import PlanOptions
from prefixkv.kv_cache import KVCacheShape
from prefixkv.memory import memory_of
from prefixkv.model import LanguageModel, ModelFacts

DEFAULT_SHARE = 0.25  # of the memory that is free, for a pool whose size nobody gave


def cache_shape(facts: ModelFacts, block_size: int) -> KVCacheShape:
    """Return the shape of a model's blocks. Raises ConfigError if no kernel can serve it."""
    return KVCacheShape(
        num_layers=facts.num_layers,
        num_kv_heads=facts.num_kv_heads,
        head_dim=facts.head_dim,
        block_size=block_size,
        dtype=facts.dtype,
    )


def size_pool(
    model: LanguageModel, config: EngineConfig, options: PlanOptions | None
) -> tuple[KVCacheShape, int, str]:
    """Return the pool's shape, its blocks, and why so many if that was left to us.

    The reserved block 0 counts; blocks that are given are those to use, and it comes on top.

    Args:
        options: how plans are cut, which says what partials need.

    Raises:
        ConfigError: if the bytes hold less than two blocks.
    """
    shape = cache_shape(model.facts, config.block_size)
    if config.num_blocks is not None:
        return shape, config.num_blocks + 1, ""
    if config.kv_cache_memory_bytes is not None:
        return shape, shape.num_blocks_in(config.kv_cache_memory_bytes), ""
    if model.device.type == "cuda":
        num_bytes = bytes_for_cache(model, config, options, CudaMemory(model.device))
        reason = f" (of {config.gpu_memory_utilization:.0%} of the GPU's memory)"
    else:
        num_bytes = int(memory_of(model.device).free * DEFAULT_SHARE)
        reason = " (a quarter of the free memory)"
    return shape, shape.num_blocks_in(num_bytes), reason


def describe(shape: KVCacheShape, num_blocks: int) -> str:
    """Say in a line what a pool of so many blocks, the reserved one included, holds."""
    gib = num_blocks * shape.block_bytes / 2**30
    usable = num_blocks - 1
    return (
        f"KV cache: {usable:,} blocks of {shape.block_size} tokens = "
        f"{usable * shape.block_size:,} tokens, {gib:.2f} GiB"
    )
