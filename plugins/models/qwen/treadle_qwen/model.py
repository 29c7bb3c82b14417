"""Qwen: a pre-norm decoder with grouped-query attention, rotary positions and a gated MLP.

Qwen 2 has biases on q, k and v; Qwen 3 normalises queries and keys instead. Either may have
sliding windows in some of its layers. Qwen 3 MoE is Qwen 3 with mixtures of experts.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn

from treadle.api.models import ModelContext
from treadle_layers_kit import (
    CausalDecoder,
    DecoderLayer,
    GatedMLP,
    MoE,
    RMSNorm,
    RotaryEmbedding,
    SelfAttention,
    head_size,
)

__all__ = ("Qwen2ForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM")


class QwenLayer(DecoderLayer):
    """One layer of either family."""

    def __init__(
        self,
        ctx: ModelContext,
        prefix: str,
        index: int,
        rotary: RotaryEmbedding,
        *,
        bias: bool,
        output_bias: bool,
        normalised: bool,
    ) -> None:
        config = ctx.hf_config
        size = head_size(config)
        attention = SelfAttention(
            ctx,
            f"{prefix}.self_attn",
            rotary,
            hidden_size=config.hidden_size,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_size=size,
            bias=bias,
            output_bias=output_bias,
            norm=partial(RMSNorm, ctx, size, config.rms_norm_eps) if normalised else None,
            window=_window(config, index),
        )
        super().__init__(ctx, attention, self.feed_forward(ctx, f"{prefix}.mlp", index))

    def feed_forward(self, ctx: ModelContext, prefix: str, index: int) -> nn.Module:
        config = ctx.hf_config
        return GatedMLP(
            ctx,
            prefix,
            config.hidden_size,
            config.intermediate_size,
            activation=config.hidden_act,
        )


class QwenMoELayer(QwenLayer):
    """A layer with a mixture of experts, unless the configuration excepts it."""

    def feed_forward(self, ctx: ModelContext, prefix: str, index: int) -> nn.Module:
        config = ctx.hf_config
        if index in config.mlp_only_layers or (index + 1) % config.decoder_sparse_step:
            return super().feed_forward(ctx, prefix, index)
        return MoE(
            ctx,
            prefix,
            hidden_size=config.hidden_size,
            intermediate_size=config.moe_intermediate_size,
            experts=config.num_experts,
            top_k=config.num_experts_per_tok,
            norm_topk_prob=config.norm_topk_prob,
            activation=config.hidden_act,
        )


def _window(config: Any, index: int) -> int | None:
    # ``layer_types`` is what transformers makes of use_sliding_window and max_window_layers; the
    # mixtures have none, and a window is then that of every layer.
    types = getattr(config, "layer_types", None)
    sliding = types is None or types[index] == "sliding_attention"
    return config.sliding_window if sliding else None


class Qwen2ForCausalLM(CausalDecoder):
    """Qwen 1.5, 2 and 2.5."""

    def __init__(self, ctx: ModelContext) -> None:
        super().__init__(ctx, self.layer)

    @staticmethod
    def layer(ctx: ModelContext, prefix: str, index: int, rotary: RotaryEmbedding) -> QwenLayer:
        return QwenLayer(
            ctx,
            prefix,
            index,
            rotary,
            bias=True,
            output_bias=False,
            normalised=False,
        )


class Qwen3ForCausalLM(CausalDecoder):
    """The dense Qwen 3 models."""

    def __init__(self, ctx: ModelContext) -> None:
        super().__init__(ctx, self.layer)

    @staticmethod
    def layer(ctx: ModelContext, prefix: str, index: int, rotary: RotaryEmbedding) -> QwenLayer:
        config = ctx.hf_config
        return QwenLayer(
            ctx,
            prefix,
            index,
            rotary,
            bias=config.attention_bias,
            output_bias=config.attention_bias,
            normalised=True,
        )


class Qwen3MoeForCausalLM(CausalDecoder):
    """The Qwen 3 models with mixtures of experts."""

    def __init__(self, ctx: ModelContext) -> None:
        super().__init__(ctx, self.layer)

    @staticmethod
    def layer(ctx: ModelContext, prefix: str, index: int, rotary: RotaryEmbedding) -> QwenLayer:
        bias = ctx.hf_config.attention_bias
        return QwenMoELayer(
            ctx, prefix, index, rotary, bias=bias, output_bias=bias, normalised=True
        )
