"""Linear layers of weights in FP8 and FP4, as several formats store them."""

from __future__ import annotations

from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from treadle.errors import ConfigError
from treadle_layers_kit import ops
from treadle_layers_kit.dequantized import DequantizedLinear, replace_parameter, scaled
from treadle_layers_kit.packed import PackedWeight
from treadle_layers_kit.packed_layout import E2M1, FP8, codes_of_bytes
from treadle_layers_kit.rounded_inputs import RoundedWeight, RowProduct
from treadle_layers_kit.row_packing import RowPacking
from treadle_layers_kit.weight import empty_weight

__all__ = ("Fp4Linear", "Fp8Linear", "Fp8Product", "fp4_to_float32", "fp8_to_float32")


PRODUCT_BLOCK = (128, 128)
"""The blocks that products in FP8 know."""


class Fp8Product(RowProduct, Protocol):
    """Also one of FP8 with scales by block."""

    def supports_blocks(self, weight: Tensor, dtype: torch.dtype) -> bool: ...

    def pad_block_scale(self, scale: Tensor) -> Tensor: ...

    def mm_blocks(
        self, x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, *, gated: bool = False
    ) -> Tensor: ...


class Fp8Linear(DequantizedLinear):
    """float8_e4m3fn ``weight`` ``[out, in]``, with ``weight_scale`` for a matrix, output or block.

    Where ``product`` takes the weight, activations are rounded to FP8, too, with a scale for each row or for
    each row and block; elsewhere they stay in the model's type. ``static``: the checkpoint has the scale of all activations.
    ``limit`` bounds the largest number of a row that its scale considers.
    """

    def __init__(
        self,
        scales: Literal["tensor", "channel", "block"],
        block: tuple[int, int] = (1, 0),
        product: Fp8Product | None = None,
        *,
        static: bool = False,
        limit: float | None = None,
    ) -> None:
        self.scales, self.block, self.product = scales, block, product
        self.static, self.limit = static, limit
        self.step = 0
        self.uses_product = False

    def register(self, module: nn.Module, out: int) -> None:
        weight = empty_weight(
            (out, self.inputs.size), torch.float8_e4m3fn, output_dim=0, input_dim=1
        )
        if self.scales == "tensor":
            scale = empty_weight((len(self.sizes),), torch.float32, per_part=True)
        else:
            block_out, block_in = self.block
            rows = sum(-(-size // block_out) for size in self.sizes)
            groups = -(-self.inputs.total // block_in) if block_in else 1
            # Every rank gets the scales of all inputs, because its own may begin inside a block.
            scale = empty_weight(
                (rows, groups), torch.float32, output_dim=0, output_block=block_out
            )
        module.register_parameter("weight", weight)
        module.register_parameter("weight_scale", scale)
        RowPacking(module, self.inputs.size, self.block[1] or self.inputs.size, self.dtype)
        if self.static:
            static = empty_weight((len(self.sizes),), torch.float32, per_part=True)
            module.register_parameter("input_scale", static)

    def process_weights_after_loading(self, module: nn.Module) -> None:
        scale, weight = (module.get_parameter(n).data for n in ("weight_scale", "weight"))
        block_out, block_in = self.block
        blocks = scale
        if self.scales == "tensor":
            scale = self.expand(scale)
        elif block_out > 1:
            pieces = scale.split([-(-size // block_out) for size in self.sizes])
            rows = zip(pieces, self.sizes, strict=True)
            scale = torch.cat([p.repeat_interleave(block_out, 0)[:size] for p, size in rows])
        scale, self.step = self.local(scale, block_in or self.inputs.total)
        replace_parameter(module, "weight_scale", scale)
        if self.static:
            # Fused matrices saw the same activations, and the largest scale cuts nothing off.
            replace_parameter(
                module, "input_scale", module.get_parameter("input_scale").data.amax()
            )
        if self.product is None:
            self.uses_product = False
        elif self.block == PRODUCT_BLOCK and not any(n % block_out for n in self.sizes):
            self.uses_product = self.step == block_in and self.product.supports_blocks(
                weight, self.dtype
            )
            if self.uses_product:
                blocks, _ = self.local(blocks, block_in)
                replace_parameter(module, "weight_scale", self.product.pad_block_scale(blocks))
        elif scale.shape[1] == 1:
            self.uses_product = self.product.supports_rows(weight, self.dtype)
            if self.uses_product:
                replace_parameter(module, "weight_scale", scale.flatten())
        if not self.uses_product:
            self.repack(module, FP8, lambda begin, end: weight[begin:end], scale, self.step)

    def apply(self, module: Any, x: Tensor, bias: Tensor | None, *, gated: bool = False) -> Tensor:
        """``gated``: of ``ops.silu_and_mul(x)``."""
        if not self.uses_product or self.product is None:
            return super().apply(module, ops.silu_and_mul(x) if gated else x, bias)
        weight = module.weight, module.weight_scale, bias
        if module.weight_scale.dim() == 2:
            return self.product.mm_blocks(x, *weight, gated=gated)
        static = getattr(module, "input_scale", None)
        return self.product.mm_rows(x, *weight, static, self.limit, gated=gated)

    def rounded(self, module: Any) -> RoundedWeight | None:
        """See ``SupportsExperts``."""
        if self.product is None:
            return None
        static = module.input_scale.data if self.static else None
        weight, scale = module.weight.data, module.weight_scale.data
        return RoundedWeight(weight, scale, self.product, static, self.limit)

    def packed(self, module: Any) -> PackedWeight | None:
        """See ``SupportsExperts``."""
        weight, scale = module.weight.data, module.weight_scale.data
        is_by_block = scale.dim() == 2
        scale = scale.repeat_interleave(PRODUCT_BLOCK[0], 0) if is_by_block else scale[:, None]
        inputs = weight.shape[1]
        return PackedWeight.pack(
            lambda begin, end: weight[begin:end], scale, PRODUCT_BLOCK[1] if is_by_block else inputs,
            inputs, self.dtype, FP8,
        )  # fmt: skip

    def dense(self, module: Any) -> Tensor:
        step = self.step if module.weight_scale.shape[1] > 1 else module.weight.shape[1]
        return scaled(fp8_to_float32(module.weight), module.weight_scale, step)


class Fp4Linear(DequantizedLinear):
    """float4_e2m1, two in a byte, with a scale for each ``group`` inputs, and one for the matrix.

    NVFP4: groups of 16 with scales in float8_e4m3fn, and a float32 ``matrix_scale`` (its name) that
    multiplies, or with ``divides`` divides. MXFP4: groups of 32 with exponents, and no ``matrix_scale``.
    """

    def __init__(
        self,
        group: int,
        weight: str = "weight_packed",
        matrix_scale: str | None = None,
        *,
        divides: bool = False,
    ) -> None:
        self.group, self.weight, self.matrix_scale, self.divides = (
            group,
            weight,
            matrix_scale,
            divides,
        )
        self.step = group

    def register(self, module: nn.Module, out: int) -> None:
        self.check_groups(self.group)
        if self.inputs.size % 2:
            raise ConfigError(
                f"{self.prefix} has {self.inputs.size} input features on each rank; FP4 packs 2 into "
                "one byte, so choose a smaller tensor_parallel_size"
            )
        shape = (out, self.inputs.size // 2)
        packed = empty_weight(shape, torch.uint8, output_dim=0, input_dim=1, input_block=2)
        dtype = torch.float8_e4m3fn if self.matrix_scale else torch.uint8
        scale = empty_weight((out, self.inputs.total // self.group), dtype, output_dim=0)
        module.register_parameter(self.weight, packed)
        module.register_parameter("weight_scale", scale)
        RowPacking(module, self.inputs.size, self.group, self.dtype)
        if self.matrix_scale:
            total = empty_weight((len(self.sizes),), torch.float32, per_part=True)
            module.register_parameter(self.matrix_scale, total)

    def process_weights_after_loading(self, module: nn.Module) -> None:
        stored = module.get_parameter("weight_scale").data
        bits, self.step = self.local(stored.view(torch.uint8), self.group)
        replace_parameter(module, "weight_scale", bits.view(stored.dtype))
        if self.matrix_scale:
            total = self.expand(module.get_parameter(self.matrix_scale).data)
            replace_parameter(
                module, self.matrix_scale, total.reciprocal() if self.divides else total
            )
        packed = module.get_parameter(self.weight).data
        self.repack(
            module, E2M1, lambda begin, end: codes_of_bytes(packed[begin:end], 4),
            module.get_parameter("weight_scale").data, self.step,
            factors=module.get_parameter(self.matrix_scale).data if self.matrix_scale else None,
        )  # fmt: skip

    def dense(self, module: Any) -> Tensor:
        if self.matrix_scale:
            scale = fp8_to_float32(module.weight_scale) * getattr(module, self.matrix_scale)
        else:
            scale = module.weight_scale.view(torch.float8_e8m0fnu).float()
        return scaled(fp4_to_float32(getattr(module, self.weight)), scale, self.step)


def fp8_to_float32(weight: Tensor) -> Tensor:
    """float8_e4m3fn to a new float32 tensor.

    torch's conversion goes number by number on a CPU. A float16 has the same fields, only wider, so
    the bits are shifted into their places there, and the difference of the biases is a factor.
    """
    if weight.device.type != "cpu":
        return weight.float()
    bits = weight.view(torch.int8).to(torch.int16).bitwise_left_shift(7)
    # The sign was extended into the exponent's highest bit, which e4m3 has not.
    return bits.bitwise_and_(-0x4001).view(torch.float16).float().mul_(2.0**8)


def fp4_to_float32(packed: Tensor) -> Tensor:
    """uint8 ``[out, in / 2]``, the first number in the lower half, to float32 ``[out, in]``.

    The fields of float4_e2m1 are those of a float16 as well.
    """
    codes = torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2).to(torch.int16)
    bits = (codes & 7).bitwise_left_shift_(9) | (codes & 8).bitwise_left_shift_(12)
    return bits.view(torch.float16).float().mul_(2.0**14)
