"""Copies between blocks of the pool, for every backend on the CPU."""

from collections.abc import Sequence

from torch import Tensor


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
    num_blocks, block_size = pool.shape[0], pool.shape[4]
    for src, dst, num_slots in pairs:
        if not (0 <= src < num_blocks and 0 <= dst < num_blocks and 0 <= num_slots <= block_size):
            raise IndexError(
                f"copy ({src}, {dst}, {num_slots}) exceeds {num_blocks} blocks of "
                f"{block_size} slots"
            )
    for src, dst, num_slots in pairs:
        pool[dst, ..., :num_slots, :].copy_(pool[src, ..., :num_slots, :])
