"""Weights in eight bits row by row, as libraries read them that run whole steps of a decoder on a CPU."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ("RowBytes",)

PIECE = 1024
"""Outputs that are repacked at a time: a code takes up to eight times its size meanwhile."""


class RowBytes(nn.Module):
    """One weight, ``code · scale + offset``; called like ``RowInt4``, which torch does by dequantizing all of it."""

    def __init__(
        self,
        codes: Tensor,
        scales: Tensor,
        offsets: Tensor | None = None,
        *,
        rounds_inputs: bool = True,
    ) -> None:
        """``codes`` int8 or float8_e4m3fn ``[out, in]``; ``scales`` and ``offsets`` float32 ``[out, groups]``.

        ``rounds_inputs``: activations may be rounded to eight bits where that makes a product of whole numbers.
        """
        super().__init__()
        self.codes = nn.Parameter(codes, requires_grad=False)
        self.scales = nn.Parameter(scales, requires_grad=False)
        self.offsets = None if offsets is None else nn.Parameter(offsets, requires_grad=False)
        self.rounds_inputs = rounds_inputs

    @classmethod
    def pack(
        cls,
        rows: Callable[[int, int], Tensor],
        inputs: int,
        scales: Tensor,
        offsets: Tensor | None = None,
        *,
        dtype: torch.dtype = torch.int8,
        rounds_inputs: bool = True,
    ) -> RowBytes:
        """``rows`` of a first and a last + 1 are codes ``[rows, in]`` of ``dtype``; the others are ``[out, groups]``."""
        out = len(scales)
        codes = torch.empty(out, inputs, dtype=dtype)
        for first in range(0, out, PIECE):
            codes[first : first + PIECE] = rows(first, min(first + PIECE, out))
        offsets = None if offsets is None else offsets.float().contiguous()
        return cls(codes, scales.float().contiguous(), offsets, rounds_inputs=rounds_inputs)

    @property
    def group(self) -> int:
        """Inputs that share a scale."""
        return self.codes.shape[1] // self.scales.shape[1]

    def dense(self, dtype: torch.dtype) -> Tensor:
        """Return the weight ``[out, in]``."""
        values = self.codes.float().unflatten(1, (-1, self.group)).mul_(self.scales[..., None])
        if self.offsets is not None:
            values.add_(self.offsets[..., None])
        weight: Tensor = values.flatten(1)
        return weight.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        """``[..., in]`` to ``[..., out]``."""
        return F.linear(x, self.dense(x.dtype))
