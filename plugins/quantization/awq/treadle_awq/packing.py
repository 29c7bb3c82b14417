"""The ``gemm`` packing of AutoAWQ.

``qweight`` int32 ``[in, out / 8]`` and ``qzeros`` int32 ``[in / group, out / 8]``: the nibbles of a
word, from the lowest, are the columns 0, 2, 4, 6, 1, 3, 5, 7 of its eight. ``scales`` float16
``[in / group, out]``. The weight is ``(code - zero) · scale``, transposed.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ("dequantize", "pack", "unpack")


def unpack(packed: Tensor) -> Tensor:
    """int32 ``[rows, out / 8]`` to int32 ``[rows, out]`` of codes 0 to 15."""
    # Computed on the device: a table would be a copy from the host, which no CUDA graph may hold.
    column = torch.arange(8, dtype=torch.int32, device=packed.device)
    shift = ((column >> 1) + (column & 1) * 4) * 4
    codes = torch.bitwise_right_shift(packed[..., None], shift).bitwise_and(15)
    return codes.flatten(-2)


def pack(codes: Tensor) -> Tensor:
    """The inverse of ``unpack``: int ``[rows, out]`` of codes 0 to 15 to int32 ``[rows, out / 8]``."""
    column = torch.arange(8, dtype=torch.int32, device=codes.device)
    shift = ((column >> 1) + (column & 1) * 4) * 4
    nibbles = codes.to(torch.int32).unflatten(1, (-1, 8)) << shift
    # Nibbles do not overlap, so that a sum is an or.
    words: Tensor = nibbles.sum(-1, dtype=torch.int32)
    return words


def dequantize(
    qweight: Tensor, scales: Tensor, zeros: Tensor, group: int, dtype: torch.dtype
) -> Tensor:
    """The weight ``[in, out]`` in ``dtype``; ``scales`` and ``zeros`` are ``[in / group, out]``."""
    codes: Tensor = unpack(qweight).to(scales.dtype).unflatten(0, (-1, group))
    return codes.sub_(zeros[:, None]).mul_(scales[:, None]).flatten(0, 1).to(dtype)
