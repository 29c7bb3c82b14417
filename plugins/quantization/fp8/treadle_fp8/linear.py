"""The linear layers of FP8 checkpoints.

``weight`` is float8_e4m3fn ``[out, in]``. Its scales, float32, are one number for each matrix
(``weight_scale``, a scalar), one for each output (``weight_scale`` ``[out, 1]``) or one for each
block (``weight_scale_inv`` ``[⌈out / 128⌉, ⌈in / 128⌉]``, which despite its name is multiplied, too).
The weight is ``float(weight) · scale``.

Where the device multiplies in FP8, activations are rounded as the checkpoint's makers intended.
Elsewhere the weight is dequantized for each call and activations stay as they are, which is more
precise.
"""

from __future__ import annotations

from math import gcd
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from treadle.api.models import LinearSpec
from treadle_fp8_kit.quantize import FP8, FP8_MAX
from treadle_fp8_kit.scaled_mm import ScaledMM
from treadle_layers_kit import Shard, Sharded, empty_weight, ops
from treadle_layers_kit.small_floats import fp8_to_float32

__all__ = ("BlockLinear", "ChannelLinear", "MatrixLinear", "OnlineLinear")


class ChannelLinear:
    """A scale for each output; activations have one for each row, unless a static one is known.

    After ``process_weights_after_loading`` the module has ``weight`` and ``weight_scale`` ``[out]``.
    """

    def __init__(self, scaled_mm: ScaledMM, limit: float | None = None) -> None:
        self.scaled_mm = scaled_mm
        self.limit = limit
        self.uses_scaled_mm = False

    def create_weights(self, module: nn.Module, spec: LinearSpec) -> None:
        register_weight(module, spec, FP8)
        scale = empty_weight((sum(spec.out_features), 1), torch.float32, output_dim=0)
        module.register_parameter("weight_scale", scale)
        self.dtype = spec.dtype

    def process_weights_after_loading(self, module: nn.Module) -> None:
        self.set_scale(module, module.get_parameter("weight_scale").data.flatten())

    def set_scale(self, module: nn.Module, scale: Tensor) -> None:
        """Store the scale of each output, and decide how to multiply."""
        replace(module, "weight_scale", scale.contiguous())
        self.uses_scaled_mm = self.scaled_mm.supports_rows(
            module.get_parameter("weight").data, self.dtype
        )

    def apply(self, module: Any, x: Tensor, bias: Tensor | None, *, gated: bool = False) -> Tensor:
        if self.uses_scaled_mm:
            static = getattr(module, "input_scale", None)
            scale = module.weight_scale
            return self.scaled_mm.mm_rows(
                x, module.weight, scale, bias, static, self.limit, gated=gated
            )
        dense = fp8_to_float32(module.weight).mul_(module.weight_scale[:, None])
        return F.linear(ops.silu_and_mul(x) if gated else x, dense.to(x.dtype), bias)

    def apply_gated(self, module: Any, x: Tensor, bias: Tensor | None) -> Tensor:
        return self.apply(module, x, bias, gated=True)


class MatrixLinear(ChannelLinear):
    """A scale for each matrix of the checkpoint; ``static``: and one for its activations."""

    def __init__(self, scaled_mm: ScaledMM, *, static: bool) -> None:
        super().__init__(scaled_mm)
        self.static = static

    def create_weights(self, module: nn.Module, spec: LinearSpec) -> None:
        register_weight(module, spec, FP8)
        num_matrices = len(spec.out_features)
        module.register_parameter(
            "weight_scale", empty_weight((num_matrices,), torch.float32, per_part=True)
        )
        if self.static:
            module.register_parameter(
                "input_scale", empty_weight((num_matrices,), torch.float32, per_part=True)
            )
        self.dtype, self.sizes = spec.dtype, spec.out_features

    def process_weights_after_loading(self, module: nn.Module) -> None:
        """Give each output the scale of its matrix, so that fused ones need not be rounded anew."""
        scales = module.get_parameter("weight_scale").data
        if self.static:
            # They saw the same activations, and the largest scale cuts nothing off.
            replace(module, "input_scale", module.get_parameter("input_scale").data.amax())
        expanded = [s.expand(n) for s, n in zip(scales, self.sizes, strict=True)]
        self.set_scale(module, torch.cat(expanded))


