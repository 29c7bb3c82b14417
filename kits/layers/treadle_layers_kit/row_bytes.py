"""Weights in eight bits row by row, as libraries read them that run whole steps of a decoder on a CPU."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from treadle_layers_kit.row_weight import PIECE, RowWeight

__all__ = ("RowBytes",)


class RowBytes(RowWeight):
    """One weight of bytes."""

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
        super().__init__(codes, scales, offsets)
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
