"""Matrices as HQQ stores them: lists of groups, packed across the whole matrix."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from treadle.testing.packing import Packed

__all__ = ("HqqFormat",)


@dataclass(frozen=True)
class HqqFormat:
    """Rounded to the nearest by the smallest and largest of a group; zero points have fractions."""

    bits: int = 4
    group: int | None = 64
    as_float: bool = False
    whole_zeros: bool = False
    optional: Sequence[str] = ("group_size", "axis", "view_as_float", "packing", "compute_dtype")

    def config(self, unquantized: Sequence[str] = ()) -> dict[str, Any]:
        params = {
            "nbits": self.bits,
            "channel_wise": True,
            "group_size": self.group,
            "optimize": True,
            "round_zero": self.whole_zeros,
            "axis": 1,
            "view_as_float": self.as_float,
        }
        stored = {"weight_quant_params": params, "offload_meta": False}
        nested = {"scale_quant_params": None, "zero_quant_params": None}
        return {
            "quant_method": "hqq",
            "quant_config": {**stored, **nested},
            "skip_modules": ["lm_head", *unquantized],
        }

    def pack(self, weight: Tensor) -> Packed:
        out, inputs = weight.shape
        groups = weight.reshape(-1, self.group or inputs)
        low, high = groups.amin(1, keepdim=True), groups.amax(1, keepdim=True)
        scale = (high - low) / ((1 << self.bits) - 1)
        zero = -low / scale
        zero = zero.round() if self.whole_zeros else zero
        codes = (groups / scale + zero).round().clamp(0, (1 << self.bits) - 1).to(torch.int32)
        packed = _packed(codes, self.bits)
        tensors = {
            "W_q": packed.view(torch.float32) if self.as_float else packed,
            "scale": scale,
            "zero": zero,
            "shape": torch.tensor([out, inputs]),
            "nbits": torch.tensor(self.bits, dtype=torch.int32),
            "group_size": torch.tensor(self.group or inputs, dtype=torch.int32),
            "axis": torch.tensor(1, dtype=torch.int32),
            "view_as_float": torch.tensor(int(self.as_float), dtype=torch.uint8),
            "packing": torch.tensor(list(f"{self.bits}bit_u8".encode()), dtype=torch.uint8),
            "compute_dtype": torch.tensor(list(b"torch.float32"), dtype=torch.uint8),
        }
        return Packed(tensors, ((codes - zero) * scale).view(out, inputs))


def _packed(codes: Tensor, bits: int) -> Tensor:
    """Rows of groups: the first piece of the list in the highest bits."""
    per_word = 10 if bits == 3 else 8 // bits
    padded = torch.nn.functional.pad(codes, (0, 0, 0, -len(codes) % per_word))
    words = torch.zeros(len(padded) // per_word, codes.shape[1], dtype=torch.int32)
    for place, piece in enumerate(padded.chunk(per_word)):
        words |= piece << (bits * (per_word - 1 - place))
    return words if bits == 3 else words.to(torch.uint8)
