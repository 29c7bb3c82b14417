"""Mixtures of experts: a router that picks a few of many gated MLPs for each token.

The experts of a layer are two stacked parameters; how they are stored and multiplied is left to a
method, as with ``Linear``. A quantization scheme without such a method has linear layers in their
place, two for each expert. Every rank holds a share of the inner features of every expert, so that
ranks are equally busy whatever the router picks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from treadle.api.models import ExpertsMethod, ExpertsSpec, LinearSpec, ModelContext
from treadle.errors import ConfigError, UnsupportedModelError
from treadle_layers_kit import ops
from treadle_layers_kit.collective import shard_features
from treadle_layers_kit.fusion import Site
from treadle_layers_kit.linear import Linear
from treadle_layers_kit.mlp import ClampedSwiGLU, gated_activation
from treadle_layers_kit.packed_experts import (
    STACKS,
    PackedExperts,
    apply_packed,
    as_packed,
)
from treadle_layers_kit.plain import PlainLinear
from treadle_layers_kit.plain_experts import (
    DENSE,
    Gated,
    PlainExperts,
    apply_all_experts,
    apply_by_expert,
)
from treadle_layers_kit.rounded_experts import RoundedExperts, apply_rounded, as_rounded
from treadle_layers_kit.weight import Shard, WeightTarget, empty_weight, set_shards

__all__ = ("Experts", "LinearExperts", "MoE")


class MoE(nn.Module):
    """``[tokens, hidden] -> [tokens, hidden]``: the weighted sum of ``top_k`` experts of many.

    Weights are the softmax over all experts; ``norm_topk_prob`` makes those of the chosen ones sum
    to one. ``bias`` is that of the router and of the experts; the other options are those of ``Experts``.
    The router is never quantized: writers leave it alone, and not all of them say so.
    """

    def __init__(
        self,
        ctx: ModelContext,
        prefix: str,
        *,
        hidden_size: int,
        intermediate_size: int,
        experts: int,
        top_k: int,
        norm_topk_prob: bool = True,
        activation: str | Gated = "silu",
        names: Sequence[str] = ("gate_proj", "up_proj", "down_proj"),
        bias: bool = False,
        is_interleaved: bool = False,
        is_transposed: bool = False,
    ) -> None:
        super().__init__()
        if not 0 < top_k <= experts:
            raise ConfigError(
                f"the configuration says that each token uses {top_k} of {experts} experts; "
                f"allowed: 1 to {experts}"
            )
        self.gate = Linear(
            ctx, f"{prefix}.gate", hidden_size, experts, bias=bias, method=PlainLinear()
        )
        self.experts = Experts(
            ctx,
            f"{prefix}.experts",
            experts,
            hidden_size,
            intermediate_size,
            activation=activation,
            names=names,
            bias=bias,
            is_interleaved=is_interleaved,
            is_transposed=is_transposed,
        )
        self.top_k, self.norm_topk_prob = top_k, norm_topk_prob
        self.op: Callable[[Tensor, int, bool], tuple[Tensor, Tensor]] = ops.topk_softmax

    def forward(self, x: Tensor) -> Tensor:
        topk_weights, topk_ids = self.op(self.gate(x), self.top_k, self.norm_topk_prob)
        y: Tensor = self.experts(x, topk_ids, topk_weights)
        return y

    def kernel_sites(self, path: str) -> Iterator[Site]:
        sizes = {"experts": self.gate.out_features, "k": self.top_k}
        yield Site(path, ("topk_softmax",), (sizes,), partial(setattr, self, "op"))


class Experts(nn.Module):
    """Gated MLPs of one shape.

    Checkpoints hold three matrices for each expert, ``INDEX.NAME.weight`` with the ``names`` of
    gate, up and down, or all of them stacked in ``gate_up_proj`` and ``down_proj`` as transformers 5
    keeps them in memory (not where a scheme quantizes them one by one), with what belongs to these in
    ``gate_up_proj_LEAF`` and ``down_proj_LEAF``, the biases for instance.

    ``is_interleaved``: the outputs of gate and up alternate in the stack, so ``activation`` gets them so.
    ``is_transposed``: what the checkpoint stacks without quantization is ``[experts, in, out]``.
    """

    def __init__(
        self,
        ctx: ModelContext,
        prefix: str,
        experts: int,
        hidden_size: int,
        intermediate_size: int,
        *,
        activation: str | Gated = "silu",
        names: Sequence[str] = ("gate_proj", "up_proj", "down_proj"),
        bias: bool = False,
        is_interleaved: bool = False,
        is_transposed: bool = False,
    ) -> None:
        super().__init__()
        self.tp_group = ctx.tp_group
        shard = shard_features(ctx.tp_group, intermediate_size, prefix)
        self.local_expert_ids = dict(
            zip(names, (("gate_up", 0), ("gate_up", 1), ("down", None)), strict=True)
        )
        stored_names = tuple(f"{prefix}.0.{name}" for name in names)
        if is_interleaved:
            stored_names = tuple(f"{prefix}.{stack}_proj" for stack in ("gate_up", *STACKS))
        spec = ExpertsSpec(
            prefix=prefix,
            names=stored_names,
            experts=experts,
            hidden_size=hidden_size,
            intermediate_size=shard.size,
            dtype=ctx.dtype,
        )
        self.op = gated_activation(activation) if isinstance(activation, str) else activation
        self.combine_op = ops.combine_experts
        self.fused_op: Callable[..., Tensor] | None = None
        self.hidden_size, self.intermediate_size = hidden_size, shard.size
        self.method = _method(ctx, spec, intermediate_size, is_transposed=is_transposed)
        self.method.create_weights(self, spec)
        self.gate_up_bias = self.down_bias = None
        if bias:
            _check_stacked(self.method, "biases")
            self.gate_up_bias = _bias(experts, 2 * shard.size, ctx.dtype)
            self.down_bias = _bias(experts, hidden_size, ctx.dtype)
        gate_up: tuple[Shard, ...] = (shard, shard)
        if is_interleaved:
            _check_stacked(self.method, "gate and up in one matrix")
            gate_up = (Shard(2 * shard.total, 2 * shard.start, 2 * shard.size),)
        hidden = Shard.full(hidden_size)
        for name, parameter in self.named_parameters(recurse=False):
            if name.startswith("gate_up_"):
                set_shards([parameter], gate_up, hidden)
            else:
                set_shards([parameter], (hidden,), shard)

    def locate(self, name_in_module: str) -> WeightTarget | None:
        """The slot of ``INDEX.NAME.LEAF``, or of a tensor that holds all experts."""
        if name_in_module.startswith(("gate_up_proj", "down_proj")) and "." not in name_in_module:
            stack, _, leaf = name_in_module.partition("_proj")
            fused_name = f"{stack}{leaf or '_weight'}"
            return WeightTarget(fused_name) if fused_name in self._parameters else None
        index, _, leaf = name_in_module.partition(".")
        name, _, leaf = leaf.rpartition(".")
        if name not in self.local_expert_ids or not index.isdecimal():
            return None
        matrix, shard_idx = self.local_expert_ids[name]
        if index in self._modules:
            target = f"{matrix}.{leaf}"
            parameters = dict(self._modules[index].named_parameters())  # type: ignore[union-attr]
            return WeightTarget(f"{index}.{target}", shard_idx) if target in parameters else None
        parameter = self._parameters.get(f"{matrix}_{leaf}")
        if parameter is None or int(index) >= parameter.shape[0]:
            return None
        return WeightTarget(f"{matrix}_{leaf}", shard_idx, int(index))

    def process_weights_after_loading(self) -> None:
        """Called once by the loader, when all parameters are filled."""
        self.method.process_weights_after_loading(self)
        if self.down_bias is not None and self.tp_group.rank:
            self.down_bias.data.zero_()  # the sum over the ranks has it once

    def forward(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        """``x [tokens, hidden]``; ``topk_ids`` int64 and ``topk_weights`` float32 ``[tokens, k]``."""
        y = self.method.apply(self, x, topk_ids, self.op)
        return self.tp_group.all_reduce(self.combine_op(y, topk_weights))

    def kernel_sites(self, path: str) -> Iterator[Site]:
        inner, combine = {"size": self.intermediate_size}, partial(setattr, self, "combine_op")
        yield Site(path, ("combine_experts",), ({"size": self.hidden_size},), combine)
        if isinstance(self.method, PlainExperts):
            sizes = {"in_features": self.hidden_size, "intermediate_size": self.intermediate_size}
            yield Site(path, ("fused_experts",), (sizes,), partial(setattr, self, "fused_op"))
        if self.op is ops.silu_and_mul:
            yield Site(path, ("silu_and_mul",), (inner,), partial(setattr, self, "op"))
        elif isinstance(self.op, ClampedSwiGLU):
            install = partial(setattr, self.op, "op")
            yield Site(path, ("clamped_swiglu",), (inner,), install)

    def extra_repr(self) -> str:
        return type(self.method).__name__


class Expert(nn.Module):
    """One gated MLP of two linear layers; ``down`` gives this rank's part of a sum."""

    def __init__(self, ctx: ModelContext, prefix: str, spec: ExpertsSpec, inner: int) -> None:
        super().__init__()
        gate, up, down = (name.rpartition(".")[2] for name in spec.names)
        self.gate_up = Linear(
            ctx, f"{prefix}.gate_up", spec.hidden_size, (inner, inner), split="column",
            names=(gate, up),
        )  # fmt: skip
        self.down = Linear(
            ctx, f"{prefix}.down", inner, spec.hidden_size, split="row", names=(down,), reduce=False
        )

    def forward(self, x: Tensor, op: Gated) -> Tensor:
        y: Tensor = self.down(op(self.gate_up(x)))
        return y


