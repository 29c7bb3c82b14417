"""Layers of transformers exchanged for treadle's: quantized, divided over ranks, loaded by parts.

How a model is divided is what its configuration's ``base_model_tp_plan`` says.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from treadle.api.models import ModelContext
from treadle.errors import UnsupportedModelError
from treadle_layers_kit import (
    Embedding,
    Experts,
    Linear,
    LMHead,
    Shard,
    SingleRankCommunicator,
    shard_heads,
)
from treadle_layers_kit.mlp import ACTIVATIONS
from treadle_transformers.attention import Call
from treadle_transformers.support import refusal
from treadle_transformers.weight_names import expert_names

__all__ = ("TPPlan", "replace_layers")

COLUMN = frozenset({"colwise", "packed_colwise", "colwise_gather_output"})
ROW = frozenset({"rowwise", "packed_rowwise", "rowwise_split_input"})
WHOLE = frozenset({"replicated_with_grad_allreduce", "mla_kv_a_proj"})
EXPERTS = frozenset({"moe_tp_experts"})
EMBEDDINGS = frozenset({"embedding_rowwise"})


class TPPlan:
    """Styles of ``base_model_tp_plan`` by module path. One rank needs none, and has an empty one.

    Raises ``UnsupportedModelError`` when several ranks ask for a plan that cannot be followed.
    """

    def __init__(self, ctx: ModelContext, architecture: str, decoder_path: str) -> None:
        self.architecture, self.size = architecture, ctx.tp_group.world_size
        self.rules: list[tuple[re.Pattern[str], str]] = []
        if self.size == 1:
            return
        plan: Mapping[str, str] = getattr(ctx.hf_config, "base_model_tp_plan", None) or {}
        if not plan:
            raise self.refused("transformers has no plan of how to divide it")
        styles = COLUMN | ROW | WHOLE | EXPERTS | EMBEDDINGS
        for pattern, style in plan.items():
            if style not in styles:
                raise self.refused(f"transformers divides {pattern} by {style!r}")
            path = re.escape(f"{decoder_path}.{pattern}").replace(r"\*", "[^.]+")
            self.rules.append((re.compile(path), style))

    def style(self, path: str) -> str | None:
        """How the module or parameter ``path`` is divided; ``None``: every rank has all of it."""
        return next((style for rule, style in self.rules if rule.fullmatch(path)), None)

    def refused(self, reason: str) -> UnsupportedModelError:
        return UnsupportedModelError(
            f"treadle-transformers cannot divide {self.architecture} over {self.size} devices: {reason}; "
            "set tensor_parallel_size to 1"
        )

    def check(self, model: nn.Module) -> None:
        """Raise for a style of something that is not a layer which treadle divides."""
        parameter_paths = {
            f"{path}.{name}" if path else name
            for path, module in model.named_modules()
            if not isinstance(module, (Linear, Embedding, Experts))
            for name, _ in module.named_parameters(recurse=False)
        }
        for path in parameter_paths:
            for candidate in (path, path.rpartition(".")[0]):
                if self.style(candidate) in COLUMN | ROW:
                    raise self.refused(f"{path} is divided and is not a linear layer")


class Gathered(Linear):
    """Divides its outputs and gives every rank all of them."""

    def forward(self, x: Tensor) -> Tensor:
        return self.tp_group.all_gather(super().forward(x), dim=-1)


class Split(Linear):
    """Takes this rank's share of inputs that every rank has."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.narrow(-1, self.inputs.start, self.inputs.size))


class RoutedExperts(Experts):
    """Experts that are called as those of transformers are."""

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        return super().forward(hidden_states, top_k_index, top_k_weights.float())


def replace_layers(
    ctx: ModelContext, model: Any, plan: TPPlan, calls: Mapping[str, Call]
) -> dict[str, ModelContext]:
    """Put treadle's layers in the place of linear layers, the embedding, the head and experts.

    Returns the context of each attention layer: one of the ranks, or of none where every rank
    computes all heads.
    """
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    tied = embedding is not None and head is not None and head.weight is embedding.weight
    vocab_embedding: Embedding | None = None
    if type(embedding) is nn.Embedding:
        vocab_embedding = Embedding(ctx, embedding.num_embeddings, embedding.embedding_dim)
        _put(model, _path(model, embedding), vocab_embedding)
    if type(head) is nn.Linear and (vocab_embedding is not None or not tied):
        path = _path(model, head)
        shared = vocab_embedding if tied else None
        biased = head.bias is not None
        _put(
            model, path,
            LMHead(ctx, path, head.in_features, head.out_features, bias=biased, tied=shared),
        )  # fmt: skip
    for path, module in list(model.named_modules()):
        if type(module) is nn.Linear and module is not head:
            _put(model, path, _linear(ctx, model, path, module, plan, calls))
        elif hasattr(module, "is_transposed") and hasattr(module, "has_gate"):
            _put(model, path, _experts(ctx, model, path, module, plan))
    plan.check(model)
    return {path: _context(ctx, model, path, plan) for path in calls}


