"""Linear layers of int8 weights whose activations are rounded to int8, too, where the device multiplies so.

Elsewhere the weight is dequantized for each call and activations stay as they are, which is more precise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from treadle_layers_kit import ops
from treadle_layers_kit.dequantized import DequantizedLinear, replace_parameter
from treadle_layers_kit.packed import PackedWeight
from treadle_layers_kit.packed_layout import INT8, Levels
from treadle_layers_kit.weight import empty_weight

__all__ = (
    "ExpertsProduct",
    "RoundedInputs",
    "RoundedWeight",
    "Rounding",
    "RowProduct",
    "SupportsExperts",
)

LOWEST, LARGEST = -128, 127


class ExpertsProduct(Protocol):
    """What multiplies the rows of all experts, as ``treadle_fp8_kit.scaled_mm.ScaledMM`` does."""

    def supports_experts(
        self, weight: Tensor, scale: Tensor, dtype: torch.dtype, *, has_zero: bool = False
    ) -> bool: ...

    def group(self, topk_ids: Tensor, scale: Tensor) -> Any: ...

    def mm_experts(
        self,
        x: Tensor,
        grouping: Any,
        weight: Tensor,
        scale: Tensor,
        static: Tensor | None = None,
        limit: float | None = None,
        *,
        sums: Tensor | None = None,
        gated: bool = False,
    ) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class RoundedWeight:
    """The matrix of one expert, and how its inputs are rounded; the arguments of ``ExpertsProduct.mm_experts``."""

    weight: Tensor
    scale: Tensor
    product: ExpertsProduct
    static: Tensor | None = None
    limit: float | None = None
    sums: Tensor | None = None


@runtime_checkable
class SupportsExperts(Protocol):
    """A linear method with a product, the matrices of which experts may be stacked if it has served none of them yet."""

    uses_product: bool

    def rounded(self, module: Any) -> RoundedWeight | None:
        """Return the weight for one product of all experts; ``None``: its inputs are rounded as that does not round them."""

    def packed(self, module: Any) -> PackedWeight | None:
        """Return the weight for kernels that leave activations as they are, where there is no such product."""


class RowProduct(ExpertsProduct, Protocol):
    """What multiplies rounded rows, as ``treadle_fp8_kit.scaled_mm.ScaledMM`` does, where the device has such products."""

    def supports_rows(
        self, weight: Tensor, dtype: torch.dtype, *, has_zero: bool = False
    ) -> bool: ...

    def mm_rows(
        self,
        x: Tensor,
        weight: Tensor,
        scale: Tensor,
        bias: Tensor | None,
        static: Tensor | None = None,
        limit: float | None = None,
        *,
        sums: Tensor | None = None,
        gated: bool = False,
    ) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class Rounding:
    """How a checkpoint rounds activations to int8: with its own scale if ``static``, else with each row's;
    above a zero point unless ``symmetric``."""

    static: bool = False
    symmetric: bool = True


class RoundedInputs(DequantizedLinear):
    """The part of a ``SupportsGatedInput`` method that rounds activations; the other base says what the weight is.

    Of a weight that it hands to ``repack`` as int8 numbers with a scale for each output, the module has ``weight``
    ``[out, in]`` and ``weight_scale`` ``[out]`` then, if ``product`` takes it. A static scale is ``input_scale``.
    """

    product: RowProduct
    rounding = Rounding()
    uses_product = False

    def register(self, module: nn.Module, out: int) -> None:
        super().register(module, out)
        if not self.rounding.static:
            return
        count = len(self.sizes)
        scale = empty_weight((count,), torch.float32, per_part=True)
        module.register_parameter("input_scale", scale)
        if not self.rounding.symmetric:
            zero = empty_weight((count,), torch.int8, per_part=True)
            module.register_parameter("input_zero_point", zero)

    def repack(
        self,
        module: nn.Module,
        levels: Levels,
        rows: Callable[[int, int], Tensor],
        scales: Tensor,
        group: int,
        **steps: Tensor | None,
    ) -> None:
        static = self._take_static(module)
        is_plain = levels == INT8 and scales.shape[1] == 1 and steps.get("offsets") is None
        has_zero = not self.rounding.symmetric
        weight = rows(0, len(scales)).view(torch.int8) if is_plain else None
        if weight is None or not self.product.supports_rows(weight, self.dtype, has_zero=has_zero):
            return super().repack(module, levels, rows, scales, group, **steps)
        for name, _ in [*module.named_parameters(recurse=False)]:
            if name != "bias":
                delattr(module, name)
        sums = weight.sum(dim=1).float() if has_zero else None
        replace_parameter(module, "weight", weight.contiguous())
        replace_parameter(module, "weight_scale", scales.flatten().float())
        for name, data in (("input_scale", static), ("weight_sum", sums)):
            parameter = None if data is None else nn.Parameter(data, requires_grad=False)
            module.register_parameter(name, parameter)
        self.uses_product = True
        return None

    def _take_static(self, module: nn.Module) -> Tensor | None:
        """Remove what the checkpoint says of activations: a scalar, or ``[2]``, a scale and a zero point."""
        if not self.rounding.static:
            return None
        scale = module.get_parameter("input_scale").data
        del module.input_scale
        if self.rounding.symmetric:
            # Fused matrices saw the same activations, and the largest scale cuts nothing off.
            return scale.amax()
        zero = module.get_parameter("input_zero_point").data.float()
        del module.input_zero_point
        low, high = ((LOWEST - zero) * scale).amin(), ((LARGEST - zero) * scale).amax()
        step = (high - low) / (LARGEST - LOWEST)
        return torch.stack((step, (LOWEST - low / step).round()))

    def rounded(self, module: Any) -> RoundedWeight | None:
        """See ``SupportsExperts``: not with static scales, of which every expert has another one."""
        if self.rounding.static:
            return None
        weight, scale = module.weight.data, module.weight_scale.data
        sums = None if module.weight_sum is None else module.weight_sum.data
        return RoundedWeight(weight, scale, self.product, sums=sums)

    def packed(self, module: Any) -> PackedWeight | None:
        """See ``SupportsExperts``."""
        weight, scale = module.weight.data, module.weight_scale.data[:, None]
        inputs = weight.shape[1]
        return PackedWeight.pack(
            lambda begin, end: weight[begin:end], scale, inputs, inputs, self.dtype, INT8
        )

    def apply(self, module: Any, x: Tensor, bias: Tensor | None, *, gated: bool = False) -> Tensor:
        if not self.uses_product:
            return super().apply(module, ops.silu_and_mul(x) if gated else x, bias)
        return self.product.mm_rows(
            x, module.weight, module.weight_scale, bias, module.input_scale,
            sums=module.weight_sum, gated=gated,
        )  # fmt: skip

    def apply_gated(self, module: Any, x: Tensor, bias: Tensor | None) -> Tensor:
        return self.apply(module, x, bias, gated=True)
