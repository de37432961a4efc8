"""The tensor that holds K and V of every block.

    pool [num_blocks, num_layers, 2 (K, V), num_kv_heads, block_size, head_dim]

Block-major and C-contiguous: a block is one span of memory, whatever the model, so that copying,
checksumming or moving it elsewhere is one copy. Who may read which slot is not decided here: what
nobody wrote holds anything, and plans never name it. Block 0 is the padding block.
"""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from prefixkv.config import require_block_size
from prefixkv.errors import ConfigError
from prefixkv.memory import memory_of

# the padding block and one to use
MIN_BLOCKS = 2
_GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheShape:
    """Sizes of one block, in the pool's axis order.

    Args:
        block_size: tokens per block, one of BLOCK_SIZES; below 16 is for tests.
        head_dim: a multiple of 8.
        dtype: a floating dtype.

    Raises: ConfigError for sizes that cannot be served.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype

    def __post_init__(self) -> None:
        require_block_size(self.block_size)
        if self.num_layers < 1 or self.num_kv_heads < 1:
            raise ConfigError(
                f"num_layers is {self.num_layers} and num_kv_heads {self.num_kv_heads}; "
                "both must be >= 1"
            )
        if self.head_dim < 8 or self.head_dim % 8:
            raise ConfigError(f"head_dim is {self.head_dim}; it must be a multiple of 8")
        if not self.dtype.is_floating_point:
            raise ConfigError(f"the dtype of the KV cache is {self.dtype}; it must be floating")

    @property
    def block_bytes(self) -> int:
        """Bytes of one block: K and V of all layers."""
        per_token = self.num_layers * 2 * self.num_kv_heads * self.head_dim
        return per_token * self.block_size * self.dtype.itemsize

    def num_blocks_in(self, budget_bytes: int) -> int:
        """Blocks, the padding block included, that fit into a budget.

        Raises: ConfigError if not even MIN_BLOCKS fit.
        """
        num_blocks = budget_bytes // self.block_bytes
        if num_blocks < MIN_BLOCKS:
            raise ConfigError(
                f"a KV cache of {budget_bytes} bytes holds {num_blocks} blocks of "
                f"{self.block_bytes} bytes; it needs at least {MIN_BLOCKS}"
            )
        return num_blocks


class KVCache:
    """The pool tensor and its shape.

    Attributes:
        pool: [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim].
        shape: of one block.
    """

    __slots__ = ("pool", "shape")

    def __init__(self, pool: Tensor, shape: KVCacheShape) -> None:
        self.pool = pool
        self.shape = shape

    @classmethod
    def allocate(
        cls, shape: KVCacheShape, num_blocks: int, device: torch.device | None = None
    ) -> Self:
        """Reserve `num_blocks` blocks; their content is undefined.

        Args:
            device: None is the CPU.

        Raises: ConfigError if there are fewer than MIN_BLOCKS, or they exceed the free memory.
        """
        device = device or torch.device("cpu")
        if num_blocks < MIN_BLOCKS:
            raise ConfigError(f"num_blocks is {num_blocks}; it must be at least {MIN_BLOCKS}")
        needed_bytes = num_blocks * shape.block_bytes
        available_bytes = memory_of(device).free
        if needed_bytes > available_bytes:
            raise ConfigError(
                f"{num_blocks} blocks of {shape.block_bytes} bytes need "
                f"{needed_bytes / _GIB:.2f} GiB; {available_bytes / _GIB:.2f} GiB are available"
            )
        sizes = (num_blocks, shape.num_layers, 2, shape.num_kv_heads)
        pool = torch.empty(
            *sizes,
            shape.block_size,
            shape.head_dim,
            dtype=shape.dtype,
            device=device,
        )
        return cls(pool, shape)

    @property
    def num_blocks(self) -> int:
        """Blocks of the pool, the padding block included."""
        return self.pool.shape[0]

    def fill(self, value: float) -> None:
        """Overwrite every slot; for tests that nothing unwritten is read."""
        self.pool.fill_(value)
