"""What is written to or copied in the pool lies in it: the checks that all backends share."""

from collections.abc import Sequence

from torch import Tensor


def check_rows(pool: Tensor, key: Tensor, value: Tensor, num_tokens: int) -> None:
    """Raise ValueError unless K and V are [num_tokens, num_kv_heads, head_dim], as in the pool."""
    expected = (num_tokens, pool.shape[3], pool.shape[5])
    if (
        key.shape != expected
        or value.shape != expected
        or not key.dtype == value.dtype == pool.dtype
    ):
        raise ValueError(
            f"key {tuple(key.shape)} {key.dtype} and value {tuple(value.shape)} {value.dtype} "
            f"must be {expected} {pool.dtype}"
        )


def check_slots(pool: Tensor, slots: Tensor) -> None:
    """Raise IndexError if a slot (int64 [num_tokens], on the CPU) lies outside the pool."""
    indices = slots.numpy()
    num_slots = pool.shape[0] * pool.shape[4]
    if len(indices) and not (indices.min() >= 0 and indices.max() < num_slots):
        raise IndexError(f"a slot is outside [0, {num_slots})")


def check_copies(pool: Tensor, pairs: Sequence[tuple[int, int, int]]) -> None:
    """Raise IndexError if a pair (src, dst, num_slots) lies outside the pool."""
    num_blocks, block_size = pool.shape[0], pool.shape[4]
    for src, dst, num_slots in pairs:
        if not (0 <= src < num_blocks and 0 <= dst < num_blocks and 0 <= num_slots <= block_size):
            raise IndexError(
                f"copy ({src}, {dst}, {num_slots}) exceeds {num_blocks} blocks of "
                f"{block_size} slots"
            )
