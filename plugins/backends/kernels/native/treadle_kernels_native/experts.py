"""The operation ``fused_experts`` on a CPU: rows of each expert are multiplied by its matrices in the library."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

from treadle_kernels_native.linears import NativeLinears
from treadle_layers_kit.plain_experts import apply_by_expert

__all__ = ("NativeExperts",)


class NativeExperts:
    """For matrices in the type of the activations. Used by one thread at a time."""

    def __init__(self, isa: str = "auto") -> None:
        self._native = NativeLinears(isa)

    def __call__(
        self,
        x: Tensor,
        topk_ids: Tensor,
        gate_up: Tensor,
        down: Tensor,
        gate_up_bias: Tensor | None,
        down_bias: Tensor | None,
        activation: Callable[[Tensor], Tensor],
    ) -> Tensor:
        """See ``treadle_layers_kit.kernel_ops``."""

        def product(weight: Tensor, bias: Tensor | None, rows: Tensor) -> Tensor:
            y = self._native.multiply(weight, rows)
            y = F.linear(rows, weight) if y is None else y
            return y if bias is None else y + bias

        def run(expert: int, rows: Tensor) -> Tensor:
            biases = (None if b is None else b[expert] for b in (gate_up_bias, down_bias))
            first, second = biases
            y = activation(product(gate_up[expert], first, rows))
            return product(down[expert], second, y)

        return apply_by_expert(x, topk_ids, run).flatten(0, 1)
