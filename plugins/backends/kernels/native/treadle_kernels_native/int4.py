"""Weights in four bits, made while loading: ``--quantization int4`` on a CPU.

Groups of 64 inputs share a scale. A matrix whose inputs are no multiple of 128 is kept in eight bits.
The library rounds activations to eight bits, row by row; torch multiplies with the dequantized weight.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from treadle.api.models import LinearMethod, LinearSpec
from treadle_kernels_native.int8 import HEADS, ROWS, Int8Linear, Int8Scheme, RoundedLinear
from treadle_layers_kit.quantized import is_layer_skipped

__all__ = ("GROUP", "Int4Linear", "Int4Scheme", "dequantize", "quantize", "scaled_sums")

GROUP = 64
BLOCK = 2 * GROUP
"""A byte has the code of an input in its lower half, and that of the input of the next group in its upper half."""


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes uint8 ``[out, in / 2]``, as ``TN_INT4`` of ``csrc/abi.h`` has them, and scales float32 ``[out, in / 64]``.

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
        codes[rows] = (numbers[:, ::2] & 15 | numbers[:, 1::2] << 4).flatten(1)
        scales[rows] = scale[..., 0]
    return codes, scales


def _numbers(codes: Tensor) -> Tensor:
    """Return int8 ``[out, in / 64, 64]``, from -8 to 7."""
    pairs = codes.view(torch.int8).unflatten(1, (-1, 1, GROUP))
    return torch.cat([pairs << 4 >> 4, pairs >> 4], dim=2).flatten(1, 2)


def dequantize(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the weight ``[out, in]``."""
    return (_numbers(codes).to(dtype) * scales[..., None].to(dtype)).flatten(1)


def scaled_sums(codes: Tensor, scales: Tensor) -> Tensor:
    """Return float32 ``[out]``, what the library takes off because it adds 128 to activations."""
    pairs = zip(codes.split(ROWS), scales.split(ROWS), strict=True)
    return torch.cat([(_numbers(c).sum(2, dtype=torch.int32) * s).sum(1) for c, s in pairs])


class Int4Linear(RoundedLinear):
    """Its module has ``weight`` uint8 ``[out, in / 2]`` and ``weight_scale`` ``[out, in / 64]``."""

    def quantize(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        return quantize(weight)

    def apply(self, module: Any, x: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, dequantize(module.weight, module.weight_scale, x.dtype), bias)


class Int4Scheme(Int8Scheme):
    """Every linear layer in four bits, except the output head."""

    name = "int4"

    def linear_method(self, spec: LinearSpec) -> LinearMethod | None:
        if is_layer_skipped(spec, HEADS):
            return None
        return Int8Linear() if spec.in_features % BLOCK else Int4Linear()
