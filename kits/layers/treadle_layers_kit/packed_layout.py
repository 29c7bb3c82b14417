"""The one layout in which kernels read weights of four and eight bits, whatever format they come from; its product.

Codes are int16 ``[chunks, out, run]``. A word has four places of four bits or two of eight, and word ``i`` of an
output holds the codes of its inputs ``i``, ``run + i``, … of a chunk, from the lowest bits on. As in
``treadle_layers_kit.int4_layout``, a matrix fragment of words is then, place by place, a fragment of weights
for consecutive inputs. Inputs beyond the last are codes of zero.

What a code of four bits means is one of 16 ``levels``; eight bits are ``int8`` or ``float8_e4m3fn``, which then
stands in the place of the levels.

The weight is ``(number · scale + offset) · factor``. Scales and offsets ``[groups, out]`` are in any type of floats;
scales may be uint8, exponents of two, less 127. Factors are float32 ``[out]``.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = (
    "E2M1",
    "FP8",
    "INT8",
    "PLACES",
    "WHOLE",
    "Levels",
    "codes_of_bytes",
    "pack_words",
    "packed_linear",
    "run_of",
    "scales_in_float",
    "unpack",
    "unpack_words",
)

Levels = tuple[float, ...] | str
INT8, FP8 = "int8", "float8_e4m3fn"
PLACES = (4, 2)
"""Of a word: of four bits, of eight."""
E2M1: Levels = (
    0.0,
    0.5,
    1.0,
    1.5,
    2.0,
    3.0,
    4.0,
    6.0,
    -0.0,
    -0.5,
    -1.0,
    -1.5,
    -2.0,
    -3.0,
    -4.0,
    -6.0,
)
"""The numbers of float4_e2m1."""
WHOLE: Levels = tuple(float(code) for code in range(16))
"""Codes that are their own numbers."""


def run_of(levels: Levels, group: int) -> int | None:
    """The longest run whose inputs are all of one group; ``None``: there is none that kernels take."""
    runs = (64, 32, 16) if isinstance(levels, str) else (32, 16)
    return next((run for run in runs if not group % run), None)


def pack_words(codes: Tensor, levels: Levels, run: int) -> Tensor:
    """Codes ``[out, in]``, 0 to 15 or bytes, to int16 ``[chunks, out, run]``."""
    places = PLACES[isinstance(levels, str)]
    stored = codes.view(torch.uint8) if codes.dtype.itemsize == 1 else codes
    padded = F.pad(stored.to(torch.int32), (0, -codes.shape[1] % (places * run)))
    words = padded.new_zeros(len(codes), padded.shape[1] // (places * run), run)
    for place, piece in enumerate(padded.unflatten(1, (-1, places, run)).unbind(2)):
        words |= piece << (16 // places * place)
    return words.transpose(0, 1).to(torch.int16).contiguous()


def unpack_words(words: Tensor, levels: Levels) -> Tensor:
    """What ``pack_words`` got, as int32 ``[out, in]``, with codes of zero up to the end of the last chunk."""
    places = PLACES[isinstance(levels, str)]
    shifts = torch.arange(0, 16, 16 // places, device=words.device)[:, None]
    stored = words.transpose(0, 1)[:, :, None].int() >> shifts & (1 << 16 // places) - 1
    return stored.flatten(1)


def codes_of_bytes(packed: Tensor, bits: int) -> Tensor:
    """Codes of 1, 2, 4 or 8 bits, the first in the lowest bits of a byte, to uint8 ``[out, in]``."""
    if bits == 8:
        return packed
    shifts = range(0, 8, bits)
    codes: Tensor = torch.stack([(packed >> s) & ((1 << bits) - 1) for s in shifts], dim=-1)
    return codes.flatten(1)


def scales_in_float(scales: Tensor) -> Tensor:
    """float32 of any scales."""
    return (scales.view(torch.float8_e8m0fnu) if scales.dtype is torch.uint8 else scales).float()


def unpack(
    codes: Tensor,
    scales: Tensor | None,
    offsets: Tensor | None,
    factors: Tensor | None,
    levels: Levels,
    inputs: int,
    group: int,
) -> Tensor:
    """The weight in float32 ``[out, inputs]``."""
    stored = unpack_words(codes, levels)
    if isinstance(levels, str):
        numbers = stored.to(torch.uint8).view(getattr(torch, levels)).float()
    else:
        # Made on the device: a table would be a copy from the host, which no CUDA graph may hold.
        numbers = torch.zeros_like(stored, dtype=torch.float32)
        for code, level in enumerate(levels):
            numbers.masked_fill_(stored == code, level)
    numbers = numbers[:, :inputs]
    if scales is not None:
        numbers = numbers * _spread(scales_in_float(scales), group, inputs)
    if offsets is not None:
        numbers = numbers + _spread(offsets, group, inputs)
    return numbers if factors is None else numbers * factors[:, None]


def _spread(steps: Tensor, group: int, inputs: int) -> Tensor:
    return steps.t().repeat_interleave(group, 1)[:, :inputs]


def packed_linear(
    x: Tensor,
    codes: Tensor,
    scales: Tensor | None,
    offsets: Tensor | None,
    factors: Tensor | None,
    levels: Levels,
    inputs: int,
    group: int,
) -> Tensor:
    """The operation of ``treadle_layers_kit.kernel_ops``, by torch's own: the weight is unpacked each time."""
    weight = unpack(codes, scales, offsets, factors, levels, inputs, group)
    return F.linear(x, weight.to(x.dtype))
