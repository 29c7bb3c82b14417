"""Experts whose matrices are as the checkpoint has them, and the ways to multiply them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from treadle.api.models import ExpertsSpec
from treadle_layers_kit.packed_experts import STACKS, biases_of
from treadle_layers_kit.weight import empty_weight

__all__ = (
    "DENSE",
    "Gated",
    "PlainExperts",
    "apply_all_experts",
    "apply_by_expert",
    "dense_experts",
    "fused_experts",
    "gathered_experts",
    "grouped_experts",
)

Gated = Callable[[Tensor], Tensor]
Biased = Callable[[Tensor, Any], Tensor]
"""Products of rows and the experts (indices or a slice) that each row is of, to what follows the product."""

# Up to this many tokens a product with every expert is limited by reading the weights, not by the
# arithmetic, on GPUs from Ampere to Hopper (some 200 operations for each byte read).
DENSE = 256
# From more rows of each expert on, products of the vendor's, one after the other, take less time than a kernel of all.
LONG = 1024
# A gather reads the matrices, writes the copies and reads those.
GATHER_COST = 3


class PlainExperts:
    """Weights in the model's dtype; the ``ExpertsMethod`` without a quantization scheme."""

    treadle_unguarded = True

    def __init__(self, *, is_transposed: bool = False) -> None:
        self._is_transposed = is_transposed

    def create_weights(self, module: nn.Module, spec: ExpertsSpec) -> None:
        """Register ``gate_up_weight [experts, 2 · inner, hidden]`` and ``down_weight``
        ``[experts, hidden, inner]``, with ``is_transposed`` the other way round until they are loaded."""
        n, hidden, inner = spec.experts, spec.hidden_size, spec.intermediate_size
        out, inputs = (1, 0) if self._is_transposed else (0, 1)
        for name, shape in (("gate_up", (2 * inner, hidden)), ("down", (hidden, inner))):
            stored = (n, shape[out], shape[inputs])
            parameter = empty_weight(stored, spec.dtype, output_dim=out, input_dim=inputs, stack=n)
            module.register_parameter(f"{name}_weight", parameter)

    def process_weights_after_loading(self, module: nn.Module) -> None:
        """Bring the matrices of all checkpoints into one order."""
        if self._is_transposed:
            for stack in STACKS:
                weight = module.get_parameter(f"{stack}_weight")
                weight.data = weight.data.transpose(1, 2).contiguous()

    def apply(self, module: Any, x: Tensor, topk_ids: Tensor, activation: Gated) -> Tensor:
        """``[tokens, k, hidden]``: what each token's experts make of it.

        On a GPU, steps of up to ``DENSE`` tokens never wait for the device, so that they can be
        captured in a graph. With a kernel no step does, unless an expert has ``LONG`` rows and more.
        """
        gate_up, down = module.gate_up_weight, module.down_weight
        if module.fused_op is not None and topk_ids.numel() <= LONG * len(down):
            y: Tensor = module.fused_op(x, topk_ids, gate_up, down, *biases_of(module), activation)
            return y.view(*topk_ids.shape, y.shape[1])
        fn = grouped_experts
        if x.device.type != "cpu" and len(x) <= DENSE:
            is_sparse = GATHER_COST * topk_ids.numel() <= len(gate_up)
            fn = gathered_experts if is_sparse else dense_experts
        first, second = (_adds(bias) for bias in biases_of(module))
        return fn(x, topk_ids, gate_up, down, lambda y, e: activation(first(y, e)), second)


def fused_experts(
    x: Tensor,
    topk_ids: Tensor,
    gate_up: Tensor,
    down: Tensor,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    activation: Gated,
) -> Tensor:
    """The operation of ``treadle_layers_kit.kernel_ops``, by torch's own: every expert for every token."""
    first, second = _adds(gate_up_bias), _adds(down_bias)
    y = dense_experts(x, topk_ids, gate_up, down, lambda y, e: activation(first(y, e)), second)
    return y.flatten(0, 1)


def _adds(bias: Tensor | None) -> Biased:
    return (lambda y, experts: y) if bias is None else (lambda y, experts: y + bias[experts])


def grouped_experts(
    x: Tensor, topk_ids: Tensor, gate_up: Tensor, down: Tensor, op: Biased, end: Biased
) -> Tensor:
    """One product for each expert that any token chose, over the tokens that chose it."""

    def run(expert: int, rows: Tensor) -> Tensor:
        inner = op(F.linear(rows, gate_up[expert]), expert)
        return end(F.linear(inner, down[expert]), expert)

    return apply_by_expert(x, topk_ids, run)


def apply_by_expert(x: Tensor, topk_ids: Tensor, fn: Callable[[int, Tensor], Tensor]) -> Tensor:
    """``fn(expert, rows)`` for each expert that any token chose, on the tokens that chose it."""
    tokens, k = topk_ids.shape
    experts, order = topk_ids.reshape(-1).sort(stable=True)
    rows = x.index_select(0, order // k)
    expert_ids, counts = experts.unique_consecutive(return_counts=True)
    y = torch.empty_like(rows)
    start = 0
    for expert, count in zip(expert_ids.tolist(), counts.tolist(), strict=True):
        expert_rows = slice(start, start + count)
        y[expert_rows] = fn(expert, rows[expert_rows])
        start += count
    return torch.empty_like(y).index_copy_(0, order, y).view(tokens, k, x.shape[1])


def apply_all_experts(
    x: Tensor, topk_ids: Tensor, fn: Callable[[int, Tensor], Tensor], experts: int
) -> Tensor:
    """The result of ``apply_by_expert`` without asking the device who was chosen."""
    y = x.new_zeros(*topk_ids.shape, x.shape[1])
    for expert in range(experts):
        y = torch.where(topk_ids.eq(expert)[..., None], fn(expert, x)[:, None], y)
    return y


def gathered_experts(
    x: Tensor, topk_ids: Tensor, gate_up: Tensor, down: Tensor, op: Biased, end: Biased
) -> Tensor:
    """A copy of the matrices of each choice: the fewest bytes read where choices are few."""
    tokens, k = topk_ids.shape
    flat_ids = topk_ids.reshape(-1)
    rows = x.repeat_interleave(k, dim=0).unsqueeze(-1)  # [tokens · k, hidden, 1]
    inner = op(torch.bmm(gate_up.index_select(0, flat_ids), rows).squeeze(-1), flat_ids)
    y = torch.bmm(down.index_select(0, flat_ids), inner.unsqueeze(-1)).squeeze(-1)
    return end(y, flat_ids).view(tokens, k, down.shape[1])


def dense_experts(
    x: Tensor, topk_ids: Tensor, gate_up: Tensor, down: Tensor, op: Biased, end: Biased
) -> Tensor:
    """Every expert for every token; what nobody chose is dropped."""
    everyone = torch.arange(len(down), device=x.device).unsqueeze(1)
    inner = op(torch.matmul(x, gate_up.transpose(1, 2)), everyone)  # [experts, tokens, inner]
    y = end(torch.bmm(inner, down.transpose(1, 2)), everyone)
    return y[topk_ids, torch.arange(len(x), device=x.device).unsqueeze(1)]
