"""The CPU backend: numba for few query rows, gather and torch for many."""

import math
from collections.abc import Sequence
from typing import Any

import numba
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from prefixkv.kernels.block_copy import copy_blocks
from prefixkv.kernels.cpu_attention import (
    MANY_ROWS,
    Inputs,
    Softmax,
    attend_kernel,
    merge_kernel,
)
from prefixkv.kernels.cpu_prefill import attend_gathered
from prefixkv.kernels.jit import Bits
from prefixkv.kernels.kv_write import write_kernel
from prefixkv.kernels.plan import FINAL, ROW_CNT, Plan
from prefixkv.kernels.plan_options import PlanOptions
from prefixkv.kernels.pool_bounds import check_rows, check_slots
from prefixkv.kernels.upload import upload_arrays

# an item's tokens, at least: shorter ones gain nothing, longer ones share threads less evenly
PLAN_CHUNK = 256
_UNBOUNDED = 2**31 - 1


class CpuBackend:
    """Implements `prefixkv.kernels.backend.AttentionBackend` for float32 and bfloat16 pools.

    The first call with a dtype compiles, a few seconds once; the result is cached on disk beside
    the sources, or in NUMBA_CACHE_DIR. Uses as many threads as torch.
    """

    name = "cpu"
    DTYPES = (torch.float32, torch.bfloat16)

    def __init__(self, *, batch_invariant: bool = False) -> None:
        """Hold nothing.

        Args:
            batch_invariant: a row's result is the same, bit for bit, whatever else is in the step:
                `plan_options` asks for fixed chunks of prompts too, which are then read row by row
                instead of gathered; a long prompt takes several times as long.
        """
        self._batch_invariant = batch_invariant

    def supports(
        self, dtype: torch.dtype, head_dim: int, num_heads: int, num_kv_heads: int
    ) -> str | None:
        """None if it can serve such a model, else the reason."""
        if dtype not in self.DTYPES:
            return f"the cpu backend takes float32 and bfloat16, not {dtype}"
        if head_dim % 8:
            return f"the cpu backend needs a head_dim that is a multiple of 8, not {head_dim}"
        if num_heads % num_kv_heads:
            return f"{num_heads} query heads are not a multiple of {num_kv_heads} kv heads"
        return None

    def plan_options(
        self, dtype: torch.dtype, head_dim: int, num_heads: int, num_kv_heads: int, block_size: int
    ) -> PlanOptions:
        """See `AttentionBackend.plan_options`; chunks are fixed, so results are, too.

        What many rows gather (`MANY_ROWS`) is neither split nor shared; if results are not to
        depend on the batch, nothing is gathered.
        """
        return PlanOptions.for_heads(
            num_heads,
            num_kv_heads,
            head_dim,
            dtype.itemsize,
            tile_rows=MANY_ROWS - 1,
            chunk_tokens=-(-PLAN_CHUNK // block_size) * block_size,
            fixed_chunks=True,
            split_prompts=self._batch_invariant,
        )

    def upload(
        self, pool: Tensor, num_heads: int, plans: Sequence[Plan], arrays: Sequence[NDArray[Any]]
    ) -> list[Tensor]:
        """See `AttentionBackend.upload`; plans stay on the host."""
        return upload_arrays(arrays, pool.device)

    def write_kv(self, pool: Tensor, layer: int, key: Tensor, value: Tensor, slots: Tensor) -> None:
        """See `AttentionBackend.write_kv`."""
        check_rows(pool, key, value, len(slots))
        check_slots(pool, slots)
        write_kernel(
            _bits(pool), layer, _bits(key.contiguous()), _bits(value.contiguous()), slots.numpy()
        )

    def copy_blocks(self, pool: Tensor, pairs: Sequence[tuple[int, int, int]]) -> None:
        """See `AttentionBackend.copy_blocks`."""
        copy_blocks(pool, pairs)

    def attend(self, pool: Tensor, layer: int, query: Tensor, plan: Plan, scale: float) -> Tensor:
        """See `AttentionBackend.attend`; accumulates in float32."""
        out = torch.empty(query.shape, dtype=torch.float32)
        if len(plan.blocks) and not 0 <= plan.blocks.min() <= plan.blocks.max() < len(pool):
            raise IndexError(f"a block id of the plan lies outside the pool's {len(pool)} blocks")
        gathered = (plan.work[:, ROW_CNT] >= MANY_ROWS) & (plan.work[:, FINAL] != 0)
        if not gathered.all():
            self._attend_few_rows(pool, layer, query, plan, scale, out)
        for item in plan.work[gathered]:
            attend_gathered(pool, layer, query, plan, item, scale, out)
        return out.to(query.dtype)

    def _attend_few_rows(
        self, pool: Tensor, layer: int, query: Tensor, plan: Plan, scale: float, out: Tensor
    ) -> None:
        inputs = Inputs(
            query=query.to(torch.float32).contiguous().numpy(),
            pool=_bits(pool),
            layer=layer,
            work=plan.work,
            rows=plan.rows,
            positions=plan.positions,
            blocks=plan.blocks,
            window=_UNBOUNDED if plan.window is None else plan.window,
            scale=np.float32(scale * math.log2(math.e)),
        )
        shape = (plan.num_partials, *query.shape[1:])
        partials = Softmax(
            np.empty(shape, np.float32),
            np.empty(shape[:2], np.float32),
            np.empty(shape[:2], np.float32),
        )
        attend_kernel(inputs, out.numpy(), partials, _use_torch_threads())
        if plan.num_partials:
            merge_kernel(plan.merge_indptr, plan.merge_slots, partials, out.numpy())


def _bits(tensor: Tensor) -> Bits:
    """The tensor as numba takes it: bfloat16 as uint16, all else as it is. Shares memory."""
    bits: Bits = (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()
    return bits


def _use_torch_threads() -> int:
    """Let numba use as many threads as torch does; the setting is per calling thread."""
    most: int = numba.config.NUMBA_NUM_THREADS  # type: ignore[attr-defined]
    num_threads = min(torch.get_num_threads(), most)
    numba.set_num_threads(num_threads)
    return num_threads