class OnlineLinear(ChannelLinear):
    """A weight that the checkpoint has in full precision, with a scale for each output."""

    def create_weights(self, module: nn.Module, spec: LinearSpec) -> None:
        register_weight(module, spec, spec.dtype)
        self.dtype = spec.dtype

    def process_weights_after_loading(self, module: nn.Module) -> None:
        weight = module.get_parameter("weight").data.float()
        scale = (weight.abs().amax(dim=1) / FP8_MAX).clamp_min(torch.finfo(torch.float32).tiny)
        replace(module, "weight", (weight / scale[:, None]).to(FP8))
        self.set_scale(module, scale)


class BlockLinear:
    """A scale for each block; activations have one for each row and 128 inputs.

    After ``process_weights_after_loading``, ``weight_scale`` is ``[out, ⌈in / step⌉]``: a scale for each output and
    ``step`` inputs. For FP8 multiplication, ``block_scale`` is ``[out / 128, in / 128]`` as well.
    """

    def __init__(self, block: tuple[int, int], scaled_mm: ScaledMM) -> None:
        self.block = block
        self.scaled_mm = scaled_mm
        self.uses_scaled_mm = False

    def create_weights(self, module: nn.Module, spec: LinearSpec) -> None:
        register_weight(module, spec, FP8)
        inputs = module.inputs if isinstance(module, Sharded) else Shard.full(spec.in_features)
        block_out, block_in = self.block
        rows = sum(-(-n // block_out) for n in spec.out_features)
        # Every rank gets the scales of all inputs, because its own may begin inside a block.
        scale = empty_weight(
            (rows, -(-inputs.total // block_in)),
            torch.float32,
            output_dim=0,
            output_block=block_out,
        )
        module.register_parameter("weight_scale", scale)
        self.dtype, self.sizes, self.first = spec.dtype, spec.out_features, inputs.start

    def process_weights_after_loading(self, module: nn.Module) -> None:
        """Bring the scales into the form of this rank's share."""
        weight, stored_scale = (
            module.get_parameter("weight").data,
            module.get_parameter("weight_scale").data,
        )
        block_out, block_in = self.block
        inputs = weight.shape[1]
        step = gcd(block_in, self.first) if self.first % block_in else block_in
        first_block = self.first // step
        scale = stored_scale.repeat_interleave(block_in // step, dim=1)
        scale = scale[:, first_block : first_block + -(-inputs // step)]
        pieces = scale.split([-(-n // block_out) for n in self.sizes])
        rows = [
            piece.repeat_interleave(block_out, dim=0)[:size]
            for piece, size in zip(pieces, self.sizes, strict=True)
        ]
        self.step = step
        replace(module, "weight_scale", torch.cat(rows).contiguous())
        aligned = (
            not any(n % block_out for n in self.sizes)
            and not inputs % block_in
            and step == block_in
        )
        if (
            self.block == (128, 128)
            and aligned
            and self.scaled_mm.supports_blocks(weight, self.dtype)
        ):
            self.uses_scaled_mm = True
            replace(module, "block_scale", self.scaled_mm.pad_block_scale(scale))

    def apply(self, module: Any, x: Tensor, bias: Tensor | None, *, gated: bool = False) -> Tensor:
        if self.uses_scaled_mm:
            return self.scaled_mm.mm_blocks(x, module.weight, module.block_scale, bias, gated=gated)
        inputs = module.weight.shape[1]
        scale = module.weight_scale.repeat_interleave(self.step, dim=1)[:, :inputs]
        dense = fp8_to_float32(module.weight).mul_(scale).to(x.dtype)
        return F.linear(ops.silu_and_mul(x) if gated else x, dense, bias)

    def apply_gated(self, module: Any, x: Tensor, bias: Tensor | None) -> Tensor:
        return self.apply(module, x, bias, gated=True)


def register_weight(module: nn.Module, spec: LinearSpec, dtype: torch.dtype) -> None:
    """An empty ``weight`` ``[out, in]``."""
    shape = (sum(spec.out_features), spec.in_features)
    module.register_parameter("weight", empty_weight(shape, dtype, output_dim=0, input_dim=1))


def replace(module: nn.Module, name: str, data: Tensor) -> None:
    """Put ``data`` in the place of a parameter."""
    if name in module._parameters:
        delattr(module, name)
    module.register_parameter(name, nn.Parameter(data, requires_grad=False))
