"""Weights in four bits, made while loading: ``--quantization int4`` on a CPU.

Groups of 64 inputs share a scale. A matrix whose inputs are no multiple of 128 is kept in eight bits.
The library rounds activations to eight bits, row by row; where it was not built, torch multiplies with the dequantized
weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from treadle.api.models import LinearMethod, LinearSpec
from treadle_kernels_native.int8 import HEADS, ROWS, Int8Linear, Int8Scheme, RoundedLinear
from treadle_kernels_native.structs import Levels
from treadle_layers_kit.quantized import is_layer_skipped
from treadle_layers_kit.row_int4 import BLOCK, RUN, RowInt4, pack_rows, unpack_rows

__all__ = (
    "GROUP",
    "Int4Linear",
    "Int4Scheme",
    "byte_sums",
    "levels_struct",
    "number_sums",
    "quantize",
    "scaled_sums",
)

GROUP = 64
LOW_NIBBLES, ALL_BYTES = 0x0F0F0F0F0F0F0F0F, 0x0101010101010101


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the codes and the scales of a ``RowInt4``.

    The input with the largest magnitude of a group becomes the code -8, the only one of its size.
    """
    out, size = weight.shape
    codes = torch.empty(out, size // 2, dtype=torch.uint8)
    scales = torch.empty(out, size // GROUP)
    for start in range(0, out, ROWS):
        rows = slice(start, start + ROWS)
        groups = weight[rows].float().unflatten(1, (-1, GROUP))
        largest = groups.gather(2, groups.abs().argmax(2, keepdim=True))
        scale = largest / -8
        inverse = torch.where(scale == 0, 0, 1 / scale)
        numbers = (groups * inverse).round_().clamp_(-8, 7).to(torch.int8).view(torch.uint8)
        codes[rows] = pack_rows(numbers.flatten(1))
        scales[rows] = scale[..., 0]
    return codes, scales


def levels_struct(levels: Sequence[float]) -> Levels:
    """Return levels as the library reads them. Their multiples of a unit are exact where a byte can hold them."""
    rounded = max(map(abs, levels)) / 127
    unit = next((unit for unit in (1.0, 0.5) if _holds(levels, unit)), rounded)
    return Levels((*levels,), tuple(round(level / unit) for level in levels), unit)


def _holds(levels: Sequence[float], unit: float) -> bool:
    return all(abs(n / unit) <= 127 and n / unit == round(n / unit) for n in levels)


def scaled_sums(codes: Tensor, scales: Tensor, levels: Sequence[int] | None = None) -> Tensor:
    """Return float32 ``[out]``, what the library takes off because it adds 128 to activations.

    ``levels`` are what codes from 0 to 15 mean.
    """
    group = 2 * codes.shape[1] // scales.shape[1]
    if levels is None:
        sums = [number_sums(piece, group) for piece in codes.split(ROWS)]
    else:
        table = torch.tensor(list(levels), dtype=torch.int8)
        numbers = (table[(unpack_rows(piece) & 15).long()] for piece in codes.split(ROWS))
        sums = [piece.unflatten(1, (-1, group)).sum(2) for piece in numbers]
    return (torch.cat(sums) * scales).sum(1)


def number_sums(codes: Tensor, group: int) -> Tensor:
    """Return int64 ``[out, groups]``, the sums of codes that are numbers, eight at a time: 0 to 15 each, eight of them fit
    into a byte, and a product adds the bytes of a word up in its highest one."""
    words = (codes ^ 0x88).view(torch.int64).unflatten(1, (-1, 1, RUN // 8))
    nibbles = torch.cat([words & LOW_NIBBLES, words >> 4 & LOW_NIBBLES], dim=2)
    sums = (nibbles * ALL_BYTES >> 56).flatten(1)
    counted: Tensor = sums.unflatten(1, (-1, group // 8)).sum(2) - 8 * group
    return counted


def byte_sums(codes: Tensor, scales: Tensor) -> Tensor:
    """Return what ``scaled_sums`` returns, of int8 codes ``[out, in]``."""
    group = codes.shape[1] // scales.shape[1]
    sums = [c.unflatten(1, (-1, group)).sum(2) for c in codes.split(ROWS)]
    return (torch.cat(sums) * scales).sum(1)


class Int4Linear(RoundedLinear):
    """Its module has a ``RowInt4``, ``int4``."""

    def replace(self, module: nn.Module, weight: Tensor) -> None:
        module.add_module("int4", RowInt4(*quantize(weight)))

    def dense(self, module: Any, dtype: torch.dtype) -> Tensor:
        weight: Tensor = module.int4.dense(dtype)
        return weight


class Int4Scheme(Int8Scheme):
    """Every linear layer in four bits, except the output head."""

    name = "int4"

    def linear_method(self, spec: LinearSpec) -> LinearMethod | None:
        if is_layer_skipped(spec, HEADS):
            return None
        kind = Int8Linear if spec.in_features % BLOCK else Int4Linear
        return kind(self._native)
