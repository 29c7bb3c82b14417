"""Llama: a pre-norm decoder with grouped-query attention, rotary positions and a gated MLP.

Mistral is a Llama in which every layer may have a sliding window.
"""

from __future__ import annotations

from treadle.api.models import ModelContext
from treadle_layers_kit import (
    CausalDecoder,
    DecoderLayer,
    GatedMLP,
    RotaryEmbedding,
    SelfAttention,
    head_size,
)

__all__ = ("LlamaForCausalLM", "MistralForCausalLM")


class LlamaLayer(DecoderLayer):
    """One layer. ``window`` is the number of tokens that a token sees, itself included."""

    def __init__(
        self,
        ctx: ModelContext,
        prefix: str,
        rotary: RotaryEmbedding,
        *,
        attention_bias: bool = False,
        mlp_bias: bool = False,
        window: int | None = None,
    ) -> None:
        config = ctx.hf_config
        attention = SelfAttention(
            ctx,
            f"{prefix}.self_attn",
            rotary,
            hidden_size=config.hidden_size,
            heads=config.num_attention_heads,
            kv_heads=getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
            head_size=head_size(config),
            bias=attention_bias,
            output_bias=attention_bias,
            window=window,
        )
        mlp = GatedMLP(
            ctx,
            f"{prefix}.mlp",
            config.hidden_size,
            config.intermediate_size,
            activation=config.hidden_act,
            bias=mlp_bias,
        )
        super().__init__(ctx, attention, mlp)


class LlamaForCausalLM(CausalDecoder):
    """Llama 1 to 3.3."""

    def __init__(self, ctx: ModelContext) -> None:
        super().__init__(ctx, self.layer)

    @staticmethod
    def layer(ctx: ModelContext, prefix: str, index: int, rotary: RotaryEmbedding) -> LlamaLayer:
        config = ctx.hf_config
        return LlamaLayer(
            ctx,
            prefix,
            rotary,
            attention_bias=getattr(config, "attention_bias", False),
            mlp_bias=getattr(config, "mlp_bias", False),
        )


class MistralForCausalLM(CausalDecoder):
    """Mistral 7B and its relatives."""

    def __init__(self, ctx: ModelContext) -> None:
        super().__init__(ctx, self.layer)

    @staticmethod
    def layer(ctx: ModelContext, prefix: str, index: int, rotary: RotaryEmbedding) -> LlamaLayer:
        # transformers' ``sliding_window`` also counts the token itself: key > query - window.
        return LlamaLayer(ctx, prefix, rotary, window=ctx.hf_config.sliding_window)
