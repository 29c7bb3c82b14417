"""Gemma: norms that scale by ``1 + weight``, scaled embeddings, a gated MLP with a tanh gelu.

Gemma 2 and 3 also normalise what attention and MLP return, before it is added, and alternate layers
with a sliding window and layers without. Gemma 2 caps attention scores and final logits by a tanh;
Gemma 3 normalises queries and keys instead, and turns the layers of both kinds by tables of their
own (``Decoder`` reads them from the configuration).
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from treadle.api.attention import ForwardContext
from treadle.api.models import ModelContext
from treadle.errors import UnsupportedModelError
from treadle_layers_kit import (
    CausalDecoder,
    CosSin,
    Decoder,
    DecoderLayer,
    GatedMLP,
    RMSNorm,
    RotaryEmbedding,
    SelfAttention,
    head_size,
)
from treadle_layers_kit.decoder import LayerFactory

__all__ = (
    "Gemma2ForCausalLM",
    "Gemma3ForCausalLM",
    "Gemma3ForConditionalGeneration",
    "GemmaForCausalLM",
)


class GemmaLayer(DecoderLayer):
    """A layer of the first generation: a Llama layer whose norms have an offset."""

    def __init__(
        self,
        ctx: ModelContext,
        prefix: str,
        rotary: RotaryEmbedding,
        *,
        activation: str,
        scale: float | None = None,
        window: int | None = None,
        softcap: float | None = None,
        normalised: bool = False,
    ) -> None:
        config = ctx.hf_config
        if getattr(config, "use_bidirectional_attention", None):
            raise UnsupportedModelError(
                "the configuration says use_bidirectional_attention: this Gemma is an encoder, and "
                "treadle runs only those that generate"
            )
        size = head_size(config)
        norm = partial(RMSNorm, ctx, size, config.rms_norm_eps, offset=1.0)
        attention = SelfAttention(
            ctx,
            f"{prefix}.self_attn",
            rotary,
            hidden_size=config.hidden_size,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_size=size,
            bias=config.attention_bias,
            output_bias=config.attention_bias,
            norm=norm if normalised else None,
            scale=scale,
            window=window,
            softcap=softcap,
        )
        mlp = GatedMLP(
            ctx,
            f"{prefix}.mlp",
            config.hidden_size,
            config.intermediate_size,
            activation=activation,
        )
        super().__init__(ctx, attention, mlp, offset=1.0)


class Gemma2Layer(GemmaLayer):
    """``x + norm(attention(norm(x)))``, then ``x + norm(mlp(norm(x)))``; also Gemma 3's layer."""

    def __init__(
        self,
        ctx: ModelContext,
        prefix: str,
        index: int,
        rotary: RotaryEmbedding,
        *,
        softcap: float | None = None,
        normalised: bool = False,
    ) -> None:
        config = ctx.hf_config
        sliding = config.layer_types[index] == "sliding_attention"
        super().__init__(
            ctx,
            prefix,
            rotary,
            activation=config.hidden_activation,
            scale=config.query_pre_attn_scalar**-0.5,
            # transformers' ``sliding_window`` also counts the token itself: key > query - window.
            window=config.sliding_window if sliding else None,
            softcap=softcap,
            normalised=normalised,
        )
        size, eps = config.hidden_size, config.rms_norm_eps
        self.pre_feedforward_layernorm = RMSNorm(ctx, size, eps, offset=1.0)
        self.post_feedforward_layernorm = RMSNorm(ctx, size, eps, offset=1.0)

    def forward(
        self, x: Tensor, residual: Tensor | None, angles: CosSin, forward_ctx: ForwardContext
    ) -> tuple[Tensor, Tensor]:
        x, residual = self.forward_attention(x, residual, angles, forward_ctx)
        x = self.post_attention_layernorm(x)
        x, residual = self.pre_feedforward_layernorm(x, residual)
        return self.post_feedforward_layernorm(self.mlp(x)), residual


class GemmaDecoder(Decoder):
    """Multiplies embeddings by the root of their size."""

    def __init__(self, ctx: ModelContext, prefix: str, layer: LayerFactory) -> None:
        super().__init__(ctx, prefix, layer, offset=1.0)
        # Rounded to the model's dtype first: the models were trained with 55.5 for sqrt(3072).
        self.scale = torch.tensor(
            ctx.hf_config.hidden_size**0.5, dtype=ctx.dtype, device="cpu"
        ).item()

    def embed(self, ids: Tensor) -> Tensor:
        return super().embed(ids) * self.scale


class GemmaForCausalLM(CausalDecoder):
    """Gemma 1."""

    def __init__(self, ctx: ModelContext) -> None:
        super().__init__(ctx, self.layer, decoder=GemmaDecoder)
        self.softcap = getattr(ctx.hf_config, "final_logit_softcapping", None)

    @staticmethod
    def layer(ctx: ModelContext, prefix: str, index: int, rotary: RotaryEmbedding) -> GemmaLayer:
        return GemmaLayer(ctx, prefix, rotary, activation=ctx.hf_config.hidden_act)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """``[rows, hidden]`` to ``[rows, vocab]``."""
        logits = super().compute_logits(hidden)
        return logits if not self.softcap else torch.tanh(logits / self.softcap) * self.softcap


class Gemma2ForCausalLM(GemmaForCausalLM):
    """Gemma 2."""

    @staticmethod
    def layer(ctx: ModelContext, prefix: str, index: int, rotary: RotaryEmbedding) -> Gemma2Layer:
        cap = ctx.hf_config.attn_logit_softcapping
        return Gemma2Layer(ctx, prefix, index, rotary, softcap=cap)


class Gemma3ForCausalLM(GemmaForCausalLM):
    """The text models of Gemma 3."""

    @staticmethod
    def layer(ctx: ModelContext, prefix: str, index: int, rotary: RotaryEmbedding) -> Gemma2Layer:
        # transformers reads no ``attn_logit_softcapping`` here, though the configuration has one.
        return Gemma2Layer(ctx, prefix, index, rotary, normalised=True)


class Gemma3ForConditionalGeneration(Gemma3ForCausalLM):
    """The text part of the Gemma 3 models that also see images."""

    def __init__(self, ctx: ModelContext) -> None:
        super().__init__(replace(ctx, hf_config=ctx.hf_config.get_text_config()))
