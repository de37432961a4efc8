"""The interface of attention backends, and which one serves a dtype on a device."""

from collections.abc import Sequence
from typing import Any, Literal, Protocol

import torch
from numpy.typing import NDArray
from torch import Tensor

from prefixkv.kernels.cpu import CpuBackend
from prefixkv.kernels.plan import Plan
from prefixkv.kernels.plan_options import PlanOptions
from prefixkv.kernels.reference import ReferenceBackend

BackendName = Literal["auto", "cpu", "reference", "triton"]


class AttentionBackend(Protocol):
    """Writes, copies and reads the pool of K and V.

    `pool` is always the whole tensor, C-contiguous,
    [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]; index 2 tells K (0) from V (1).
    """

    @property
    def name(self) -> str:
        """What `get_backend` calls it."""
        ...

    def supports(
        self, dtype: torch.dtype, head_dim: int, num_heads: int, num_kv_heads: int
    ) -> str | None:
        """None if it can serve a model of these sizes, else the reason in a sentence.

        Args:
            dtype: of the pool.
            num_heads: query heads.
        """
        ...

    def plan_options(
        self, dtype: torch.dtype, head_dim: int, num_heads: int, num_kv_heads: int, block_size: int
    ) -> PlanOptions | None:
        """How plans for a model of these sizes are best cut; None: one run per sequence.

        Any plan gives right results; these options make it fast.
        """
        ...

    def upload(
        self, pool: Tensor, num_heads: int, plans: Sequence[Plan], arrays: Sequence[NDArray[Any]]
    ) -> list[Tensor]:
        """Bring a step to the pool's device in one copy: arrays, and what it reads of the plans.

        Any plan can be attended by without this; it then costs copies of its own.

        Args:
            num_heads: query heads of all that will attend.
            plans: must not change as long as they are attended by.
            arrays: see `upload_arrays`.

        Returns: the arrays, on the device.
        """
        ...

    def write_kv(self, pool: Tensor, layer: int, key: Tensor, value: Tensor, slots: Tensor) -> None:
        """Write new tokens into their slots of one layer; nothing else of the pool changes.

        Args:
            key, value: [num_tokens, num_kv_heads, head_dim], dtype of the pool.
            slots: int64 [num_tokens], block_id * block_size + offset; no slot twice.

        Raises: IndexError if a slot lies outside the pool; nothing was written then. (Slots on a
            GPU are not looked at: a backend may skip those outside the pool instead.)
        """
        ...

    def attend(self, pool: Tensor, layer: int, query: Tensor, plan: Plan, scale: float) -> Tensor:
        """Causal attention of the plan's rows to the slots that it names; reads no other slot.

        Args:
            query: [num_tokens, num_heads, head_dim].
            scale: what q . k is multiplied with before the softmax.

        Returns: [num_tokens, num_heads, head_dim], dtype of `query`; accumulated in float32 or
            better.
        """
        ...

    def copy_blocks(self, pool: Tensor, pairs: Sequence[tuple[int, int, int]]) -> None:
        """Copy K and V of all layers between blocks, as if one pair after the other.

        Args:
            pairs: (src, dst, num_slots); the first num_slots slots of block src go to block dst,
                its other slots stay as they are. A dst may be a later src, and the other way round.

        Raises: IndexError if a pair lies outside the pool.
        """
        ...


def get_backend(
    name: BackendName,
    dtype: torch.dtype,
    device: torch.device | None = None,
    *,
    batch_invariant: bool = False,
) -> AttentionBackend:
    """Return the named backend, or with "auto" the fastest one that takes pools of `dtype` there.

    On a CUDA device that is "triton", and "reference" for float64; "cpu" reads pools on the CPU
    only, and "triton" reads those where the environment holds TRITON_INTERPRET=1, for tests.

    Args:
        device: of the pool; None is the CPU.
        batch_invariant: with plans made by its `plan_options`, a row's result has the same bits
            whatever else is in the step. The reference computes each row alone anyway.

    Raises: ValueError for an unknown name, a dtype that the named backend cannot take, or a backend
        that cannot run there.
    """
    if name not in ("auto", "cpu", "reference", "triton"):
        raise ValueError(f"backend {name!r} is none of 'auto', 'cpu', 'reference', 'triton'")
    on_cpu = device is None or device.type == "cpu"
    if name == "auto" and not on_cpu:
        name = "reference" if dtype == torch.float64 else "triton"
    if name == "triton":
        return _triton_backend(on_cpu, batch_invariant)
    if name == "reference" or (name == "auto" and dtype not in CpuBackend.DTYPES):
        return ReferenceBackend()
    if not on_cpu:
        raise ValueError(f"the cpu backend cannot read a pool on {device}; use 'triton'")
    if dtype not in CpuBackend.DTYPES:
        raise ValueError(
            f"the cpu backend takes float32 and bfloat16, not {dtype}; use 'reference'"
        )
    return CpuBackend(batch_invariant=batch_invariant)


def _triton_backend(on_cpu: bool, batch_invariant: bool) -> AttentionBackend:
    try:  # imported here because not every machine has it
        from prefixkv.kernels.triton_backend import INTERPRETED, TritonBackend
    except ImportError as error:
        raise ValueError(f"the triton backend cannot be imported: {error}") from None
    if on_cpu and not INTERPRETED:
        raise ValueError(
            "the triton backend needs a CUDA device, or TRITON_INTERPRET=1 set before Python starts"
        )
    return TritonBackend(batch_invariant=batch_invariant)
