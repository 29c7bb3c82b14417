"""Linear layers as the library reads them: structs that point to the module's own tensors."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from treadle_kernels_native.int4 import byte_sums, levels_struct, scaled_sums
from treadle_kernels_native.int8 import row_sums
from treadle_kernels_native.structs import Format, Linear
from treadle_layers_kit.dequantized import REPACKED
from treadle_layers_kit.packed import NumbersPart
from treadle_layers_kit.row_bytes import RowBytes
from treadle_layers_kit.row_int4 import RowInt4
from treadle_layers_kit.row_packing import ORDER

__all__ = ("FORMATS", "LinearStructs", "bias_of", "row_weight")

FORMATS = {torch.float32: Format.FLOAT32, torch.bfloat16: Format.BFLOAT16}


class LinearStructs:
    """Describes linear layers, and keeps alive what the structs point to."""

    def __init__(self) -> None:
        self.kept: list[Any] = []

    def int8(self, codes: Tensor, scales: Tensor, bias: Tensor | None) -> Linear:
        """Describe a weight of codes int8 ``[out, in]`` with scales ``[out]``."""
        return Linear(
            weight=self.address(codes),
            bias=self.address(bias),
            scales=self.address(scales),
            sums=self.address(row_sums(codes)),
            n=codes.shape[0],
            k=codes.shape[1],
            format=Format.INT8,
        )

    def _int4(self, weight: RowInt4, order: Tensor | None, bias: Tensor | None) -> Linear:
        levels, multiples, unit = None, None, 1.0
        if weight.levels is not None:
            struct = levels_struct(weight.levels)
            self.kept.append(struct)
            levels, multiples, unit = ctypes.addressof(struct), list(struct.multiples), struct.unit
        sums = scaled_sums(weight.codes, weight.scales, multiples).mul_(unit)
        return Linear(
            weight=self.address(weight.codes),
            bias=self.address(bias),
            scales=self.address(weight.scales),
            offsets=self.address(weight.offsets),
            sums=self.address(sums),
            order=self.address(None if order is None else order.to(torch.int32)),
            levels=levels,
            n=weight.codes.shape[0],
            k=2 * weight.codes.shape[1],
            format=Format.INT4,
            group=weight.group,
        )

    def _bytes(self, weight: RowBytes, order: Tensor | None, bias: Tensor | None) -> Linear:
        codes, scales, offsets = weight.codes, weight.scales, weight.offsets
        is_int8, is_plain = codes.dtype == torch.int8, offsets is None and scales.shape[1] == 1
        if is_int8 and is_plain and weight.rounds_inputs:
            return self.int8(codes, scales, bias)
        return Linear(
            weight=self.address(codes),
            bias=self.address(bias),
            scales=self.address(scales),
            offsets=self.address(offsets),
            sums=self.address(
                byte_sums(codes, scales) if is_int8 and weight.rounds_inputs else None
            ),
            order=self.address(None if order is None else order.to(torch.int32)),
            n=codes.shape[0],
            k=codes.shape[1],
            format=Format.GROUPED_INT8 if is_int8 else Format.GROUPED_FP8,
            group=weight.group,
        )

    def of(self, linear: Any, *, has_bias: bool = True) -> Linear:
        """Describe a layer; unless ``has_bias``, without its bias."""
        bias, stored = bias_of(linear) if has_bias else None, row_weight(linear)
        if isinstance(stored, RowInt4):
            return self._int4(stored, linear._buffers.get(ORDER), bias)
        if isinstance(stored, RowBytes):
            return self._bytes(stored, linear._buffers.get(ORDER), bias)
        weight = (stored or linear).get_parameter("weight").detach()
        if weight.dtype == torch.int8:
            return self.int8(weight, linear.weight_scale.detach(), bias)
        return Linear(
            weight=self.address(weight),
            bias=self.address(bias),
            n=weight.shape[0],
            k=weight.shape[1],
            format=FORMATS[weight.dtype],
        )

    def address(self, tensor: Tensor | None) -> int | None:
        """Keep a tensor, and return where it is."""
        if tensor is None:
            return None
        self.kept.append(tensor)
        address: int = tensor.data_ptr()
        return address


def bias_of(linear: Any) -> Tensor | None:
    """Return the bias of a layer as the library reads it."""
    return None if linear.bias is None else linear.bias.detach().float().contiguous()


def row_weight(linear: Any) -> RowInt4 | RowBytes | NumbersPart | None:
    """Return the weight that a quantization method brought into rows, if it did."""
    for name in ("int4", REPACKED):
        module = linear._modules.get(name)
        if isinstance(module, RowInt4 | RowBytes | NumbersPart):
            return module
    return None
