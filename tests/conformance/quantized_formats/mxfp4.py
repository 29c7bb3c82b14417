"""Matrices of MXFP4 as transformers stores them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from quantized_formats.compressed_tensors import Fp4Format
from treadle.testing.packing import Packed

__all__ = ("Mxfp4Format",)


@dataclass(frozen=True)
class Mxfp4Format:
    """Blocks of 32 with an exponent."""

    optional: Sequence[str] = ()

    def config(self, unquantized: Sequence[str] = ()) -> dict[str, Any]:
        return {"quant_method": "mxfp4", "modules_to_not_convert": list(unquantized) or None}

    def pack(self, weight: Tensor) -> Packed:
        packed = Fp4Format(32).pack(weight)
        tensors = {
            "weight_blocks": packed.tensors["weight_packed"].unflatten(1, (-1, 16)),
            "weight_scales": packed.tensors["weight_scale"],
        }
        return Packed(tensors, packed.weight)
