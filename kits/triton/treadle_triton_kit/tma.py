"""What TMA reads and writes: which matrices it accepts, and tensor descriptors."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

__all__ = ("is_tma_readable", "tensor_descriptor")


def is_tma_readable(matrix: Tensor, dtype: torch.dtype) -> bool:
    """Return whether TMA can read ``matrix``, of 16-bit ``dtype``.

    Its rows begin at multiples of 16 bytes and do not overlap.
    """
    row_stride, column_stride = matrix.stride()
    dense = column_stride == 1 and row_stride >= matrix.shape[1] and row_stride % 8 == 0
    return matrix.dtype == dtype and dense and matrix.data_ptr() % 16 == 0


def tensor_descriptor(tensor: Tensor, block_shape: Sequence[int]) -> object:
    """Return a descriptor of 16-bit numbers, which are read or written in ``block_shape``."""
    # Imported here because Gluon is experimental: without it, all other kernels still work.
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    layout = _shared_layout(2 * block_shape[-1], len(block_shape))
    shape, strides = list(tensor.shape), list(tensor.stride())
    return TensorDescriptor(tensor, shape, strides, list(block_shape), layout)


@cache
def _shared_layout(row_bytes: int, rank: int) -> object:
    """Return the layout of a block in shared memory, whose rows are ``row_bytes`` wide."""
    from triton.experimental.gluon import language as gl

    return gl.NVMMASharedLayout(row_bytes, 16, rank)
