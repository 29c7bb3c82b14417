"""Matrices as ModelOpt stores them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quantized_formats.compressed_tensors import FloatFormat, Fp4Format
from treadle.testing.packing import Packed

__all__ = ("ModelOptFormat",)


@dataclass(frozen=True)
class ModelOptFormat:
    """``in_its_file``: as in ``hf_quant_config.json``, which has the same one level deeper."""

    algorithm: str = "FP8"
    in_its_file: bool = False
    optional: Sequence[str] = ("input_scale",)

    def config(self, unquantized: Sequence[str] = ()) -> dict[str, Any]:
        names = [n if n.startswith("model.") else f"*{n}" for n in unquantized]
        values = {"quant_algo": self.algorithm, "kv_cache_quant_algo": None, "group_size": 16}
        if self.in_its_file:
            inner = {**values, "exclude_modules": ["lm_head", *names]}
            return {"quant_method": "modelopt", "quantization": inner}
        return {"quant_method": "modelopt", **values, "ignore": ["lm_head", *names]}

    def pack(self, weight: Tensor) -> Packed:
        scale = torch.tensor(0.02)
        if self.algorithm != "NVFP4":
            packed = FloatFormat("tensor" if self.algorithm == "FP8" else "channel").pack(weight)
            stored = packed.tensors["weight_scale"]
            stored = stored.reshape(()) if self.algorithm == "FP8" else stored.flatten()
            tensors = {**packed.tensors, "weight_scale": stored, "input_scale": scale}
            return Packed(tensors, packed.weight)
        packed = Fp4Format().pack(weight)
        tensors = {
            "weight": packed.tensors["weight_packed"],
            "weight_scale": packed.tensors["weight_scale"],
            "weight_scale_2": 1 / packed.tensors["weight_global_scale"].reshape(()),
            "input_scale": scale,
        }
        return Packed(tensors, packed.weight)
