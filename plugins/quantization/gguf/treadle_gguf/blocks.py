"""What the blocks of each type mean: uint8 ``[..., bytes of a block]`` to codes and their steps.

A block has float16 scales and minima. In a block of 256, groups of 16 or 32 numbers have small scales of
their own, which are packed in 4 or 6 bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = (
    "LEVELS",
    "MIDDLES",
    "ROWS",
    "Codes",
    "damage",
    "dequantize",
    "dequantize_rows",
    "levels",
    "read",
)

ROWS = 1024
"""Rows that are read at a time, so that what is made of them stays in caches."""

# The levels of IQ4, which lie closer together around zero.
LEVELS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
MIDDLES = {
    **dict.fromkeys(("Q4_0", "Q4_1", "Q4_K"), 8),
    **dict.fromkeys(("Q5_0", "Q5_1", "Q5_K"), 16),
    "Q2_K": 2,
    "Q3_K": 4,
    "Q6_K": 32,
    "Q8_0": 0,
}
"""The codes around which those of a type lie; of those without minima they are the zero."""
# Where the float16 numbers of a block begin.
PLACES = {
    **dict.fromkeys(("Q4_0", "Q5_0", "Q8_0", "IQ4_NL", "IQ4_XS"), (0,)),
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q6_K": (208,),
}


class Codes(NamedTuple):
    """Numbers of blocks: codes less the middle of their type, or the levels of codes, times ``scale``; or, with minima,
    ``code · scale - minimum``.

    ``codes`` are uint8 (of Q8_0 int8) ``[..., numbers]``, ``scale`` and ``minimum`` float32 ``[..., groups]``.
    """

    codes: Tensor
    scale: Tensor
    minimum: Tensor | None = None


def read(blocks: Tensor, type: str) -> Codes:
    """Return the codes of blocks of a type, and their steps."""
    return READERS[type](blocks)


def dequantize(blocks: Tensor, type: str, levels: Tensor) -> Tensor:
    """Return the numbers of blocks of a type, float32 ``[..., numbers]``.

    ``levels`` are those of ``levels()`` on their device.
    """
    codes, scale, minimum = read(blocks, type)
    if type not in MIDDLES:
        numbers = levels[codes.long()]
    else:
        numbers = codes.float() if minimum is not None else codes.float() - MIDDLES[type]
    groups = numbers.unflatten(-1, (scale.shape[-1], -1)) * scale[..., None]
    return torch.flatten(groups if minimum is None else groups - minimum[..., None], -2)


def dequantize_rows(blocks: Tensor, type: str, levels: Tensor) -> Tensor:
    """Return the same of ``[..., blocks, bytes]`` in one dimension less, ``[..., numbers]``.

    Some rows at a time, if there are any: intermediate results are several times as large.
    """
    if blocks.dim() < 3:
        return dequantize(blocks, type, levels).flatten(-2)
    first, *pieces = blocks.split(ROWS)
    found = dequantize(first, type, levels).flatten(-2)
    numbers = found.new_empty(len(blocks), *found.shape[1:])
    numbers[: len(first)] = found
    for index, piece in enumerate(pieces, 1):
        numbers[index * ROWS :][: len(piece)] = dequantize(piece, type, levels).flatten(-2)
    return numbers


def levels() -> Tensor:
    """Return the levels of IQ4: a tensor to keep, because a CUDA graph holds no copy from the host."""
    return torch.tensor(LEVELS, dtype=torch.float32)


def damage(blocks: Tensor, type: str) -> str | None:
    """Return what is wrong with the blocks of a tensor: only with their float16 numbers anything can be."""
    numbers = torch.cat([_half(blocks, place) for place in PLACES[type]], dim=-1)
    if not numbers.isfinite().all():
        return "scales that are NaN or infinite"
    if not numbers.any():
        return "no scale but 0, so that nothing would be left of it"
    return None


def _half(blocks: Tensor, place: int) -> Tensor:
    """float32 ``[..., 1]``."""
    return blocks[..., place : place + 2].contiguous().view(torch.float16).float()


def _parts(codes: Tensor, bits: int, run: int) -> Tensor:
    """Codes ``[..., bytes]`` of a few bits: of each ``run`` bytes first all lowest bits, then the next."""
    mask, size = (1 << bits) - 1, 4 if run % 4 == 0 else 1
    words = codes.unflatten(-1, (-1, run)).clone(memory_format=torch.contiguous_format)
    if size == 4:  # four bytes at a time
        words, mask = words.view(torch.int32), mask * 0x01010101
    pieces = torch.stack([words >> shift & mask for shift in range(0, 8, bits)], dim=-2)
    return pieces.view(torch.uint8).flatten(-3)


def _high_bits(blocks: Tensor, place: int) -> Tensor:
    """32 single bits in 4 bytes, as 16."""
    shifts = torch.arange(8, dtype=torch.uint8, device=blocks.device)
    bits = blocks[..., place : place + 4, None].bitwise_right_shift(shifts).bitwise_and_(1)
    return bits.flatten(-2).bitwise_left_shift_(4)


def _q4_0(blocks: Tensor) -> Codes:
    return Codes(_parts(blocks[..., 2:], 4, 16), _half(blocks, 0))


def _q4_1(blocks: Tensor) -> Codes:
    return Codes(_parts(blocks[..., 4:], 4, 16), _half(blocks, 0), -_half(blocks, 2))


def _q5_0(blocks: Tensor) -> Codes:
    codes = _parts(blocks[..., 6:], 4, 16) | _high_bits(blocks, 2)
    return Codes(codes, _half(blocks, 0))


def _q5_1(blocks: Tensor) -> Codes:
    codes = _parts(blocks[..., 8:], 4, 16) | _high_bits(blocks, 4)
    return Codes(codes, _half(blocks, 0), -_half(blocks, 2))


def _q8_0(blocks: Tensor) -> Codes:
    return Codes(blocks[..., 2:].contiguous().view(torch.int8), _half(blocks, 0))


def _q2_k(blocks: Tensor) -> Codes:
    small = blocks[..., :16]
    codes = _parts(blocks[..., 16:80], 2, 32)
    return Codes(codes, (small & 15) * _half(blocks, 80), (small >> 4) * _half(blocks, 82))


def _q3_k(blocks: Tensor) -> Codes:
    masks, low, packed = blocks[..., :32], blocks[..., 32:96], blocks[..., 96:108]
    small = _parts(packed[..., :8], 4, 8) | _parts(packed[..., 8:], 2, 4) << 4
    codes = _parts(low, 2, 32) | _parts(masks, 1, 32) << 2
    return Codes(codes, (small.float() - 32) * _half(blocks, 108))


def _six_bits(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Eight scales and eight minima of 6 bits in 12 bytes."""
    first, second, third = packed.split(4, dim=-1)
    scale = torch.cat((first & 63, third & 15 | first >> 2 & 48), dim=-1)
    minimum = torch.cat((second & 63, third >> 4 | second >> 2 & 48), dim=-1)
    return scale, minimum


