"""The linear layers of bitsandbytes, stored or made while loading.

Four bits: ``weight`` uint8 ``[out, in / 2]`` and ``absmax`` float32 ``[out, in / step]``, as the loader yields
them. LLM.int8: ``weight`` int8 ``[out, in]`` and ``SCB`` float32 ``[out]``, the largest number of each output.
"""

from __future__ import annotations

from collections.abc import Callable
from math import gcd
from typing import Any

import torch
from torch import Tensor, nn

from treadle.errors import CheckpointError, ConfigError
from treadle_bitsandbytes.blocks import BLOCK, dequantize, levels, pairs, quantize
from treadle_layers_kit import empty_weight
from treadle_layers_kit.dequantized import DequantizedLinear, replace_parameter, scaled
from treadle_layers_kit.packed_layout import INT8, codes_of_bytes
from treadle_layers_kit.row_int4 import RowInt4
from treadle_layers_kit.row_packing import RowPacking

__all__ = ("STEP", "FourBitLinear", "Int8Linear")

STEP = 32
"""Inputs of a scale while a checkpoint is loaded: every block size is a multiple."""
PIECE = 2**24
"""Numbers that are quantized at a time."""


class FourBitLinear(DequantizedLinear):
    """NF4 and FP4. A block counts through the whole matrix, so that it may begin inside a row."""

    def __init__(self, type: str, *, online: bool = False) -> None:
        self.type, self.online = type, online
        self.step = 0

    def register(self, module: nn.Module, out: int) -> None:
        size, total = self.inputs.size, self.inputs.total
        if total % 2:
            raise CheckpointError(
                f"{self.prefix} has {total} input features, and two of them are one byte; leave this "
                "layer unquantized (llm_int8_skip_modules)"
            )
        if size % 2:
            raise ConfigError(
                f"{self.prefix} has {size} input features on each rank, and two of them are one byte; "
                "choose a smaller tensor_parallel_size"
            )
        group = gcd(size, BLOCK) if self.online else gcd(total, STEP)
        misfit = (
            "" if RowInt4.takes(size, group) else f"has {size} inputs, which is no multiple of 128"
        )
        RowPacking(module, size, group, self.dtype, misfit=misfit)
        if self.online:
            weight = empty_weight((out, size), self.dtype, output_dim=0, input_dim=1)
            module.register_parameter("weight", weight)
            return
        weight = empty_weight(
            (out, size // 2), torch.uint8, output_dim=0, input_dim=1, input_block=2
        )
        self.step = gcd(total, STEP)
        absmax = empty_weight((out, total // self.step), torch.float32, output_dim=0)
        module.register_parameter("weight", weight)
        module.register_parameter("absmax", absmax)

    def process_weights_after_loading(self, module: nn.Module) -> None:
        """Keep the scales of this rank's inputs, one for as many of these as have the same."""
        weight = module.get_parameter("weight").data
        if self.online:
            self.step = gcd(self.inputs.size, BLOCK)
            packed, absmax = _in_pieces(weight, lambda w: quantize(w, self.type, self.step))
            replace_parameter(module, "weight", packed)
        else:
            absmax, self.step = self.local(module.get_parameter("absmax").data, self.step)
            while _has_twins(absmax) and not self.inputs.size % (2 * self.step):
                absmax, self.step = absmax[:, ::2].contiguous(), 2 * self.step
        replace_parameter(module, "absmax", absmax)
        module.register_buffer("pairs", pairs(self.type).to(weight.device), persistent=False)
        stored = module.get_parameter("weight").data
        self.repack(
            module, tuple(levels(self.type).tolist()),
            # The first of two codes is in the upper half.
            lambda begin, end: codes_of_bytes(stored[begin:end] << 4 | stored[begin:end] >> 4, 4),
            absmax, self.step,
        )  # fmt: skip

    def dense(self, module: Any) -> Tensor:
        return scaled(dequantize(module.weight, module.pairs), module.absmax, self.step)


class Int8Linear(DequantizedLinear):
    """LLM.int8. Its activations, which it would round but for the largest, stay as they are."""

    rounds_rows = False

    def __init__(self, *, online: bool = False) -> None:
        self.online = online

    def register(self, module: nn.Module, out: int) -> None:
        dtype = self.dtype if self.online else torch.int8
        RowPacking(module, self.inputs.size, self.inputs.size, self.dtype)
        weight = empty_weight((out, self.inputs.size), dtype, output_dim=0, input_dim=1)
        module.register_parameter("weight", weight)
        if not self.online:
            module.register_parameter("SCB", empty_weight((out,), torch.float32, output_dim=0))

    def process_weights_after_loading(self, module: nn.Module) -> None:
        if self.online:
            weight, largest = _in_pieces(module.get_parameter("weight").data, _to_int8)
            replace_parameter(module, "weight", weight)
            replace_parameter(module, "SCB", largest)
        stored = module.get_parameter("weight").data
        scale = module.get_parameter("SCB").data[:, None] / 127
        self.repack(module, INT8, lambda begin, end: stored[begin:end], scale, self.inputs.size)

    def dense(self, module: Any) -> Tensor:
        return module.weight.float().mul_(module.SCB[:, None] / 127)  # type: ignore[no-any-return]


def _to_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    largest = weight.abs().amax(dim=1)
    scale = largest.clamp_min(torch.finfo(torch.float32).tiny)[:, None] / 127
    return (weight / scale).round().to(torch.int8), largest


def _in_pieces(
    weight: Tensor, convert: Callable[[Tensor], tuple[Tensor, Tensor]]
) -> tuple[Tensor, Tensor]:
    """Convert rows as float32, a few at a time: codes of a whole matrix would be eight times as large."""
    rows = max(1, PIECE // max(1, weight.shape[1]))
    codes, scales = zip(*(convert(piece.float()) for piece in weight.split(rows)), strict=True)
    return torch.cat(codes), torch.cat(scales)


def _has_twins(scale: Tensor) -> bool:
    return scale.shape[1] % 2 == 0 and torch.equal(scale[:, ::2], scale[:, 1::2])
