"""Mixtures of experts: a router that picks a few of many gated MLPs for each token.

The experts of a layer are two stacked parameters; how they are stored and multiplied is left to a
method, as with ``Linear``. Every rank holds a share of the inner features of every expert, so that
ranks are equally busy whatever the router picks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.api.models import ExpertsMethod, ExpertsSpec, LinearSpec, ModelContext
from weft.errors import ConfigError, UnsupportedModelError
from weft.layers.collective import divide
from weft.layers.linear import Linear
from weft.layers.mlp import gated_activation
from weft.layers.weight import Part, Slot, bind, weight

__all__ = ("Experts", "MoE", "PlainExperts")

Gated = Callable[[Tensor], Tensor]

# Up to this many tokens a product with every expert is limited by reading the weights, not by the
# arithmetic, on GPUs from Ampere to Hopper (some 200 operations for each byte read).
DENSE = 256
# A gather reads the matrices, writes the copies and reads those.
GATHER_COST = 3


class MoE(nn.Module):
    """``[tokens, hidden] -> [tokens, hidden]``: the weighted sum of ``chosen`` experts of many.

    Weights are the softmax over all experts; ``normalised`` makes those of the chosen ones sum
    to one. ``names`` are the last components of the checkpoint's gate, up and down matrices.
    """

    def __init__(
        self,
        ctx: ModelContext,
        prefix: str,
        *,
        hidden_size: int,
        intermediate_size: int,
        experts: int,
        chosen: int,
        normalised: bool = True,
        activation: str = "silu",
        names: Sequence[str] = ("gate_proj", "up_proj", "down_proj"),
    ) -> None:
        super().__init__()
        if not 0 < chosen <= experts:
            raise ConfigError(
                f"the configuration says that each token uses {chosen} of {experts} experts; "
                f"allowed: 1 to {experts}"
            )
        self.gate = Linear(ctx, f"{prefix}.gate", hidden_size, experts)
        self.experts = Experts(
            ctx,
            f"{prefix}.experts",
            experts,
            hidden_size,
            intermediate_size,
            activation=activation,
            names=names,
        )
        self.chosen, self.normalised = chosen, normalised

    def forward(self, x: Tensor) -> Tensor:
        scores = self.gate(x).float().softmax(dim=-1)
        weights, chosen = scores.topk(self.chosen, dim=-1)
        if self.normalised:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        y: Tensor = self.experts(x, chosen, weights)
        return y


class Experts(nn.Module):
    """Gated MLPs of one shape, without biases.

    Checkpoints hold three matrices for each expert, ``INDEX.NAME.weight`` with the ``names`` of
    gate, up and down, or all of them stacked in ``gate_up_proj`` and ``down_proj`` as transformers 5
    keeps them in memory. Raises ``UnsupportedModelError`` for a quantization without a method.
    """

    def __init__(
        self,
        ctx: ModelContext,
        prefix: str,
        experts: int,
        hidden_size: int,
        intermediate_size: int,
        *,
        activation: str = "silu",
        names: Sequence[str] = ("gate_proj", "up_proj", "down_proj"),
    ) -> None:
        super().__init__()
        self.ranks = ctx.ranks
        inner = divide(ctx.ranks, intermediate_size, prefix)
        self.places = dict(
            zip(names, (("gate_up", 0), ("gate_up", 1), ("down", None)), strict=True)
        )
        spec = ExpertsSpec(
            prefix=prefix,
            names=tuple(f"{prefix}.0.{name}" for name in names),
            experts=experts,
            hidden_size=hidden_size,
            intermediate_size=inner.size,
            dtype=ctx.dtype,
        )
        self.op = gated_activation(activation)
        self.method = _method(ctx, spec)
        self.method.create(self, spec)
        hidden = Part.whole(hidden_size)
        for name, parameter in self.named_parameters():
            if name.startswith("gate_up_"):
                bind([parameter], (inner, inner), hidden)
            else:
                bind([parameter], (hidden,), inner)

    def locate(self, rest: str) -> Slot | None:
        """The slot of ``INDEX.NAME.LEAF``, or of a tensor that holds all experts."""
        if rest in ("gate_up_proj", "down_proj"):
            return Slot(rest.replace("_proj", "_weight"))
        index, _, leaf = rest.partition(".")
        name, _, leaf = leaf.rpartition(".")
        if name not in self.places or not index.isdecimal():
            return None
        matrix, part = self.places[name]
        parameter = self._parameters.get(f"{matrix}_{leaf}")
        if parameter is None or int(index) >= parameter.shape[0]:
            return None
        return Slot(f"{matrix}_{leaf}", part, int(index))

    def finish(self) -> None:
        """Called once by the loader, when all parameters are filled."""
        self.method.finish(self)

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """``x [tokens, hidden]``; ``chosen`` int64 and ``weights`` float32 ``[tokens, k]``."""
        y = self.method.apply(self, x, chosen, self.op)
        total = torch.einsum("tkh,tk->th", y.float(), weights).to(x.dtype)
        return self.ranks.all_reduce(total)

    def extra_repr(self) -> str:
        return type(self.method).__name__


class PlainExperts:
    """Weights in the model's dtype; the ``ExpertsMethod`` without a quantization scheme."""

    def create(self, module: nn.Module, spec: ExpertsSpec) -> None:
        """Register ``gate_up_weight [experts, 2 · inner, hidden]`` and ``down_weight``
        ``[experts, hidden, inner]``."""
        n, hidden, inner = spec.experts, spec.hidden_size, spec.intermediate_size
        for name, shape in (("gate_up", (2 * inner, hidden)), ("down", (hidden, inner))):
            parameter = weight((n, *shape), spec.dtype, output_dim=0, input_dim=1, stack=n)
            module.register_parameter(f"{name}_weight", parameter)

    def finish(self, module: nn.Module) -> None:
        """Nothing to do."""

    def apply(self, module: Any, x: Tensor, chosen: Tensor, op: Gated) -> Tensor:
        """``[tokens, k, hidden]``: what each token's experts make of it.

        On a GPU, steps of up to ``DENSE`` tokens never wait for the device, so that they can be
        captured in a graph.
        """
        gate_up, down = module.gate_up_weight, module.down_weight
        run = grouped
        if x.device.type != "cpu" and len(x) <= DENSE:
            few = GATHER_COST * chosen.numel() <= len(gate_up)
            run = gathered if few else dense
        return run(x, chosen, gate_up, down, op)


