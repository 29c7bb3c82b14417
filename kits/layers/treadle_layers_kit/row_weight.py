"""What weights have in common that lie row by row, for libraries that run whole steps of a decoder on a CPU."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ("PIECE", "RowWeight")

PIECE = 1024
"""Outputs that are repacked at a time: a code takes up to eight times its size meanwhile."""


class RowWeight(nn.Module):
    """One weight, ``code · scale + offset``; called with activations, which torch multiplies by all of it, dequantized."""

    def __init__(self, codes: Tensor, scales: Tensor, offsets: Tensor | None = None) -> None:
        """``codes`` are rows ``[out, …]``; ``scales`` and ``offsets`` float32 ``[out, groups]``."""
        super().__init__()
        self.codes = nn.Parameter(codes, requires_grad=False)
        self.scales = nn.Parameter(scales, requires_grad=False)
        self.offsets = None if offsets is None else nn.Parameter(offsets, requires_grad=False)

    def numbers(self) -> Tensor:
        """Return the codes as float32 ``[out, in]``."""
        return self.codes.float()

    def dense(self, dtype: torch.dtype) -> Tensor:
        """Return the weight ``[out, in]``."""
        values = (
            self.numbers().unflatten(1, (self.scales.shape[1], -1)).mul_(self.scales[..., None])
        )
        if self.offsets is not None:
            values.add_(self.offsets[..., None])
        weight: Tensor = values.flatten(1)
        return weight.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        """``[..., in]`` to ``[..., out]``."""
        return F.linear(x, self.dense(x.dtype))
