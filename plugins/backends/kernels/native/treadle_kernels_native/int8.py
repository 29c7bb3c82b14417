"""Weights in eight bits, made while loading: ``--quantization int8`` on a CPU.

Each output has a scale. The library rounds activations to eight bits too, row by row, whether it runs steps as a
whole or these layers alone. Where it was not built, torch multiplies with the dequantized weight.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from treadle.api.models import LinearMethod, LinearSpec
from treadle_layers_kit import empty_weight
from treadle_layers_kit.mapping import is_mapped, release_pages
from treadle_layers_kit.quantized import is_layer_skipped

if TYPE_CHECKING:
    from treadle_kernels_native.linears import NativeLinears

__all__ = ("Int8Linear", "Int8Scheme", "RoundedLinear", "quantize", "row_sums")

HEADS = ("lm_head",)
ROWS = 256
"""Rows that are converted at a time: large temporary tensors between lasting ones would leave holes in the
heap, which stay resident."""


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes int8 ``[out, in]`` and scales float32 ``[out]``; ``weight ≈ codes · scales``."""
    codes = torch.empty(weight.shape, dtype=torch.int8)
    scales = torch.empty(len(weight))
    for start in range(0, len(weight), ROWS):
        rows = slice(start, start + ROWS)
        values = weight[rows].float()
        scales[rows] = scale = (values.abs().amax(1) / 127).clamp_min(
            torch.finfo(torch.float32).tiny
        )
        codes[rows] = (values / scale[:, None]).round_()
    return codes, scales


def row_sums(codes: Tensor) -> Tensor:
    """Return int32 ``[out]``, the sums that the library takes off because it adds 128 to activations."""
    return torch.cat([rows.sum(1, dtype=torch.int32) for rows in codes.split(ROWS)])


class RoundedLinear(ABC):
    """A ``LinearMethod`` that replaces the checkpoint's weight by codes and scales."""

    treadle_unguarded = True  # whoever runs its module knows it by its class

    def __init__(self, native: NativeLinears) -> None:
        """``native`` runs layers of models that the library does not run as a whole."""
        self._native = native

    def create_weights(self, module: nn.Module, spec: LinearSpec) -> None:
        """Register the weight as the checkpoint has it."""
        shape = (sum(spec.out_features), spec.in_features)
        weight = empty_weight(shape, spec.dtype, output_dim=0, input_dim=1)
        module.register_parameter("weight", weight)

    @abstractmethod
    def replace(self, module: nn.Module, weight: Tensor) -> None:
        """Give the module what stands in the place of its weight, which it has no longer."""

    @abstractmethod
    def dense(self, module: Any, dtype: torch.dtype) -> Tensor:
        """Return the weight ``[out, in]``."""

    def apply(self, module: Any, x: Tensor, bias: Tensor | None) -> Tensor:
        """See ``LinearMethod``."""
        y = self._native.run(module, x)
        if y is None:
            y = F.linear(x, self.dense(module, x.dtype))
        return y if bias is None else y + bias

    def process_weights_after_loading(self, module: nn.Module) -> None:
        """Replace the weight, a matrix at a time."""
        weight = module.get_parameter("weight")
        del module.weight
        self.replace(module, weight.data)
        if is_mapped(weight):
            release_pages(weight)


class Int8Linear(RoundedLinear):
    """Its module has ``weight`` int8 ``[out, in]`` and ``weight_scale`` ``[out]``."""

    def replace(self, module: nn.Module, weight: Tensor) -> None:
        for name, data in zip(("weight", "weight_scale"), quantize(weight), strict=True):
            module.register_parameter(name, nn.Parameter(data, requires_grad=False))

    def dense(self, module: Any, dtype: torch.dtype) -> Tensor:
        weight: Tensor = module.weight.to(dtype) * module.weight_scale[:, None].to(dtype)
        return weight


class Int8Scheme:
    """Every linear layer in eight bits, except the output head."""

    name = "int8"

    def __init__(self, native: NativeLinears) -> None:
        self._native = native

    def linear_method(self, spec: LinearSpec) -> LinearMethod | None:
        return None if is_layer_skipped(spec, HEADS) else Int8Linear(self._native)

    def experts_method(self, spec: Any) -> None:
        return None

    def kv_cache_dtype(self, layer: str) -> None:
        return None
