"""Blocks as weights of ``packed_linear``: four bits where codes have no more, and bytes for five, six and eight."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from treadle_gguf.blocks import LEVELS, MIDDLES, read
from treadle_layers_kit.packed import PackedWeight
from treadle_layers_kit.packed_layout import INT8, Levels

__all__ = ("NumbersPart", "pack_blocks")

BYTES = ("Q5_0", "Q5_1", "Q5_K", "Q6_K", "Q8_0")
"""Types whose codes become int8."""
ROWS = 1024
"""Outputs whose steps are read at a time: their codes come with them."""


class NumbersPart(nn.Module):
    """A matrix of numbers among others that are packed."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """``[..., in]`` to ``[..., out]``."""
        return F.linear(x, self.weight)


def pack_blocks(blocks: Tensor, type: str, inputs: int, dtype: torch.dtype) -> PackedWeight | None:
    """Return the weight of blocks ``[out, blocks, bytes]``; ``None`` where no kernel takes activations of ``dtype``."""
    if not PackedWeight.takes(blocks.device, dtype):
        return None
    middle = MIDDLES.get(type, 0)
    scales, offsets = _steps(blocks, type, middle)

    def rows(begin: int, end: int) -> Tensor:
        codes = read(blocks[begin:end], type).codes.flatten(1)
        return (codes.to(torch.int8) - middle) if type in BYTES else codes

    return PackedWeight.pack(
        rows,
        scales,
        inputs // scales.shape[1],
        inputs,
        dtype,
        _levels(type, middle),
        offsets=offsets,
    )


def _steps(blocks: Tensor, type: str, middle: int) -> tuple[Tensor, Tensor | None]:
    """float32 ``[out, groups]`` of numbers whose middle is 0: ``number · scale + offset``."""
    pieces = [read(piece, type)[1:] for piece in blocks.split(ROWS)]
    scales = torch.cat([scale for scale, _ in pieces]).flatten(1)
    minima = [minimum for _, minimum in pieces if minimum is not None]
    return scales, middle * scales - torch.cat(minima).flatten(1) if minima else None


def _levels(type: str, middle: int) -> Levels:
    if type in BYTES:
        return INT8
    return (
        tuple(float(code - middle) for code in range(16))
        if type in MIDDLES
        else tuple(map(float, LEVELS))
    )
