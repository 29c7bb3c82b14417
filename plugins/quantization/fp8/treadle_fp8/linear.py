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
from treadle.layers import Shard, Sharded, empty_weight
from treadle_fp8.native import ScaledMM
from treadle_fp8.rounding import FP8, LARGEST
from treadle_layers_kit import ops

__all__ = ("BlockLinear", "ChannelLinear", "MatrixLinear", "OnlineLinear", "widened")


class ChannelLinear:
    """A scale for each output; activations have one for each row, unless a static one is known.

    After ``process_weights_after_loading`` the module has ``weight`` and ``weight_scale`` ``[out]``.
    """

    def __init__(self, native: ScaledMM, limit: float | None = None) -> None:
        self.native = native
        self.limit = limit
        self.fast = False

    def create_weights(self, module: nn.Module, spec: LinearSpec) -> None:
        register_weight(module, spec, FP8)
        scale = empty_weight((sum(spec.out_features), 1), torch.float32, output_dim=0)
        module.register_parameter("weight_scale", scale)
        self.dtype = spec.dtype

    def process_weights_after_loading(self, module: nn.Module) -> None:
        self.keep(module, module.get_parameter("weight_scale").data.flatten())

    def keep(self, module: nn.Module, scale: Tensor) -> None:
        """Store the scale of each output, and decide how to multiply."""
        replace(module, "weight_scale", scale.contiguous())
        self.fast = self.native.by_rows(module.get_parameter("weight").data, self.dtype)

    def apply(self, module: Any, x: Tensor, bias: Tensor | None, *, gated: bool = False) -> Tensor:
        if self.fast:
            static = getattr(module, "input_scale", None)
            scale = module.weight_scale
            return self.native.rows(x, module.weight, scale, bias, static, self.limit, gated=gated)
        dense = widened(module.weight).mul_(module.weight_scale[:, None])
        return F.linear(ops.silu_and_mul(x) if gated else x, dense.to(x.dtype), bias)

    def apply_gated(self, module: Any, x: Tensor, bias: Tensor | None) -> Tensor:
        return self.apply(module, x, bias, gated=True)


class MatrixLinear(ChannelLinear):
    """A scale for each matrix of the checkpoint; ``static``: and one for its activations."""

    def __init__(self, native: ScaledMM, *, static: bool) -> None:
        super().__init__(native)
        self.static = static

    def create_weights(self, module: nn.Module, spec: LinearSpec) -> None:
        register_weight(module, spec, FP8)
        parts = len(spec.out_features)
        module.register_parameter(
            "weight_scale", empty_weight((parts,), torch.float32, per_part=True)
        )
        if self.static:
            module.register_parameter(
                "input_scale", empty_weight((parts,), torch.float32, per_part=True)
            )
        self.dtype, self.sizes = spec.dtype, spec.out_features

    def process_weights_after_loading(self, module: nn.Module) -> None:
        """Give each output the scale of its matrix, so that fused ones need not be rounded anew."""
        scales = module.get_parameter("weight_scale").data
        if self.static:
            # They saw the same activations, and the largest scale cuts nothing off.
            replace(module, "input_scale", module.get_parameter("input_scale").data.amax())
        pieces = [s.expand(n) for s, n in zip(scales, self.sizes, strict=True)]
        self.keep(module, torch.cat(pieces))


class OnlineLinear(ChannelLinear):
    """A weight that the checkpoint has in full precision, with a scale for each output."""

    def create_weights(self, module: nn.Module, spec: LinearSpec) -> None:
        register_weight(module, spec, spec.dtype)
        self.dtype = spec.dtype

    def process_weights_after_loading(self, module: nn.Module) -> None:
        full = module.get_parameter("weight").data.float()
        scale = (full.abs().amax(dim=1) / LARGEST).clamp_min(torch.finfo(torch.float32).tiny)
        replace(module, "weight", (full / scale[:, None]).to(FP8))
        self.keep(module, scale)


