"""Tensors as kernels take them."""

from __future__ import annotations

from torch import Tensor

__all__ = ("flatten_rows",)


def flatten_rows(x: Tensor) -> Tensor:
    """``[..., size]`` as ``[rows, size]`` with dense rows, whose distance may be anything."""
    rows = x.reshape(x.numel() // x.shape[-1], x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()
