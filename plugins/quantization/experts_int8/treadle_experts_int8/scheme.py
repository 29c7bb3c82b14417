"""The experts of a mixture in int8, with a scale for each output."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from treadle.api.models import ExpertsMethod, ExpertsSpec, LinearSpec
from treadle.errors import ConfigError
from treadle_layers_kit import empty_weight
from treadle_layers_kit.dequantized import replace_parameter
from treadle_layers_kit.dequantized_experts import DequantizedExperts
from treadle_layers_kit.packed import PackedWeight
from treadle_layers_kit.packed_layout import INT8
from treadle_layers_kit.schemes import LinearScheme

__all__ = ("ExpertsInt8Scheme", "Int8Experts")

KEY = "experts_int8"
LARGEST = 127


class Int8Experts(DequantizedExperts):
    """``STACK_weight`` int8 ``[experts, out, in]`` and ``STACK_scale`` float32 ``[experts, out]`` once it is loaded."""

    def register(self, module: nn.Module, stack: str, out: int, inputs: int) -> None:
        experts = self.spec.experts
        weight = empty_weight(
            (experts, out, inputs), self.spec.dtype, output_dim=0, input_dim=1, stack=experts
        )
        module.register_parameter(f"{stack}_weight", weight)

    def process_weights_after_loading(self, module: nn.Module) -> None:
        for stack in ("gate_up", "down"):
            weight = module.get_parameter(f"{stack}_weight").data
            codes = torch.empty_like(weight, dtype=torch.int8)
            scales = torch.empty(weight.shape[:2], dtype=torch.float32, device=weight.device)
            for expert, matrix in enumerate(weight):  # one by one: float32 takes twice as much
                numbers = matrix.float()
                largest = numbers.abs().amax(dim=1)
                scale = (largest / LARGEST).clamp_min(torch.finfo(torch.float32).tiny)
                codes[expert], scales[expert] = (numbers / scale[:, None]).round(), scale
            replace_parameter(module, f"{stack}_weight", codes)
            replace_parameter(module, f"{stack}_scale", scales)
        self.repack(module)

    def packed(self, module: Any, stack: str, expert: int) -> PackedWeight | None:
        codes: Tensor = getattr(module, f"{stack}_weight")[expert]
        scales = getattr(module, f"{stack}_scale")[expert][:, None]
        inputs = codes.shape[1]
        return PackedWeight.pack(
            lambda begin, end: codes[begin:end], scales, inputs, inputs, self.spec.dtype, INT8
        )

    def matrix(self, module: Any, stack: str, expert: int) -> Tensor:
        codes: Tensor = getattr(module, f"{stack}_weight")[expert]
        return codes.float().mul_(getattr(module, f"{stack}_scale")[expert][:, None])


class ExpertsInt8Scheme(LinearScheme):
    """A ``QuantizationScheme`` of experts alone. Raises ``ConfigError`` for a checkpoint that is quantized."""

    name = KEY

    def __init__(self, checkpoint: Mapping[str, Any]) -> None:
        if checkpoint:
            raise ConfigError(
                f"option quantization is {KEY!r}, but this checkpoint is quantized with "
                f"{checkpoint.get('quant_method')!r}; leave the option out"
            )

    def linear_method(self, spec: LinearSpec) -> None:
        return None

    def experts_method(self, spec: ExpertsSpec) -> ExpertsMethod:
        return Int8Experts()
