"""Mixtral: a Mistral in which a mixture of experts takes the place of the MLP."""

from __future__ import annotations

from treadle.api.models import ModelContext
from treadle_layers_kit import (
    CausalDecoder,
    DecoderLayer,
    MoE,
    RotaryEmbedding,
    SelfAttention,
    head_size,
)

__all__ = ("MixtralForCausalLM",)


class MixtralLayer(DecoderLayer):
    """One layer; ``w1``, ``w3`` and ``w2`` are the checkpoint's gate, up and down."""

    def __init__(self, ctx: ModelContext, prefix: str, rotary: RotaryEmbedding) -> None:
        config = ctx.hf_config
        attention = SelfAttention(
            ctx,
            f"{prefix}.self_attn",
            rotary,
            hidden_size=config.hidden_size,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_size=head_size(config),
            # transformers' ``sliding_window`` also counts the token itself: key > query - window.
            window=config.sliding_window,
        )
        mlp = MoE(
            ctx,
            f"{prefix}.mlp",
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            experts=config.num_local_experts,
            top_k=config.num_experts_per_tok,
            activation=config.hidden_act,
            names=("w1", "w3", "w2"),
        )
        super().__init__(ctx, attention, mlp)


class MixtralForCausalLM(CausalDecoder):
    """Mixtral 8x7B, 8x22B and their relatives."""

    def __init__(self, ctx: ModelContext) -> None:
        super().__init__(ctx, self.layer)

    @staticmethod
    def layer(ctx: ModelContext, prefix: str, index: int, rotary: RotaryEmbedding) -> MixtralLayer:
        return MixtralLayer(ctx, prefix, rotary)
