"""GPT-OSS: a mixture of experts whose attention has sinks, and windows in every other layer."""

from __future__ import annotations

from treadle.api.models import ModelContext
from treadle_layers_kit import (
    CausalDecoder,
    ClampedSwiGLU,
    DecoderLayer,
    MoE,
    RotaryEmbedding,
    SelfAttention,
    head_size,
)

__all__ = ("GptOssForCausalLM",)


class GptOssLayer(DecoderLayer):
    """One layer."""

    def __init__(self, ctx: ModelContext, prefix: str, index: int, rotary: RotaryEmbedding) -> None:
        config = ctx.hf_config
        is_sliding = config.layer_types[index] == "sliding_attention"
        attention = SelfAttention(
            ctx,
            f"{prefix}.self_attn",
            rotary,
            hidden_size=config.hidden_size,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_size=head_size(config),
            bias=config.attention_bias,
            output_bias=config.attention_bias,
            window=config.sliding_window if is_sliding else None,
            sinks=True,
        )
        # The softmax over all experts, made to sum to one, is that over the chosen ones.
        mlp = MoE(
            ctx,
            f"{prefix}.mlp",
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            experts=config.num_local_experts,
            top_k=config.num_experts_per_tok,
            activation=ClampedSwiGLU(
                alpha=getattr(config, "swiglu_alpha", 1.702),
                limit=getattr(config, "swiglu_limit", 7.0),
            ),
            bias=True,
            is_interleaved=True,
            is_transposed=True,
        )
        super().__init__(ctx, attention, mlp)


class GptOssForCausalLM(CausalDecoder):
    """gpt-oss-20b and gpt-oss-120b."""

    def __init__(self, ctx: ModelContext) -> None:
        super().__init__(ctx, GptOssLayer)