def _q4_k(blocks: Tensor) -> Codes:
    scale, minimum = _six_bits(blocks[..., 4:16])
    codes = _parts(blocks[..., 16:], 4, 32)
    return Codes(codes, scale * _half(blocks, 0), minimum * _half(blocks, 2))


def _q5_k(blocks: Tensor) -> Codes:
    scale, minimum = _six_bits(blocks[..., 4:16])
    codes = _parts(blocks[..., 48:], 4, 32) | _parts(blocks[..., 16:48], 1, 32) << 4
    return Codes(codes, scale * _half(blocks, 0), minimum * _half(blocks, 2))


def _q6_k(blocks: Tensor) -> Codes:
    codes = _parts(blocks[..., :128], 4, 64) | _parts(blocks[..., 128:192], 2, 32) << 4
    small = blocks[..., 192:208].contiguous().view(torch.int8)
    return Codes(codes, small * _half(blocks, 208))


def _iq4_nl(blocks: Tensor) -> Codes:
    return Codes(_parts(blocks[..., 2:], 4, 16), _half(blocks, 0))


def _iq4_xs(blocks: Tensor) -> Codes:
    small = _parts(blocks[..., 4:8], 4, 1) | _parts(blocks[..., 2:4], 2, 1) << 4
    return Codes(_parts(blocks[..., 8:], 4, 16), (small.float() - 32) * _half(blocks, 0))


READERS: dict[str, Callable[[Tensor], Codes]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
}
