"""The linear layers of FP8 checkpoints.

``weight`` is float8_e4m3fn ``[out, in]``. Its scales, float32, are one number for each matrix
(``weight_scale``, a scalar), one for each output (``weight_scale`` ``[out, 1]``) or one for each
block (``weight_scale_inv`` ``[⌈out / 128⌉, ⌈in / 128⌉]``, which despite its name is multiplied, too).
The weight is ``float(weight) · scale``.

Where the device multiplies in FP8, activations are rounded as the checkpoint's makers intended.
Elsewhere they stay as they are, which is more precise.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from treadle_fp8_kit.quantize import FP8, FP8_MAX
from treadle_layers_kit import empty_weight
from treadle_layers_kit.dequantized import replace_parameter
from treadle_layers_kit.row_packing import RowPacking
from treadle_layers_kit.small_floats import Fp8Linear

__all__ = ("GatedFp8Linear", "OnlineLinear")


class GatedFp8Linear(Fp8Linear):
    """Also ``SupportsGatedInput``."""

    def apply_gated(self, module: Any, x: Tensor, bias: Tensor | None) -> Tensor:
        return self.apply(module, x, bias, gated=True)


class OnlineLinear(GatedFp8Linear):
    """A weight that the checkpoint has in full precision, with a scale for each output."""

    def register(self, module: nn.Module, out: int) -> None:
        weight = empty_weight((out, self.inputs.size), self.dtype, output_dim=0, input_dim=1)
        module.register_parameter("weight", weight)
        RowPacking(module, self.inputs.size, self.inputs.size, self.dtype)

    def process_weights_after_loading(self, module: nn.Module) -> None:
        weight = module.get_parameter("weight").data.float()
        scale = weight.abs().amax(dim=1, keepdim=True) / FP8_MAX
        scale.clamp_min_(torch.finfo(torch.float32).tiny)
        replace_parameter(module, "weight", (weight / scale).to(FP8))
        replace_parameter(module, "weight_scale", scale)
        super().process_weights_after_loading(module)
