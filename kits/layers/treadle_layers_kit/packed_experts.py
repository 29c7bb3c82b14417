"""The matrices of all experts in the layout of ``treadle_layers_kit.packed_layout``, by whatever kernel is offered.

A kernel reads the experts that were chosen, each code once, and nothing asks the device who they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain
from math import gcd

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from treadle_layers_kit.fusion import Site
from treadle_layers_kit.int4 import PackedInt4
from treadle_layers_kit.int4_layout import BIAS
from treadle_layers_kit.packed import PackedWeight
from treadle_layers_kit.packed_layout import WHOLE, Levels, unpack
from treadle_layers_kit.packed_order import reorder_experts
from treadle_layers_kit.rounded_inputs import SupportsExperts

__all__ = (
    "STACKS",
    "PackedExperts",
    "apply_packed",
    "as_packed",
    "biases_of",
    "packed_experts",
)

STACKS = ("gate_up", "down")
STEPS = ("scales", "offsets", "factors")

Operation = Callable[..., Tensor]


def packed_experts(
    x: Tensor,
    topk_ids: Tensor,
    codes: Tensor,
    scales: Tensor | None,
    offsets: Tensor | None,
    factors: Tensor | None,
    levels: Levels,
    inputs: int,
    group: int,
    bias: Tensor | None = None,
) -> Tensor:
    """The operation of ``treadle_layers_kit.kernel_ops``, by torch's own: each expert is unpacked for all rows."""
    flat = topk_ids.reshape(-1, 1)
    rows = x.repeat_interleave(len(flat) // max(1, len(x)), dim=0)
    y = x.new_zeros(len(flat), codes.shape[2])
    for expert in range(len(codes)):
        scale, offset, factor = (
            None if t is None else t[expert] for t in (scales, offsets, factors)
        )
        weight = unpack(codes[expert], scale, offset, factor, levels, inputs, group)
        shift = None if bias is None else bias[expert]
        y = torch.where(flat.eq(expert), F.linear(rows, weight.to(x.dtype), shift), y)
    return y


class PackedExperts(nn.Module):
    """One matrix of each expert; a module of ``Experts``. ``order`` int32 ``[experts, inputs]``: where these lie in a row."""

    order: Tensor | None

    def __init__(self, first: PackedWeight, experts: int) -> None:
        """Room for as many as ``first``, which ``put`` fills."""
        super().__init__()
        for name in ("codes", *STEPS):
            tensor = getattr(first, name)
            room = None if tensor is None else tensor.new_empty(experts, *tensor.shape)
            parameter = None if room is None else nn.Parameter(room, requires_grad=False)
            self.register_parameter(name, parameter)
        order = first.order
        room = None if order is None else order.new_empty((experts, len(order)), dtype=torch.int32)
        self.register_buffer("order", room, persistent=False)
        self.levels, self.inputs, self.group = first.levels, first.inputs, first.group
        self.op: Operation = packed_experts
        self.reorder_op: Operation = reorder_experts

    @classmethod
    def stack(cls, weights: Iterable[PackedWeight | None], experts: int) -> PackedExperts | None:
        """``None`` if a matrix is not packed, or not as the first one is."""
        weights = iter(weights)
        first = next(weights, None)
        weights = chain((first,), weights)
        if first is not None and first.order is not None:
            weights = alike(list(weights))
        stacked: PackedExperts | None = None
        for expert, weight in enumerate(weights):
            if weight is None:
                return None
            stacked = stacked or cls(weight, experts)
            if not stacked.put(expert, weight):
                return None
        return stacked

    def put(self, expert: int, weight: PackedWeight) -> bool:
        """Store the matrix of an expert; false if it is not packed as the others are."""
        if (weight.levels, weight.inputs, weight.group) != (self.levels, self.inputs, self.group):
            return False
        for name in ("codes", *STEPS, "order"):
            source, room = getattr(weight, name), getattr(self, name)
            if (source is None) != (room is None):
                return False
            if source is None:
                continue
            is_same_type = source.dtype == room.dtype or name == "order"
            if not is_same_type or source.shape != room.shape[1:]:
                return False
            room.data[expert] = source
        return True

    def forward(self, x: Tensor, topk_ids: Tensor, bias: Tensor | None = None) -> Tensor:
        """A row of ``x`` for each token, or for each choice, to ``[choices, out]``; ``bias`` ``[experts, out]``."""
        if self.order is not None:
            x = self.reorder_op(x, topk_ids, self.order)
        steps = (self.scales, self.offsets, self.factors)
        sizes = (self.levels, self.inputs, self.group)
        return self.op(x, topk_ids, self.codes, *steps, *sizes, bias)

    def kernel_sites(self, path: str) -> Iterator[Site]:
        experts, _, out, _ = self.get_parameter("codes").shape
        sizes = {"in_features": self.inputs, "out_features": out}
        sizes |= {"experts": experts, "group": self.group}
        sizes["bits"] = 8 if isinstance(self.levels, str) else 4
        yield Site(path, ("packed_experts",), (sizes,), partial(setattr, self, "op"))
        if self.order is not None:
            sizes = {"experts": experts, "places": self.inputs}
            yield Site(path, ("reorder_experts",), (sizes,), partial(setattr, self, "reorder_op"))


def as_packed(linear: nn.Module, dtype: torch.dtype) -> PackedWeight | None:
    """The weight of a linear layer of ``dtype``, if its method has repacked it or can."""
    method = getattr(linear, "method", None)
    if isinstance(method, SupportsExperts) and method.uses_product:
        return method.packed(linear)
    for child in linear.children():
        if isinstance(child, PackedWeight):
            return child
        if isinstance(child, PackedInt4):
            return _of_int4(child, dtype, None if child.in_order else linear.get_buffer("order"))
    return None


def _of_int4(weight: PackedInt4, dtype: torch.dtype, order: Tensor | None) -> PackedWeight:
    """The layout of the codes is the same; steps have the scale in the upper half, and the zero."""
    halves = weight.scales.data.view(torch.int16).unflatten(1, (-1, 2))
    zeros = -halves[..., 0].view(dtype).float() - BIAS[dtype]
    scales = halves[..., 1].view(torch.float16).contiguous()
    offsets = -zeros * scales.float()
    return PackedWeight(
        weight.codes.data, scales, offsets, None, WHOLE, weight.inputs, weight.group, order
    )


def alike(weights: list[PackedWeight | None]) -> list[PackedWeight | None]:
    """Bring weights with inputs in orders of their own into as many places, of groups of one size.

    Ranks that share the inputs have another number of each group's in every expert.
    """
    found = [weight for weight in weights if weight is not None and weight.order is not None]
    kinds = {(weight.inputs, weight.group) for weight in found}
    if len(found) < len(weights) or len(kinds) == 1:
        return weights
    group = gcd(*(size for _, size in kinds))
    inputs = max(places for places, _ in kinds)
    return [weight.regrouped(group, inputs) for weight in found]


def biases_of(module: nn.Module) -> Iterator[Tensor | None]:
    """Yield the biases ``[experts, out]`` of both stacks of ``Experts``."""
    return (getattr(module, f"{stack}_bias", None) for stack in STACKS)


def apply_packed(
    module: nn.Module, x: Tensor, topk_ids: Tensor, activation: Callable[[Tensor], Tensor]
) -> Tensor:
    """``[tokens, k, hidden]`` by the ``PackedExperts`` that are modules of ``module``."""
    gate_up, down = (module.get_submodule(f"packed_{stack}") for stack in STACKS)
    first, second = biases_of(module)
    y: Tensor = down(activation(gate_up(x, topk_ids, first)), topk_ids, second)
    return y.view(*topk_ids.shape, y.shape[1])