def grouped(x: Tensor, chosen: Tensor, gate_up: Tensor, down: Tensor, op: Gated) -> Tensor:
    """One product for each expert that any token chose, over the tokens that chose it."""
    tokens, k = chosen.shape
    experts, order = chosen.reshape(-1).sort(stable=True)
    rows = x.index_select(0, order // k)
    found, counts = experts.unique_consecutive(return_counts=True)
    y = torch.empty_like(rows)
    start = 0
    for expert, count in zip(found.tolist(), counts.tolist(), strict=True):
        own = slice(start, start + count)
        y[own] = F.linear(op(F.linear(rows[own], gate_up[expert])), down[expert])
        start += count
    return torch.empty_like(y).index_copy_(0, order, y).view(tokens, k, down.shape[1])


def gathered(x: Tensor, chosen: Tensor, gate_up: Tensor, down: Tensor, op: Gated) -> Tensor:
    """A copy of the matrices of each choice: the fewest bytes read where choices are few."""
    tokens, k = chosen.shape
    flat = chosen.reshape(-1)
    rows = x.repeat_interleave(k, dim=0).unsqueeze(-1)  # [tokens · k, hidden, 1]
    inner = op(torch.bmm(gate_up.index_select(0, flat), rows).squeeze(-1))
    y = torch.bmm(down.index_select(0, flat), inner.unsqueeze(-1))
    return y.view(tokens, k, down.shape[1])


def dense(x: Tensor, chosen: Tensor, gate_up: Tensor, down: Tensor, op: Gated) -> Tensor:
    """Every expert for every token; what nobody chose is dropped."""
    inner = op(torch.matmul(x, gate_up.transpose(1, 2)))  # [experts, tokens, inner]
    y = torch.bmm(inner, down.transpose(1, 2))
    return y[chosen, torch.arange(len(x), device=x.device).unsqueeze(1)]


def _method(ctx: ModelContext, spec: ExpertsSpec) -> ExpertsMethod:
    """The scheme's method. Without one, the checkpoint must have left the experts unquantized."""
    scheme = ctx.quantization
    if scheme is None:
        return PlainExperts()
    method = scheme.experts(spec)
    if method is not None:
        return method
    sizes = [(spec.hidden_size, spec.intermediate_size)] * 2
    sizes.append((spec.intermediate_size, spec.hidden_size))
    for name, (inputs, outputs) in zip(spec.names, sizes, strict=True):
        linear = LinearSpec(name, (name,), inputs, (outputs,), bias=False, dtype=spec.dtype)
        if scheme.linear(linear) is not None:
            raise UnsupportedModelError(
                f"this checkpoint is quantized with {scheme.name!r}, whose plugin has no method for "
                f"mixtures of experts ({spec.prefix}); use a checkpoint whose experts are not "
                "quantized"
            )
    return PlainExperts()
