"""Arrays on their way to a device."""

from typing import Any

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from prefixkv.kernels.upload import upload_array, upload_arrays

CPU = torch.device("cpu")
DTYPES = st.sampled_from([np.int32, np.int64, np.float32, np.float64])
SHAPES = st.sampled_from([(0,), (1,), (3,), (16,), (0, 8), (5, 8), (2, 1, 3)])


@given(st.lists(st.tuples(DTYPES, SHAPES), max_size=9))
def test_all_arrive_whole_and_aligned(kinds: list[tuple[type, tuple[int, ...]]]) -> None:
    """Values, shapes and dtypes; and addresses for which kernels are compiled once."""
    draw = np.random.default_rng(0)
    arrays: list[NDArray[Any]] = [
        draw.integers(-(2**31), 2**31, shape).astype(dtype) for dtype, shape in kinds
    ]
    for array, tensor in zip(arrays, upload_arrays(arrays, CPU), strict=True):
        assert tensor.numpy().dtype == array.dtype
        np.testing.assert_array_equal(tensor.numpy(), array)
        assert tensor.storage_offset() * tensor.itemsize % 16 == 0
        assert tensor.is_contiguous()


def test_views_arrive_as_what_they_show() -> None:
    """Columns of a matrix are not contiguous."""
    matrix = np.arange(12, dtype=np.int32).reshape(3, 4)
    assert upload_array(matrix[:, 1], CPU).tolist() == [1, 5, 9]


def test_later_changes_do_not_show() -> None:
    """The transfer may be under way while the host goes on."""
    array = np.arange(4)
    tensor = upload_array(array, CPU)
    array[:] = 7
    assert tensor.tolist() == [0, 1, 2, 3]
