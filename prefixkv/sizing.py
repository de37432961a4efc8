"""How large the pool is, for a model and what was asked."""

import psutil

from prefixkv.kv_cache import KVCacheShape
from prefixkv.model import ModelFacts

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


def choose_num_blocks(shape: KVCacheShape, num_blocks: int | None, num_bytes: int | None) -> int:
    """Return the size of the pool: as many blocks or bytes as given, else a quarter of free memory.

    Blocks that are given are those to use; the reserved block 0 comes on top.

    Raises:
        ConfigError: if the bytes hold less than two blocks.
    """
    if num_blocks is not None:
        return num_blocks + 1
    if num_bytes is None:
        num_bytes = int(psutil.virtual_memory().available * DEFAULT_SHARE)
    return shape.num_blocks_in(num_bytes)


def describe(shape: KVCacheShape, num_blocks: int) -> str:
    """Say in a line what a pool of so many blocks, the reserved one included, holds."""
    gib = num_blocks * shape.block_bytes / 2**30
    usable = num_blocks - 1
    return (
        f"KV cache: {usable:,} blocks of {shape.block_size} tokens = "
        f"{usable * shape.block_size:,} tokens, {gib:.2f} GiB"
    )