class LinearExperts:
    """Experts as linear layers of the checkpoint's scheme: the ``ExpertsMethod`` of every scheme
    that has none of its own. ``inner`` counts the inner features of all ranks."""

    def __init__(self, ctx: ModelContext, inner: int) -> None:
        self._ctx, self._inner = ctx, inner

    def create_weights(self, module: nn.Module, spec: ExpertsSpec) -> None:
        """Add an ``Expert`` for each index."""
        self._is_silu = getattr(module, "op", None) is ops.silu_and_mul
        for index in range(spec.experts):
            expert = Expert(self._ctx, f"{spec.prefix}.{index}", spec, self._inner)
            module.add_module(str(index), expert)

    def process_weights_after_loading(self, module: nn.Module) -> None:
        """Stack the matrices, for one product of all or for kernels; the loader has finished the linear layers."""
        experts: list[Any] = list(module.children())
        for kind, stacked in ("rounded", _stack_rounded), ("packed", _stack_packed):
            stacks = {name: stacked([getattr(e, name) for e in experts]) for name in STACKS}
            if None in stacks.values():
                continue
            for index in range(len(experts)):
                delattr(module, str(index))
            for name, matrices in stacks.items():
                module.add_module(f"{kind}_{name}", matrices)
            return

    def apply(self, module: Any, x: Tensor, topk_ids: Tensor, activation: Gated) -> Tensor:
        """``[tokens, k, hidden]``. Like ``PlainExperts``, few tokens on a GPU wait for nothing: where nothing multiplies
        stacked experts, all see them, which costs reading those that nobody chose."""
        if "rounded_down" in module._modules:
            return apply_rounded(module, x, topk_ids, activation, is_silu=self._is_silu)
        if "packed_down" in module._modules:
            return apply_packed(module, x, topk_ids, activation)
        experts = list(module.children())

        def run(index: int, rows: Tensor) -> Tensor:
            y: Tensor = experts[index](rows, activation)
            return y

        if x.device.type != "cpu" and len(x) <= DENSE:
            return apply_all_experts(x, topk_ids, run, len(experts))
        return apply_by_expert(x, topk_ids, run)


