"""How large a tile of the attention kernel is, by head size and dtype."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Tile:
    """The part of a work item that one program holds at a time.

    Attributes:
        rows: query tokens times group, padding included; a power of two, >= 16.
        tokens: of the run in one iteration; a power of two, >= 16 on a GPU.
        num_warps, num_stages: options of the compiler.
    """

    rows: int
    tokens: int
    num_warps: int
    num_stages: int


# (largest head_dim, few rows, many rows), 2-byte queries. Chosen by what the compiler says: no
# spills, registers and shared memory for several programs an SM. Not by time: no GPU was there.
HALF = (
    (64, Tile(16, 64, 4, 3), Tile(64, 64, 4, 3)),
    (128, Tile(16, 64, 4, 3), Tile(64, 64, 8, 3)),
    (256, Tile(16, 32, 4, 2), Tile(64, 32, 8, 3)),
)
# float32 has no matrix instruction that keeps all its bits
SINGLE = (
    (64, Tile(16, 32, 4, 2), Tile(32, 16, 4, 2)),
    (128, Tile(16, 16, 4, 2), Tile(32, 16, 4, 2)),
    (256, Tile(16, 16, 4, 2), Tile(32, 16, 8, 2)),
)


def choose_tiles(dtype: torch.dtype, head_dim: int, group: int) -> tuple[Tile, Tile]:
    """Tiles for items of few and of many rows; each holds at least one token's group.

    Args:
        dtype: in which scores are multiplied.
        head_dim: <= 256.
        group: query heads of one kv head.
    """
    table = SINGLE if dtype == torch.float32 else HALF
    few, many = next(tiles for largest, *tiles in table if head_dim <= largest)
    least = 1 << (group - 1).bit_length()
    return _at_least(few, least), _at_least(many, least)


def _at_least(tile: Tile, rows: int) -> Tile:
    return Tile(max(tile.rows, rows), tile.tokens, tile.num_warps, tile.num_stages)
