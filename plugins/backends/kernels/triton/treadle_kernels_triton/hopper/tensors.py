"""What TMA fetches and writes: which matrices it can, and their descriptors."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

__all__ = ("boxes", "fetchable")


def fetchable(matrix: Tensor, dtype: torch.dtype) -> bool:
    """Whether TMA can fetch it: its rows begin at multiples of 16 bytes, and do not overlap."""
    across, along = matrix.stride()
    apart = along == 1 and across >= matrix.shape[1] and across % 8 == 0
    return matrix.dtype == dtype and apart and matrix.data_ptr() % 16 == 0


def boxes(tensor: Tensor, shape: Sequence[int]) -> object:
    """A descriptor of 16-bit numbers, which are fetched or written in boxes of ``shape``."""
    # Here, for Gluon is an experiment of Triton's: it may be gone, and that hurts nobody else.
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    form = layout(2 * shape[-1], len(shape))
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), list(shape), form)


@cache
def layout(width: int, rank: int) -> object:
    """Of a box in shared memory, whose rows are ``width`` bytes."""
    from triton.experimental.gluon import language as gl

    return gl.NVMMASharedLayout(width, 16, rank)
