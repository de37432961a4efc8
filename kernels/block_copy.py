"""Copies between blocks of the pool, for every backend on the CPU."""

from collections.abc import Sequence

from torch import Tensor

from prefixkv.kernels.pool_bounds import check_copies


def copy_blocks(pool: Tensor, pairs: Sequence[tuple[int, int, int]]) -> None:
    """Copy the first num_slots slots of block src to block dst, all layers, in the given order.

    One strided copy per pair: a pair is at least tens of KiB, so launching it costs little, and
    the order makes chains right without looking for them. Only the named slots are moved: half
    a block on average, and what lies behind them stays as it is.

    Args:
        pool: [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]; changed.
        pairs: (src, dst, num_slots).

    Raises: IndexError if a pair lies outside the pool; nothing was copied then.
    """
    check_copies(pool, pairs)
    for src, dst, num_slots in pairs:
        pool[dst, ..., :num_slots, :].copy_(pool[src, ..., :num_slots, :])
