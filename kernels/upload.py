"""Host arrays to the device, several in one copy that nobody waits for."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_ALIGNMENT = 16  # bytes; a pointer that is aligned differently would compile kernels anew


def upload_arrays(arrays: Sequence[NDArray[Any]], device: torch.device) -> list[Tensor]:
    """Copy arrays to the device, in one transfer; later changes of an array do not show.

    On a CUDA device the host goes on at once: the transfer starts from pinned memory of its own,
    which torch takes again when it has ended.

    Args:
        arrays: int32, int64, float32 or float64; of any shape.
    """
    sizes = [-(-array.nbytes // _ALIGNMENT) * _ALIGNMENT for array in arrays]
    firsts = [0, *accumulate(sizes)]
    staged = _stage(arrays, firsts, pinned=device.type == "cuda")
    sent = staged.to(device, non_blocking=True)
    return [
        sent[first : first + array.nbytes].view(_torch_dtype(array)).view(array.shape)
        for array, first in zip(arrays, firsts[:-1], strict=True)
    ]


def upload_array(array: NDArray[Any], device: torch.device) -> Tensor:
    """Copy one array; see `upload_arrays`."""
    return upload_arrays([array], device)[0]


def upload_ids(ids: Sequence[int], device: torch.device) -> Tensor:
    """Copy integers as int64 [len(ids)]; see `upload_arrays`."""
    return upload_array(np.array(ids, np.int64), device)


def _stage(arrays: Sequence[NDArray[Any]], firsts: Sequence[int], *, pinned: bool) -> Tensor:
    """Return uint8 [firsts[-1]] with the bytes of each array from its place in `firsts` on."""
    staged = torch.empty(firsts[-1], dtype=torch.uint8, pin_memory=pinned)
    host = staged.numpy()
    for array, first in zip(arrays, firsts[:-1], strict=True):
        host[first : first + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return staged


def _torch_dtype(array: NDArray[Any]) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, array.dtype.name)
    return dtype
