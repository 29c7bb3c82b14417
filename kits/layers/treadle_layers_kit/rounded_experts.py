"""The matrices of all experts as the checkpoint has them, in 8 bits, multiplied by activations that are rounded, too.

One product multiplies the rows of each expert by its matrix. Nothing is unpacked, and nothing asks the device who was
chosen. Where the device has no such product, there is none of these; see ``treadle_layers_kit.packed_experts``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from treadle_layers_kit.dequantized import replace_parameter
from treadle_layers_kit.packed_experts import STACKS
from treadle_layers_kit.plain_experts import Gated
from treadle_layers_kit.rounded_inputs import RoundedWeight, SupportsExperts

__all__ = ("RoundedExperts", "apply_rounded", "as_rounded")


class RoundedExperts(nn.Module):
    """One matrix of each expert; a module of ``Experts``."""

    weight: Tensor
    scale: Tensor
    sums: Tensor | None
    static: Tensor | None

    def __init__(self, weights: list[RoundedWeight]) -> None:
        super().__init__()
        first = weights[0]
        self.product, self.limit = first.product, first.limit
        replace_parameter(self, "weight", torch.stack([w.weight for w in weights]))
        replace_parameter(self, "scale", torch.stack([w.scale for w in weights]))
        sums = [w.sums for w in weights if w.sums is not None]
        static = [w.static for w in weights if w.static is not None]
        self.register_buffer("sums", torch.stack(sums) if sums else None, persistent=False)
        # A token is rounded once for all of its experts, and the largest scale cuts nothing off.
        largest = torch.stack(static).amax() if static else None
        self.register_buffer("static", largest, persistent=False)

    @classmethod
    def stack(
        cls, weights: Iterable[RoundedWeight | None], dtype: torch.dtype
    ) -> RoundedExperts | None:
        """For activations of ``dtype``; ``None`` if there is no product, or a matrix is not as the first one is."""
        found: list[RoundedWeight] = []
        for weight in weights:
            if weight is None:
                return None
            found.append(weight)
        if len({_kind(weight) for weight in found}) != 1:
            return None
        stacked = cls(found)
        is_supported = stacked.product.supports_experts(
            stacked.weight, stacked.scale, dtype, has_zero=stacked.sums is not None
        )
        return stacked if is_supported else None

    def forward(self, x: Tensor, grouping: Any, *, gated: bool = False) -> Tensor:
        """A row of ``x`` for each token, or for each choice, to ``[choices, out]``; ``gated``: of ``ops.silu_and_mul(x)``."""
        weight, rounding = (self.weight, self.scale), (self.static, self.limit)
        return self.product.mm_experts(x, grouping, *weight, *rounding, sums=self.sums, gated=gated)


def as_rounded(linear: nn.Module) -> RoundedWeight | None:
    """Return the weight of a linear layer whose inputs are rounded, if other experts may have its product, too."""
    method = getattr(linear, "method", None)
    if isinstance(method, SupportsExperts) and method.uses_product:
        return method.rounded(linear)
    return None


def _kind(weight: RoundedWeight) -> tuple[object, ...]:
    tensors = weight.weight, weight.scale, weight.static, weight.sums
    described = tuple(None if t is None else (t.dtype, t.shape) for t in tensors)
    return (*described, weight.product, weight.limit)


def apply_rounded(
    module: nn.Module, x: Tensor, topk_ids: Tensor, activation: Gated, *, is_silu: bool
) -> Tensor:
    """``[tokens, k, hidden]`` by the ``RoundedExperts`` that are modules of ``module``; ``is_silu``: what ``activation`` is."""
    gate_up, down = (getattr(module, f"rounded_{stack}") for stack in STACKS)
    grouping = gate_up.product.group(topk_ids, gate_up.scale)
    y: Tensor = gate_up(x, grouping)
    y = down(y, grouping, gated=True) if is_silu else down(activation(y), grouping)
    return y.view(*topk_ids.shape, y.shape[1])
