"""What a backend tells the planner about itself, and what a plan costs under it."""

from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np

from prefixkv.kernels.plan import ROW_CNT, TOK0, TOK1, Plan


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """How a backend wants its work cut.

    Attributes:
        token_bytes: K and V of one token in one layer.
        partial_bytes: writing and reading again one query token's partial, all heads.
        tile_rows: query tokens that can read K and V together. Sequences with more of them in a
            step have tiles enough: they are neither split nor grouped.
        chunk_tokens: items end at multiples of it, counted from the sequence's first token; a
            multiple of the block size. None: no splits.
        fixed_chunks: make every partial one query token's view of one whole chunk, so that neither
            the grouping nor the rest of the batch changes a bit of a row's result.
        share: let sequences with common blocks read them together.
        split_prompts: split and group sequences of more than `tile_rows` query tokens as well. With
            fixed chunks a row's bits then do not depend either on how many rows of its own
            sequence are in the step. Each row of a prompt then has a partial for each chunk.
    """

    token_bytes: int
    partial_bytes: int
    tile_rows: int
    chunk_tokens: int | None = None
    fixed_chunks: bool = False
    share: bool = True
    split_prompts: bool = False

    def __post_init__(self) -> None:
        """Raises: ValueError naming the option."""
        if self.token_bytes < 1 or self.partial_bytes < 1 or self.tile_rows < 1:
            raise ValueError(
                f"token_bytes {self.token_bytes}, partial_bytes {self.partial_bytes} and "
                f"tile_rows {self.tile_rows} must be >= 1"
            )
        if self.chunk_tokens is not None and self.chunk_tokens < 1:
            raise ValueError(f"chunk_tokens {self.chunk_tokens} must be >= 1")
        if self.fixed_chunks and self.chunk_tokens is None:
            raise ValueError("fixed_chunks needs chunk_tokens")

    @classmethod
    def for_heads(
        cls,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        element_bytes: int,
        *,
        tile_rows: int,
        chunk_tokens: int | None = None,
        fixed_chunks: bool = False,
        share: bool = True,
        split_prompts: bool = False,
    ) -> Self:
        """The options of an attention layer whose partials are float32.

        Args:
            element_bytes: of one element of K or V.
        """
        return cls(
            token_bytes=2 * num_kv_heads * head_dim * element_bytes,
            # the weighted sum, the peak and the total of each head, once written and once read
            partial_bytes=2 * 4 * num_heads * (head_dim + 2),
            tile_rows=tile_rows,
            chunk_tokens=chunk_tokens,
            fixed_chunks=fixed_chunks,
            share=share,
            split_prompts=split_prompts,
        )


class PlanBytes(NamedTuple):
    """Bytes that one layer moves by a plan: K and V read, partials written and read again."""

    kv: int
    partials: int

    @property
    def total(self) -> int:
        """Both together."""
        return self.kv + self.partials


def plan_bytes(plan: Plan, options: PlanOptions) -> PlanBytes:
    """Count what one layer moves: an item's K and V once for each tile of its rows."""
    num_tiles = -(-plan.work[:, ROW_CNT].astype(np.int64) // options.tile_rows)
    num_reads = int((num_tiles * (plan.work[:, TOK1] - plan.work[:, TOK0])).sum())
    return PlanBytes(num_reads * options.token_bytes, plan.num_partials * options.partial_bytes)
