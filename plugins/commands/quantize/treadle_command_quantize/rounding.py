"""How one matrix becomes codes and scales, and what these say in ``quantization_config``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

__all__ = ("Method", "Quantized", "Recipe", "recipe_of")

Method = Literal["fp8", "int8", "int4"]

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
SHARES = tuple(1 - 0.05 * step for step in range(8))
"""Shares of the largest number of a group that are tried as the range of four bits."""


@dataclass(frozen=True, slots=True)
class Quantized:
    """The tensors of a matrix by the last component of their names, and the numbers that they mean."""

    tensors: Mapping[str, Tensor]
    numbers: Tensor


@dataclass(frozen=True, slots=True)
class Recipe:
    """A method with its values; ``group`` inputs share a scale, 0: all of them."""

    method: Method
    group: int = 0

    def fits(self, inputs: int) -> bool:
        """Whether a matrix of so many inputs can be stored so."""
        return inputs % (self.group or 1) == 0

    def apply(self, weight: Tensor) -> Quantized:
        """Quantize ``[out, in]``."""
        if self.method == "fp8":
            return _fp8(weight)
        return _integers(weight, int(self.method.removeprefix("int")), self.group)

    def config(self, ignore: Sequence[str]) -> dict[str, Any]:
        """Return the ``quantization_config`` of a checkpoint that has ``ignore`` in full."""
        if self.method == "fp8":
            return {
                "quant_method": "fbgemm_fp8",
                "activation_scale_ub": 1200.0,
                "modules_to_not_convert": list(ignore),
            }
        weights = {
            "num_bits": int(self.method.removeprefix("int")),
            "type": "int",
            "symmetric": True,
            "strategy": "group" if self.group else "channel",
            "group_size": self.group or None,
            "dynamic": False,
            "actorder": None,
        }
        group = {"targets": ["Linear"], "weights": weights}
        return {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "quantization_status": "compressed",
            "config_groups": {"group_0": {**group, "input_activations": None}},
            "ignore": list(ignore),
        }


def recipe_of(method: Method, group_size: int) -> Recipe:
    """Return the recipe of a method; only four bits have groups."""
    return Recipe(method, group_size if method == "int4" else 0)


def _fp8(weight: Tensor) -> Quantized:
    numbers = weight.float()
    scale = (numbers.abs().amax(1, keepdim=True) / FP8_MAX).clamp_min(_tiny(torch.float32))
    codes = (numbers / scale).to(FP8)
    return Quantized({"weight": codes, "weight_scale": scale}, codes.float() * scale)


def _integers(weight: Tensor, bits: int, group: int) -> Quantized:
    """Codes from ``-2^(bits - 1)``, in words from the lowest bits; scales in the type of the weight."""
    out, inputs = weight.shape
    groups = weight.float().unflatten(1, (-1, group or inputs))
    largest, middle = groups.abs().amax(2), 1 << (bits - 1)
    best: Tensor | None = None
    for share in SHARES if bits == 4 else (1.0,):
        # Symmetric around -1/2, as codes are: the range of b bits has 2^b - 1 steps.
        tried = (largest * (share / (middle - 0.5))).to(weight.dtype)
        scale = tried.float().clamp_min(_tiny(weight.dtype))[..., None]
        rounded = (groups / scale).round_().clamp_(-middle, middle - 1)
        loss = (rounded * scale - groups).square_().sum(2)
        if best is None:
            best, scales, codes = loss, scale, rounded
            continue
        is_better = loss < best
        best = torch.where(is_better, loss, best)
        scales = torch.where(is_better[..., None], scale, scales)
        codes = torch.where(is_better[..., None], rounded, codes)
    tensors = {
        "weight_packed": _words(codes.flatten(1).to(torch.int32) + middle, bits),
        "weight_scale": scales.squeeze(2).to(weight.dtype),
        "weight_shape": torch.tensor([out, inputs]),
    }
    return Quantized(tensors, (codes * scales).flatten(1))


def _words(codes: Tensor, bits: int) -> Tensor:
    per_word = 32 // bits
    padded = torch.nn.functional.pad(codes, (0, -codes.shape[1] % per_word)).long()
    shifts = torch.arange(0, 32, bits)
    words = torch.bitwise_left_shift(padded.unflatten(1, (-1, per_word)), shifts)
    return words.sum(2).to(torch.int32)


def _tiny(dtype: torch.dtype) -> float:
    """The least number that has full precision, and that its own type does not round to 0."""
    return float(torch.finfo(dtype).tiny)
