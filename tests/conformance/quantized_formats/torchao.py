"""Matrices as torchao 0.18 stores them in safetensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from treadle.testing.packing import Packed

__all__ = ("TorchAoFormat", "typed")


def typed(type: str, **data: Any) -> dict[str, Any]:
    """A configuration as torchao writes it."""
    return {"_type": type, "_data": data, "_version": 1}


@dataclass(frozen=True)
class TorchAoFormat:
    """``int4`` has pairs in a byte, and ``intN`` in groups one code a byte."""

    kind: Literal["int8", "fp8", "intx", "int4"] = "int8"
    bits: int = 4
    group: int = 32
    whole: bool = False
    rounds_inputs: bool = False
    """To int8: the weights have no zero points then."""

    @property
    def optional(self) -> Sequence[str]:
        return () if self.kind == "int4" else ("_weight_zero_point",)

    @property
    def type(self) -> dict[str, Any]:
        rows = typed("PerTensor") if self.whole else typed("PerRow", dim=-1)
        match self.kind:
            case "int8" if self.rounds_inputs:
                return typed(
                    "Int8DynamicActivationInt8WeightConfig",
                    act_mapping_type={"_type": "MappingType", "_data": "SYMMETRIC"},
                    granularity=[rows, rows],
                )
            case "int8":
                return typed("Int8WeightOnlyConfig", granularity=rows, group_size=None)
            case "fp8":
                return typed(
                    "Float8DynamicActivationFloat8WeightConfig",
                    granularity=[rows, rows],
                    weight_dtype={"_type": "torch.dtype", "_data": "float8_e4m3fn"},
                )
            case "intx":
                return typed(
                    "IntxWeightOnlyConfig",
                    weight_dtype={"_type": "torch.dtype", "_data": f"int{self.bits}"},
                    granularity=typed("PerGroup", group_size=self.group),
                )
        return typed("Int4WeightOnlyConfig", group_size=self.group)

    def config(self, unquantized: Sequence[str] = ()) -> dict[str, Any]:
        return {
            "quant_method": "torchao",
            "quant_type": {"default": self.type},
            "modules_to_not_convert": list(unquantized) or None,
            "include_input_output_embeddings": False,
        }

    def pack(self, weight: Tensor) -> Packed:
        match self.kind:
            case "int4":
                return self._pairs(weight)
            case "intx":
                groups = weight.unflatten(1, (-1, self.group))
            case _:
                groups = weight.reshape(1, -1, weight.numel()) if self.whole else weight[:, None]
        if self.kind == "fp8":
            scale = groups.abs().amax(2, keepdim=True) / 448
            numbers = (groups / scale).to(torch.float8_e4m3fn)
            tensors = {"_weight_qdata": numbers.view(weight.shape), "_weight_scale": scale[:, 0]}
            return Packed(tensors, (numbers.float() * scale).view(weight.shape))
        bits = self.bits if self.kind == "intx" else 8
        low, high = -(1 << (bits - 1)), (1 << (bits - 1)) - 1
        scale = (groups.amax(2, keepdim=True) - groups.amin(2, keepdim=True)) / (high - low)
        zero = (low - groups.amin(2, keepdim=True) / scale).round().clamp(low, high)
        if self.rounds_inputs:
            scale, zero = groups.abs().amax(2, keepdim=True) / high, torch.zeros_like(scale)
        codes = (groups / scale + zero).round().clamp(low, high)
        tensors = {
            "_weight_qdata": codes.view(weight.shape).to(torch.int8),
            "_weight_scale": scale.flatten(1),
            "_weight_zero_point": zero.flatten(1).to(torch.int8),
        }
        return Packed(tensors, ((codes - zero) * scale).view(weight.shape))

    def _pairs(self, weight: Tensor) -> Packed:
        groups = weight.unflatten(1, (-1, self.group))
        low, high = groups.amin(2, keepdim=True), groups.amax(2, keepdim=True)
        scale = (high - low) / 15
        zero = low + 8 * scale
        codes = ((groups - low) / scale).round().clamp(0, 15) - 8
        whole = codes.flatten(1).to(torch.int8)
        tensors = {
            "_weight_qdata": (whole[:, ::2] & 15) | (whole[:, 1::2] << 4),
            "_weight_scale": scale.flatten(1).t().contiguous(),
            "_weight_zero_point": zero.flatten(1).t().contiguous(),
        }
        return Packed(tensors, (codes * scale + zero).flatten(1))