class BlockLinear:
    """A scale for each block; activations have one for each row and 128 inputs.

    After ``process_weights_after_loading``, ``weight_scale`` is ``[out, ⌈in / step⌉]``: a scale for each output and
    ``step`` inputs. For FP8 multiplication, ``block_scale`` is ``[out / 128, in / 128]`` as well.
    """

    def __init__(self, block: tuple[int, int], native: ScaledMM) -> None:
        self.block = block
        self.native = native
        self.fast = False

    def create_weights(self, module: nn.Module, spec: LinearSpec) -> None:
        register_weight(module, spec, FP8)
        inputs = module.inputs if isinstance(module, Sharded) else Shard.whole(spec.in_features)
        high, wide = self.block
        rows = sum(-(-n // high) for n in spec.out_features)
        # Every rank gets the scales of all inputs, because its own may begin inside a block.
        scale = empty_weight(
            (rows, -(-inputs.total // wide)), torch.float32, output_dim=0, output_block=high
        )
        module.register_parameter("weight_scale", scale)
        self.dtype, self.sizes, self.first = spec.dtype, spec.out_features, inputs.start

    def process_weights_after_loading(self, module: nn.Module) -> None:
        """Bring the scales into the form of this rank's share."""
        data, stored = (
            module.get_parameter("weight").data,
            module.get_parameter("weight_scale").data,
        )
        high, wide = self.block
        inputs = data.shape[1]
        step = gcd(wide, self.first) if self.first % wide else wide
        first = self.first // step
        scale = stored.repeat_interleave(wide // step, dim=1)
        scale = scale[:, first : first + -(-inputs // step)]
        pieces = scale.split([-(-n // high) for n in self.sizes])
        rows = [
            piece.repeat_interleave(high, dim=0)[:size]
            for piece, size in zip(pieces, self.sizes, strict=True)
        ]
        self.step = step
        replace(module, "weight_scale", torch.cat(rows).contiguous())
        aligned = not any(n % high for n in self.sizes) and not inputs % wide and step == wide
        if self.block == (128, 128) and aligned and self.native.by_blocks(data, self.dtype):
            self.fast = True
            replace(module, "block_scale", self.native.laid_out(scale))

    def apply(self, module: Any, x: Tensor, bias: Tensor | None, *, gated: bool = False) -> Tensor:
        if self.fast:
            return self.native.blocks(x, module.weight, module.block_scale, bias, gated=gated)
        inputs = module.weight.shape[1]
        scale = module.weight_scale.repeat_interleave(self.step, dim=1)[:, :inputs]
        dense = widened(module.weight).mul_(scale).to(x.dtype)
        return F.linear(ops.silu_and_mul(x) if gated else x, dense, bias)

    def apply_gated(self, module: Any, x: Tensor, bias: Tensor | None) -> Tensor:
        return self.apply(module, x, bias, gated=True)


def widened(weight: Tensor) -> Tensor:
    """float8_e4m3fn to a new float32 tensor.

    torch's conversion goes number by number on a CPU. A float16 has the same fields, only wider, so
    the bits are shifted into their places there, and the difference of the biases is a factor.
    """
    if weight.device.type != "cpu":
        return weight.float()
    bits = weight.view(torch.int8).to(torch.int16).bitwise_left_shift(7)
    # The sign was extended into the exponent's highest bit, which e4m3 has not.
    return bits.bitwise_and_(-0x4001).view(torch.float16).float().mul_(2.0**8)


def register_weight(module: nn.Module, spec: LinearSpec, dtype: torch.dtype) -> None:
    """An empty ``weight`` ``[out, in]``."""
    shape = (sum(spec.out_features), spec.in_features)
    module.register_parameter("weight", empty_weight(shape, dtype, output_dim=0, input_dim=1))


def replace(module: nn.Module, name: str, data: Tensor) -> None:
    """Put ``data`` in the place of a parameter."""
    if name in module._parameters:
        delattr(module, name)
    module.register_parameter(name, nn.Parameter(data, requires_grad=False))
