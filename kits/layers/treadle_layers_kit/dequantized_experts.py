"""Experts whose matrices stay as small as they are stored, each dequantized when a token chose it."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from treadle.api.models import ExpertsSpec
from treadle_layers_kit.packed import PackedWeight
from treadle_layers_kit.packed_experts import STACKS, PackedExperts, apply_packed, biases_of
from treadle_layers_kit.plain_experts import DENSE, Gated, apply_all_experts, apply_by_expert

__all__ = ("DequantizedExperts",)


class DequantizedExperts:
    """An ``ExpertsMethod``: subclasses register their parameters and say what a matrix is.

    ``stack`` is ``gate_up`` (``[2 · inner, hidden]`` for each expert) or ``down`` (``[hidden, inner]``).
    """

    spec: ExpertsSpec

    def create_weights(self, module: nn.Module, spec: ExpertsSpec) -> None:
        self.spec = spec
        self.register(module, "gate_up", 2 * spec.intermediate_size, spec.hidden_size)
        self.register(module, "down", spec.hidden_size, spec.intermediate_size)

    def register(self, module: nn.Module, stack: str, out: int, inputs: int) -> None:
        """Register ``STACK_LEAF`` of this rank's outputs and inputs, with ``stack`` of all experts."""
        raise NotImplementedError

    def process_weights_after_loading(self, module: nn.Module) -> None:
        """Bring the loaded parameters into the form that ``matrix`` reads, then call ``repack``."""
        self.repack(module)

    def repack(self, module: nn.Module) -> None:
        """Put ``PackedExperts`` in the place of the parameters, where kernels take the device and the format."""
        for stack in STACKS:
            weights = (self.packed(module, stack, expert) for expert in range(self.spec.experts))
            stacked = PackedExperts.stack(weights, self.spec.experts)
            if stacked is None:
                return
            for name in [n for n, _ in module.named_parameters(recurse=False)]:
                if name.startswith(f"{stack}_") and not name.endswith("_bias"):
                    delattr(module, name)
            module.add_module(f"packed_{stack}", stacked)

    def packed(self, module: Any, stack: str, expert: int) -> PackedWeight | None:
        """Return one matrix for kernels, if this format can say what its codes are and ``PackedWeight.pack`` takes it."""
        return None

    def matrix(self, module: Any, stack: str, expert: int) -> Tensor:
        """Return one matrix: a new tensor, float32 ``[out, in]``."""
        raise NotImplementedError

    def apply(self, module: Any, x: Tensor, topk_ids: Tensor, activation: Gated) -> Tensor:
        """``[tokens, k, hidden]``. Few tokens on a GPU wait for nothing: all experts see them."""
        if "packed_down" in module._modules:
            return apply_packed(module, x, topk_ids, activation)

        biases = tuple(biases_of(module))

        def run(expert: int, rows: Tensor) -> Tensor:
            first, second = (None if bias is None else bias[expert] for bias in biases)
            gate_up, down = (self.matrix(module, stack, expert).to(x.dtype) for stack in STACKS)
            return F.linear(activation(F.linear(rows, gate_up, first)), down, second)

        if x.device.type != "cpu" and len(x) <= DENSE:
            return apply_all_experts(x, topk_ids, run, self.spec.experts)
        return apply_by_expert(x, topk_ids, run)