def _linear(
    ctx: ModelContext,
    model: Any,
    path: str,
    linear: nn.Linear,
    plan: TPPlan,
    calls: Mapping[str, Call],
) -> Linear:
    style = plan.style(path)
    layer_type, split = Linear, None
    if style in COLUMN:
        layer_type, split = (Gathered if style == "colwise_gather_output" else Linear), "column"
    elif style in ROW:
        layer_type, split = (Split if style == "rowwise_split_input" else Linear), "row"
    outputs: int | list[int | Shard] = linear.out_features
    parent, _, last = path.rpartition(".")
    if style == "packed_colwise":
        outputs = [linear.out_features // 2] * 2
    elif style == "packed_rowwise":
        raise plan.refused(f"transformers divides {path} by {style!r}")
    elif style == "colwise" and parent in calls and last in ("k_proj", "v_proj"):
        call = calls[parent]
        size = call.head_size if last == "k_proj" else call.value_size
        outputs = [shard_heads(ctx.tp_group, call.heads, call.kv_heads, size)[1]]
    direction: Literal["column", "row"] | None = split  # type: ignore[assignment]
    return layer_type(
        ctx,
        path,
        linear.in_features,
        outputs,
        bias=linear.bias is not None,
        split=direction,
        dtype=torch.float32 if stays_float32(model, f"{path}.weight") else None,
    )


def _experts(ctx: ModelContext, model: Any, path: str, experts: Any, plan: TPPlan) -> nn.Module:
    """Ours, if the experts are plain gated MLPs; else theirs, whole and unquantized."""
    from transformers.activations import ACT2FN
    from transformers.integrations.moe import _default_apply_gate

    config = model.config
    act = str(getattr(config, "hidden_act", None))
    is_gated_mlp = experts.has_gate and experts.is_concatenated and not experts.is_transposed
    is_gated_mlp = (
        is_gated_mlp
        and not experts.has_bias
        and not getattr(experts, "has_post_expert_norm", False)
    )
    is_gated_mlp = (
        is_gated_mlp and type(experts)._apply_gate is _default_apply_gate and act in ACTIVATIONS
    )
    is_gated_mlp = is_gated_mlp and type(getattr(experts, "act_fn", None)) is type(ACT2FN[act])
    if is_gated_mlp:
        count, fused_size, hidden = experts.gate_up_proj.shape
        return RoutedExperts(
            ctx,
            path,
            count,
            hidden,
            fused_size // 2,
            activation=act,
            names=expert_names(type(model), config),
        )
    if ctx.tp_group.world_size > 1:
        raise plan.refused(f"its experts ({path}) are not plain gated MLPs")
    if ctx.quantization is not None:
        raise refusal(plan.architecture, f"its experts ({path}) cannot be quantized")
    return experts  # type: ignore[no-any-return]


def _context(ctx: ModelContext, model: nn.Module, path: str, plan: TPPlan) -> ModelContext:
    """Attention is divided where its projections are, and their outputs are not gathered."""
    children = model.get_submodule(path).named_children()
    styles = {plan.style(f"{path}.{name}") for name, _ in children}
    if ctx.tp_group.world_size == 1 or styles & {"colwise", "packed_colwise"}:
        return ctx
    return replace(ctx, tp_group=SingleRankCommunicator())


def stays_float32(model: Any, path: str) -> bool:
    """Whether transformers keeps a parameter in float32 whatever the model's dtype."""
    patterns = getattr(model, "_keep_in_fp32_modules_strict", None) or ()
    return any(re.search(rf"(^|\.){re.escape(name)}(\.|$)", path) for name in patterns)


def _path(model: nn.Module, target: nn.Module) -> str:
    return str(next(path for path, module in model.named_modules() if module is target))


def _put(model: nn.Module, path: str, module: nn.Module) -> None:
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, module)
