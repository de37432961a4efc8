"""The Triton backend: CUDA tensors, or CPU tensors in Triton's interpreter (TRITON_INTERPRET=1).

Import this module only where triton is installed and can run; see `get_backend`.
"""

from collections.abc import Sequence
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor
from triton.runtime.jit import JITFunction

from prefixkv.kernels.plan import Plan
from prefixkv.kernels.plan_options import PlanOptions
from prefixkv.kernels.pool_bounds import check_rows, check_slots
from prefixkv.kernels.triton_attention import attend_items, attend_kernel, empty_partials
from prefixkv.kernels.triton_block_copy import copy_blocks
from prefixkv.kernels.triton_kv_write import write_slots
from prefixkv.kernels.triton_merge import merge_partials
from prefixkv.kernels.triton_plan import DevicePlan, TiledPlan, upload_plan
from prefixkv.kernels.triton_tiles import Tile, choose_tiles
from prefixkv.kernels.upload import upload_arrays

# decided when the kernels were decorated, whatever the environment says now
INTERPRETED = not isinstance(attend_kernel, JITFunction)
# an item's tokens; not tuned, as no GPU was there
PLAN_CHUNK = 512
_REMEMBERED = 8  # plans that came without `upload`


class TritonBackend:
    """Implements `prefixkv.kernels.backend.AttentionBackend` for bfloat16, float16 and float32.

    Plans are on the device from `upload` until the next one; `attend` uploads one that is not
    there. Its arrays must not change meanwhile. Not safe for use by several threads at once.
    """

    name = "triton"
    DTYPES = (torch.bfloat16, torch.float16, torch.float32)

    def __init__(self, *, batch_invariant: bool = False) -> None:
        """Hold no plan yet.

        Args:
            batch_invariant: a row's result is the same, bit for bit, whatever else is in the step:
                all items are computed in tiles of one size, and `plan_options` asks for fixed
                chunks of prompts too. Decoding without sharing then multiplies up to four times as
                many rows of padding, and each row of a prompt has a partial for each chunk.
        """
        self._batch_invariant = batch_invariant
        # the host's plan is kept with the device's: an id is taken again once its owner is gone
        self._plans: dict[tuple[int, object], tuple[Plan, DevicePlan]] = {}

    def supports(
        self, dtype: torch.dtype, head_dim: int, num_heads: int, num_kv_heads: int
    ) -> str | None:
        """None if it can serve such a model, else the reason."""
        if dtype not in self.DTYPES:
            return f"the triton backend takes bfloat16, float16 and float32, not {dtype}"
        if head_dim % 8 or head_dim > 256:
            return (
                "the triton backend needs a head_dim that is a multiple of 8, at most 256, "
                f"not {head_dim}"
            )
        if num_heads % num_kv_heads:
            return f"{num_heads} query heads are not a multiple of {num_kv_heads} kv heads"
        if num_heads // num_kv_heads > 32:
            return f"{num_heads // num_kv_heads} query heads for a kv head are more than 32"
        return None

    def plan_options(
        self, dtype: torch.dtype, head_dim: int, num_heads: int, num_kv_heads: int, block_size: int
    ) -> PlanOptions:
        """See `AttentionBackend.plan_options`; chunks are fixed, so results are, too."""
        group = num_heads // num_kv_heads
        many = self._tiles(dtype, head_dim, group)[1]
        return PlanOptions.for_heads(
            num_heads,
            num_kv_heads,
            head_dim,
            dtype.itemsize,
            tile_rows=many.rows // group,
            chunk_tokens=-(-PLAN_CHUNK // block_size) * block_size,
            fixed_chunks=True,
            split_prompts=self._batch_invariant,
        )

    def upload(
        self, pool: Tensor, num_heads: int, plans: Sequence[Plan], arrays: Sequence[NDArray[Any]]
    ) -> list[Tensor]:
        """See `AttentionBackend.upload`. Expects queries of the pool's dtype."""
        group = num_heads // pool.shape[3]
        tiles = self._tiles(pool.dtype, pool.shape[5], group)
        tiled = [TiledPlan.cut(plan, group, tiles) for plan in plans]
        sent = upload_arrays([*arrays, *(a for plan in tiled for a in plan.arrays)], pool.device)
        num_arrays = len(arrays)
        self._plans.clear()
        for i, one in enumerate(tiled):
            first = num_arrays + i * len(one.arrays)
            placed = one.on_device(sent[first : first + len(one.arrays)])
            self._plans[_plan_key(one.plan, pool, group, pool.dtype)] = one.plan, placed
        return sent[:num_arrays]

    def _tiles(self, dtype: torch.dtype, head_dim: int, group: int) -> tuple[Tile, Tile]:
        few, many = choose_tiles(dtype, head_dim, group)
        return (many if self._batch_invariant else few), many

    def write_kv(self, pool: Tensor, layer: int, key: Tensor, value: Tensor, slots: Tensor) -> None:
        """See `AttentionBackend.write_kv`.

        Slots that are on the device already are not looked at from the host, which would wait for
        it: those outside the pool are then skipped.

        Raises: ValueError too, if rows have another shape or dtype than the pool's.
        """
        _check_device(pool)
        check_rows(pool, key, value, len(slots))
        if slots.is_cpu:
            check_slots(pool, slots)
        write_slots(pool[:, layer], _packed_heads(key), _packed_heads(value), slots.to(pool.device))

    def copy_blocks(self, pool: Tensor, pairs: Sequence[tuple[int, int, int]]) -> None:
        """See `AttentionBackend.copy_blocks`."""
        _check_device(pool)
        copy_blocks(pool, pairs)

    def attend(
        self,
        pool: Tensor,
        layer: int,
        query: Tensor,
        plan: Plan,
        scale: float,
        *,
        softcap: float | None = None,
    ) -> Tensor:
        """See `AttentionBackend.attend`; accumulates in float32.

        What a row sees of a value that is not finite, other rows of its tile may see too: rows of
        one item read the same run.

        Args:
            softcap: scores become softcap * tanh(score / softcap); None leaves them.

        Requires: each query token is in a final item, or has partials to merge.
        Raises: IndexError if the plan names a block outside the pool.
        """
        _check_device(pool)
        dtype = torch.promote_types(query.dtype, pool.dtype)
        device_plan = self._on_device(plan, pool, query.shape[1] // pool.shape[3], dtype)
        if device_plan.smallest_block < 0 or device_plan.largest_block >= len(pool):
            raise IndexError(f"a block id of the plan lies outside the pool's {len(pool)} blocks")
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        partials = empty_partials(plan.num_partials, query)
        attend_items(
            _packed_heads(query.to(dtype)), pool[:, layer], device_plan, scale, softcap, out,
            partials,
        )  # fmt: skip
        merge_partials(partials, device_plan, out)
        return out

    def _on_device(self, plan: Plan, pool: Tensor, group: int, dtype: torch.dtype) -> DevicePlan:
        key = _plan_key(plan, pool, group, dtype)
        if key not in self._plans:
            while len(self._plans) >= _REMEMBERED:
                del self._plans[next(iter(self._plans))]
            tiles = self._tiles(dtype, pool.shape[5], group)
            self._plans[key] = (plan, upload_plan(plan, group, tiles, pool.device))
        return self._plans[key][1]


def _plan_key(plan: Plan, pool: Tensor, group: int, dtype: torch.dtype) -> tuple[int, object]:
    return id(plan), (pool.device, group, pool.shape[5], dtype)


def _check_device(pool: Tensor) -> None:
    if not (pool.is_cuda or INTERPRETED):
        raise ValueError(f"the triton backend needs a pool on a CUDA device, not on {pool.device}")


def _packed_heads(tensor: Tensor) -> Tensor:
    """The tensor itself if elements of its last dimension lie one after the other, else a copy."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()
