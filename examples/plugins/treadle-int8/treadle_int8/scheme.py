"""Loads plain weights, and keeps them in int8: a quarter or half of the memory."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from treadle.api.types import LinearMethod, LinearSpec
from treadle_layers_kit import empty_weight


class Int8Linear:
    """`x @ (int8 · scale).T`. The checkpoint's weight is quantized when it is complete."""

    def create_weights(self, module: nn.Module, spec: LinearSpec) -> None:
        shape = (sum(spec.out_features), spec.in_features)
        module.register_parameter(
            "weight", empty_weight(shape, spec.dtype, output_dim=0, input_dim=1)
        )

    def process_weights_after_loading(self, module: nn.Module) -> None:
        weight = module.get_parameter("weight").data
        scale = weight.float().abs().amax(dim=1, keepdim=True).clamp_min(1e-8) / 127
        quantized = (weight.float() / scale).round().to(torch.int8)
        del module.weight
        module.int8 = nn.Parameter(quantized, requires_grad=False)
        module.scales = nn.Parameter(scale.squeeze(1).to(weight.dtype), requires_grad=False)

    def apply(self, module: Any, x: Tensor, bias: Tensor | None) -> Tensor:
        y = F.linear(x, module.int8.to(x.dtype)) * module.scales
        return y if bias is None else y + bias


class Int8:
    """The scheme: every linear layer but the head."""

    name = "int8"

    def linear_method(self, spec: LinearSpec) -> LinearMethod | None:
        return None if spec.prefix.endswith("lm_head") else Int8Linear()

    def experts_method(self, spec: Any) -> None:
        return None

    def kv_cache_dtype(self, layer: str) -> str | None:
        return None