def _stack_rounded(linears: list[Any]) -> RoundedExperts | None:
    return RoundedExperts.stack(map(as_rounded, linears), linears[0].dtype)


def _stack_packed(linears: list[Any]) -> PackedExperts | None:
    return PackedExperts.stack(
        (as_packed(linear, linear.dtype) for linear in linears), len(linears)
    )


def _bias(experts: int, out: int, dtype: torch.dtype) -> nn.Parameter:
    return empty_weight((experts, out), dtype, output_dim=0, stack=experts)


def _check_stacked(method: ExpertsMethod, what: str) -> None:
    if isinstance(method, LinearExperts):
        raise UnsupportedModelError(
            f"the experts of this model have {what}, which a quantization method can only serve that stores "
            "all experts of a layer in one tensor, as mxfp4 does"
        )


def _method(
    ctx: ModelContext, spec: ExpertsSpec, inner: int, *, is_transposed: bool
) -> ExpertsMethod:
    """The scheme's method, or its linear layers if it quantizes a matrix of the first expert."""
    scheme = ctx.quantization
    if scheme is None:
        return PlainExperts(is_transposed=is_transposed)
    method = scheme.experts_method(spec)
    if method is not None:
        return method
    sizes = [(spec.hidden_size, spec.intermediate_size)] * 2
    sizes.append((spec.intermediate_size, spec.hidden_size))
    for name, (inputs, outputs) in zip(spec.names, sizes, strict=True):
        linear = LinearSpec(name, (name,), inputs, (outputs,), bias=False, dtype=spec.dtype)
        if scheme.linear_method(linear) is not None:
            return LinearExperts(ctx, inner)
    return PlainExperts(is_transposed=is_transposed)
