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
from treadle.layers import Shard, SingleRankCommunicator, shard_heads
from treadle_layers_kit import Embedding, Experts, Linear, LMHead
from treadle_layers_kit.mlp import ACTIVATIONS
from treadle_transformers.attention import Call
from treadle_transformers.names import expert_names
from treadle_transformers.support import refusal

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

    def __init__(self, ctx: ModelContext, architecture: str, home: str) -> None:
        self.architecture, self.size = architecture, ctx.tp_group.world_size
        self.rules: list[tuple[re.Pattern[str], str]] = []
        if self.size == 1:
            return
        plan: Mapping[str, str] = getattr(ctx.hf_config, "base_model_tp_plan", None) or {}
        if not plan:
            raise self.refused("transformers has no plan of how to divide it")
        known = COLUMN | ROW | WHOLE | EXPERTS | EMBEDDINGS
        for pattern, style in plan.items():
            if style not in known:
                raise self.refused(f"transformers divides {pattern} by {style!r}")
            path = re.escape(f"{home}.{pattern}").replace(r"\*", "[^.]+")
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
        owned = {
            f"{path}.{name}" if path else name
            for path, module in model.named_modules()
            if not isinstance(module, (Linear, Embedding, Experts))
            for name, _ in module.named_parameters(recurse=False)
        }
        for path in owned:
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
    ours: Embedding | None = None
    if type(embedding) is nn.Embedding:
        ours = Embedding(ctx, embedding.num_embeddings, embedding.embedding_dim)
        _put(model, _path(model, embedding), ours)
    if type(head) is nn.Linear and (ours is not None or not tied):
        path = _path(model, head)
        shared = ours if tied else None
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
    given: nn.Linear,
    plan: TPPlan,
    calls: Mapping[str, Call],
) -> Linear:
    style = plan.style(path)
    kind, split = Linear, None
    if style in COLUMN:
        kind, split = (Gathered if style == "colwise_gather_output" else Linear), "column"
    elif style in ROW:
        kind, split = (Split if style == "rowwise_split_input" else Linear), "row"
    outputs: int | list[int | Shard] = given.out_features
    home, _, last = path.rpartition(".")
    if style == "packed_colwise":
        outputs = [given.out_features // 2] * 2
    elif style == "packed_rowwise":
        raise plan.refused(f"transformers divides {path} by {style!r}")
    elif style == "colwise" and home in calls and last in ("k_proj", "v_proj"):
        call = calls[home]
        size = call.head_size if last == "k_proj" else call.value_size
        outputs = [shard_heads(ctx.tp_group, call.heads, call.kv_heads, size)[1]]
    direction: Literal["column", "row"] | None = split  # type: ignore[assignment]
    return kind(
        ctx,
        path,
        given.in_features,
        outputs,
        bias=given.bias is not None,
        split=direction,
        dtype=torch.float32 if stays_float32(model, f"{path}.weight") else None,
    )


def _experts(ctx: ModelContext, model: Any, path: str, given: Any, plan: TPPlan) -> nn.Module:
    """Ours, if the experts are plain gated MLPs; else theirs, whole and unquantized."""
    from transformers.activations import ACT2FN
    from transformers.integrations.moe import _default_apply_gate

    config = model.config
    act = str(getattr(config, "hidden_act", None))
    plain = given.has_gate and given.is_concatenated and not given.is_transposed
    plain = plain and not given.has_bias and not getattr(given, "has_post_expert_norm", False)
    plain = plain and type(given)._apply_gate is _default_apply_gate and act in ACTIVATIONS
    plain = plain and type(getattr(given, "act_fn", None)) is type(ACT2FN[act])
    if plain:
        count, twice, hidden = given.gate_up_proj.shape
        return RoutedExperts(
            ctx,
            path,
            count,
            hidden,
            twice // 2,
            activation=act,
            names=expert_names(type(model), config),
        )
    if ctx.tp_group.world_size > 1:
        raise plan.refused(f"its experts ({path}) are not plain gated MLPs")
    if ctx.quantization is not None:
        raise refusal(plan.architecture, f"its experts ({path}) cannot be quantized")
    return given  # type: ignore[no-any-return]


def _context(ctx: ModelContext, model: nn.Module, path: str, plan: TPPlan) -> ModelContext:
    """Attention is divided where its projections are, and their outputs are not gathered."""
    inside = model.get_submodule(path).named_children()
    styles = {plan.style(f"{path}.{name}") for name, _ in inside}
    if ctx.tp_group.world_size == 1 or styles & {"colwise", "packed_colwise"}:
        return ctx
    return replace(ctx, tp_group=SingleRankCommunicator())


def stays_float32(model: Any, path: str) -> bool:
    """Whether transformers keeps a parameter in float32 whatever the model's dtype."""
    kept = getattr(model, "_keep_in_fp32_modules_strict", None) or ()
    return any(re.search(rf"(^|\.){re.escape(name)}(\.|$)", path) for name in kept)


def _path(model: nn.Module, wanted: nn.Module) -> str:
    return str(next(path for path, module in model.named_modules() if module is wanted))


def _put(model: nn.Module, path: str, module: nn.Module) -> None:
    home, _, name = path.rpartition(".")
    setattr(model.get_submodule(home), name, module)
