"""Matrices as AMD Quark exports them to safetensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quantized_formats.compressed_tensors import Fp4Format
from treadle.testing.packing import Packed

__all__ = ("QuarkFormat",)


@dataclass(frozen=True)
class QuarkFormat:
    """``dtype`` and ``scheme`` in Quark's words."""

    dtype: str = "fp8_e4m3"
    scheme: str = "per_tensor"
    group: int = 32
    reorder: bool = True
    rounds_inputs: bool = False

    @property
    def optional(self) -> Sequence[str]:
        return () if self.dtype.startswith("u") else ("weight_zero_point",)

    def config(self, unquantized: Sequence[str] = ()) -> dict[str, Any]:
        axis = {"per_channel": 0, "per_group": -1}.get(self.scheme)
        weight = {
            "dtype": self.dtype,
            "qscheme": self.scheme,
            "ch_axis": axis,
            "group_size": self.group if self.scheme == "per_group" else None,
            "scale_format": "e8m0" if self.dtype == "fp4" else None,
            "is_dynamic": False,
        }
        return {
            "quant_method": "quark",
            "global_quant_config": {
                "weight": weight,
                "input_tensors": {"dtype": self.dtype}
                if self.rounds_inputs or self.dtype.startswith("fp8")
                else None,
            },
            "layer_quant_config": {},
            "exclude": ["lm_head", *(f"*{name}" for name in unquantized)],
            "export": {
                "pack_method": "reorder" if self.reorder else "order",
                "weight_format": "real_quantized",
            },
        }

    def pack(self, weight: Tensor) -> Packed:
        if self.dtype == "fp4":
            packed = Fp4Format(self.group).pack(weight)
            tensors = {
                "weight": packed.tensors["weight_packed"],
                "weight_scale": packed.tensors["weight_scale"],
            }
            return Packed(tensors, packed.weight)
        grouped = self.scheme == "per_group"
        size = {"per_tensor": weight.numel(), "per_channel": weight.shape[1]}
        groups = weight.reshape(-1, size.get(self.scheme, self.group))
        if self.dtype == "fp8_e4m3":
            scale = groups.abs().amax(1, keepdim=True) / 448
            numbers = (groups / scale).to(torch.float8_e4m3fn)
            stored = scale.flatten() if len(scale) > 1 else scale.reshape(())
            tensors = {"weight": numbers.view(weight.shape), "weight_scale": stored}
            return Packed(tensors, (numbers.float() * scale).view(weight.shape))
        bits, signed = int(self.dtype[-1]), self.dtype.startswith("int")
        low, high = (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if signed else (0, (1 << bits) - 1)
        if signed:
            scale = groups.abs().amax(1, keepdim=True) / high
            zero = torch.zeros_like(scale)
        else:
            scale = (groups.amax(1, keepdim=True) - groups.amin(1, keepdim=True)) / high
            zero = (-groups.amin(1, keepdim=True) / scale).round().clamp(low, high)
        codes = (groups / scale + zero).round().clamp(low, high)
        rows = len(weight) if grouped else -1
        whole = codes.view(weight.shape)
        tensors = {
            "weight": self._words(whole.t() if grouped else whole, bits),
            "weight_scale": scale.view(rows, -1).t().contiguous() if grouped else scale.flatten(),
            "weight_zero_point": self._words(
                zero.view(rows, -1).t() if grouped else zero.view(1, -1), bits
            ),
        }
        if not grouped:
            tensors["weight_zero_point"] = tensors["weight_zero_point"].flatten()
        if self.scheme == "per_tensor":
            tensors["weight_scale"] = tensors["weight_scale"].reshape(())
            tensors["weight_zero_point"] = zero.to(torch.int32 if bits == 4 else torch.int8).view(
                ()
            )
        return Packed(tensors, ((codes - zero) * scale).view(weight.shape))

    def _words(self, codes: Tensor, bits: int) -> Tensor:
        if bits == 8:
            return codes.to(torch.int8 if self.dtype == "int8" else torch.uint8).contiguous()
        order = (0, 2, 4, 6, 1, 3, 5, 7) if self.reorder else range(8)
        words = torch.zeros(len(codes), codes.shape[1] // 8, dtype=torch.int64)
        for place, column in enumerate(order):
            words |= (codes[:, column::8].long() & 15) << (4 * place)
        return words.to(torch.int32)
