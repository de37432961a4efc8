"""New tokens' K and V into their slots, in numba."""

import numpy as np
from numpy.typing import NDArray

from prefixkv.kernels.jit import Bits, jit


@jit()
def write_kernel(pool: Bits, layer: int, key: Bits, value: Bits, slots: NDArray[np.int64]) -> None:
    """pool[slot's block, layer, 0 / 1, :, slot's offset] = key / value of its token.

    Requires: slots lie in the pool.
    """
    num_tokens, num_kv_heads, head_dim = key.shape
    block_size = pool.shape[4]
    for token in range(num_tokens):
        block = slots[token] // block_size
        offset = slots[token] % block_size
        for kv_head in range(num_kv_heads):
            for d in range(head_dim):
                pool[block, layer, 0, kv_head, offset, d] = key[token, kv_head, d]
            for d in range(head_dim):
                pool[block, layer, 1, kv_head, offset, d] = value[token, kv_head, d]
