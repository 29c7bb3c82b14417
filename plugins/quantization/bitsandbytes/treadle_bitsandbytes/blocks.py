"""The four-bit numbers of bitsandbytes: 16 levels, times the largest number of a block.

A byte holds two codes, the first in its upper half. What a code means is a table: NF4 has quantiles of the
normal distribution, FP4 an exponent of two bits and one bit of fraction.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ("BLOCK", "dequantize", "levels", "pairs", "quantize")

BLOCK = 64
"""Numbers of a block that is made while loading."""
NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
FP4 = tuple(value / 12 for value in (0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0))
TABLES = {"nf4": NF4, "fp4": (*FP4, *(-value for value in FP4))}


def levels(type: str) -> Tensor:
    """Return what the codes mean: float32 ``[16]``."""
    return torch.tensor(TABLES[type])


def pairs(type: str) -> Tensor:
    """Return what bytes mean: float32 ``[256, 2]``."""
    table, codes = levels(type), torch.arange(256)
    return torch.stack((table[codes >> 4], table[codes & 15]), dim=1)


def dequantize(packed: Tensor, pairs: Tensor) -> Tensor:
    """uint8 ``[out, in / 2]`` to a new float32 ``[out, in]``, without the scales."""
    return F.embedding(packed.int(), pairs).flatten(1)


def quantize(weight: Tensor, type: str, block: int) -> tuple[Tensor, Tensor]:
    """float32 ``[out, in]`` to the nearest levels: uint8 ``[out, in / 2]``, float32 ``[out, in / block]``."""
    groups = weight.unflatten(1, (-1, block))
    absmax = groups.abs().amax(dim=2)
    numbers = (groups / absmax.clamp_min(torch.finfo(torch.float32).tiny)[..., None]).flatten(1)
    ordered, codes = levels(type).to(weight.device).sort(stable=True)
    middles = (ordered[1:] + ordered[:-1]) / 2
    nearest = codes[torch.bucketize(numbers, middles, out_int32=True)].to(torch.uint8)
    return nearest[:, ::2] << 4 | nearest[:, 1::2], absmax
