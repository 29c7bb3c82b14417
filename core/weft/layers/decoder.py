"""The usual decoder: token embedding, pre-norm residual layers, final norm, output head.

A model file gives the layers; what is unusual in a model is then all that its file says.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from weft.api.attention import Step
from weft.api.models import ModelContext
from weft.layers.embedding import Embedding, LMHead
from weft.layers.norm import RMSNorm
from weft.layers.rotary import Angles, RotaryEmbedding

__all__ = ("CausalDecoder", "Decoder", "DecoderLayer", "LayerFactory", "head_size")

LayerFactory = Callable[[ModelContext, str, int, RotaryEmbedding], nn.Module]
"""``(ctx, prefix, index, rotary)`` to a module called with ``(x, residual, angles, step)``."""


def head_size(config: Any) -> int:
    """Features of one attention head: ``head_dim``, or an equal share of the hidden size."""
    stated = getattr(config, "head_dim", None)
    return int(stated or config.hidden_size // config.num_attention_heads)


class DecoderLayer(nn.Module):
    """``x + attention(norm(x))``, then ``x + mlp(norm(x))``.

    The sum is carried beside the output, so that each addition runs fused with the next norm.
    """

    def __init__(self, ctx: ModelContext, self_attn: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        config = ctx.hf_config
        self.input_layernorm = RMSNorm(ctx, config.hidden_size, config.rms_norm_eps)
        self.self_attn = self_attn
        self.post_attention_layernorm = RMSNorm(ctx, config.hidden_size, config.rms_norm_eps)
        self.mlp = mlp

    def forward(
        self, x: Tensor, residual: Tensor | None, angles: Angles, step: Step
    ) -> tuple[Tensor, Tensor]:
        if residual is None:
            x, residual = self.input_layernorm(x), x
        else:
            x, residual = self.input_layernorm(x, residual)
        x = self.self_attn(x, angles, step)
        x, residual = self.post_attention_layernorm(x, residual)
        return self.mlp(x), residual


class Decoder(nn.Module):
    """Token ids to hidden states. Subclass it to change how tokens are embedded."""

    def __init__(self, ctx: ModelContext, prefix: str, layer: LayerFactory) -> None:
        super().__init__()
        config = ctx.hf_config
        self.embed_tokens = Embedding(ctx, config.vocab_size, config.hidden_size)
        self.rotary = RotaryEmbedding(ctx, head_size(config))
        self.layers = nn.ModuleList(
            layer(ctx, f"{prefix}.layers.{index}", index, self.rotary)
            for index in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(ctx, config.hidden_size, config.rms_norm_eps)

    def embed(self, ids: Tensor) -> Tensor:
        x: Tensor = self.embed_tokens(ids)
        return x

    def forward(self, input_ids: Tensor, positions: Tensor, step: Step) -> Tensor:
        """``[tokens]`` ids and positions to ``[tokens, hidden]``."""
        x, residual = self.embed(input_ids), None
        angles = self.rotary.angles(positions)
        for layer in self.layers:
            x, residual = layer(x, residual, angles, step)
        return x if residual is None else self.norm(x, residual)[0]


class CausalDecoder(nn.Module):
    """A ``CausalModel`` of a ``Decoder`` and an output head, tied to the embedding or not."""

    def __init__(
        self,
        ctx: ModelContext,
        layer: LayerFactory,
        *,
        decoder: Callable[[ModelContext, str, LayerFactory], Decoder] = Decoder,
        head_bias: bool = False,
    ) -> None:
        super().__init__()
        config = ctx.hf_config
        self.model = decoder(ctx, "model", layer)
        self.lm_head = LMHead(
            ctx,
            "lm_head",
            config.hidden_size,
            config.vocab_size,
            bias=head_bias,
            tied=self.model.embed_tokens if config.tie_word_embeddings else None,
        )

    def forward(self, input_ids: Tensor, positions: Tensor, step: Step) -> Tensor:
        """``[tokens]`` ids and positions to hidden states ``[tokens, hidden]``."""
        hidden: Tensor = self.model(input_ids, positions, step)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """``[rows, hidden]`` to ``[rows, vocab]``."""
        logits: Tensor = self.lm_head(hidden)
        return logits
