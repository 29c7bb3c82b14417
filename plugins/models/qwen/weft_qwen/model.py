"""Qwen: a pre-norm decoder with grouped-query attention, rotary positions and a gated MLP.

Qwen 2 has biases on q, k and v; Qwen 3 normalises queries and keys instead. Either may have
sliding windows in some of its layers.
"""

from __future__ import annotations

from functools import partial

from weft.api.models import ModelContext
from weft.layers import (
    CausalDecoder,
    DecoderLayer,
    GatedMLP,
    RMSNorm,
    RotaryEmbedding,
    SelfAttention,
    head_size,
)

__all__ = ("Qwen2ForCausalLM", "Qwen3ForCausalLM")


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
        # ``layer_types`` is what transformers makes of use_sliding_window and max_window_layers.
        sliding = config.layer_types[index] == "sliding_attention"
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
            window=config.sliding_window if sliding else None,
        )
        mlp = GatedMLP(
            ctx,
            f"{prefix}.mlp",
            config.hidden_size,
            config.intermediate_size,
            activation=config.hidden_act,
        )
        super().__init__(ctx, attention, mlp)


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
