"""The usual decoder: token embedding, pre-norm residual layers, final norm, output head.

A model file gives the layers; what is unusual in a model is then all that its file says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from treadle.api.attention import ForwardContext
from treadle.api.models import ModelContext
from treadle_layers_kit.embedding import Embedding, LMHead
from treadle_layers_kit.fusion import Site
from treadle_layers_kit.linear_norms import SPLIT_K, LinearNormPair, has_default_forward, pair_up
from treadle_layers_kit.mlp import GatedMLP
from treadle_layers_kit.norm import RMSNorm
from treadle_layers_kit.rope import rope_parameters
from treadle_layers_kit.rotary import CosSin, RotaryEmbedding
from treadle_layers_kit.self_attention import SelfAttention

__all__ = ("CausalDecoder", "Decoder", "DecoderLayer", "LayerFactory", "head_size")

LayerFactory = Callable[[ModelContext, str, int, RotaryEmbedding], nn.Module]
"""``(ctx, prefix, index, rotary)`` to a module called with ``(x, residual, angles, step)``."""


def head_size(config: Any) -> int:
    """Features of one attention head: ``head_dim``, or an equal share of the hidden size."""
    head_dim = getattr(config, "head_dim", None)
    return int(head_dim or config.hidden_size // config.num_attention_heads)


def rope_layer_types(config: Any) -> list[str | None]:
    """The key into ``rope_parameters`` for each layer; ``None`` where they are not by layer type."""
    parameters = getattr(config, "rope_parameters", None) or {}
    types = getattr(config, "layer_types", None)
    if types and all(isinstance(parameters.get(layer_type), Mapping) for layer_type in types):
        return list(types[: config.num_hidden_layers])
    return [None] * config.num_hidden_layers


class DecoderLayer(nn.Module):
    """``x + attention(norm(x))``, then ``x + mlp(norm(x))``.

    The sum is carried beside the output, so that each addition runs fused with the next norm. With
    several ranks the output may be this rank's summand, which that norm then sums too (see
    ``treadle_layers_kit.fusion``). ``offset`` is that of the norms.
    """

    def __init__(
        self, ctx: ModelContext, self_attn: nn.Module, mlp: nn.Module, *, offset: float = 0.0
    ) -> None:
        super().__init__()
        size, eps = ctx.hf_config.hidden_size, ctx.hf_config.rms_norm_eps
        self.input_layernorm = RMSNorm(ctx, size, eps, offset=offset)
        self.self_attn = self_attn
        self.post_attention_layernorm = RMSNorm(ctx, size, eps, offset=offset)
        self.mlp = mlp
        self.is_last = False
        """Set by the ``Decoder`` on its last layer."""

    def forward_attention(
        self, x: Tensor, residual: Tensor | None, angles: CosSin, forward_ctx: ForwardContext
    ) -> tuple[Tensor, Tensor]:
        """What attention adds, and the sum it is added to.

        Of the last layer only the tokens that are asked for: a prompt's others have done their part
        once their keys and values are stored.
        """
        if residual is None:
            x, residual = self.input_layernorm(x), x
        else:
            x, residual = self.input_layernorm(x, residual)
        x = self.self_attn(x, angles, forward_ctx)
        if self.is_last and forward_ctx.logits_indices is not None:
            return x.index_select(0, forward_ctx.logits_indices), residual.index_select(
                0, forward_ctx.logits_indices
            )
        return x, residual

    def forward(
        self, x: Tensor, residual: Tensor | None, angles: CosSin, forward_ctx: ForwardContext
    ) -> tuple[Tensor, Tensor]:
        x, residual = self.forward_attention(x, residual, angles, forward_ctx)
        x, residual = self.post_attention_layernorm(x, residual)
        return self.mlp(x), residual

    def linear_norm_pairs(
        self, path: str, next_norm: nn.Module
    ) -> Iterator[LinearNormPair | Site | None]:
        """Yield what ``pair_up`` finds at the end of attention and MLP; ``next_norm`` reads the latter."""
        yield pair_up(
            f"{path}.self_attn",
            self.self_attn,
            SelfAttention,
            "o_proj",
            self.post_attention_layernorm,
            selects_rows=self.is_last,
        )
        yield pair_up(f"{path}.mlp", self.mlp, GatedMLP, "down_proj", next_norm, selects_rows=False)


class Decoder(nn.Module):
    """Token ids to hidden states. Subclass it to change how tokens are embedded.

    Where the configuration has ``rope_parameters`` for each layer type, each type has a table of
    its own. ``offset`` is that of the last norm.
    """

    def __init__(
        self, ctx: ModelContext, prefix: str, layer: LayerFactory, *, offset: float = 0.0
    ) -> None:
        super().__init__()
        config = ctx.hf_config
        self.embed_tokens = Embedding(ctx, config.vocab_size, config.hidden_size)
        types = rope_layer_types(config)
        distinct_types = list(dict.fromkeys(types))
        # A tuple, not a ModuleList: each belongs to the attention layers that turn by it.
        self.rotary_embs = tuple(
            RotaryEmbedding(ctx, head_size(config), parameters=rope_parameters(config, layer_type))
            for layer_type in distinct_types
        )
        self.rope_index = [distinct_types.index(layer_type) for layer_type in types]
        self.layers = nn.ModuleList(
            layer(ctx, f"{prefix}.layers.{index}", index, self.rotary_embs[rope_idx])
            for index, rope_idx in enumerate(self.rope_index)
        )
        if isinstance(self.layers[-1], DecoderLayer):
            self.layers[-1].is_last = True
        self.norm = RMSNorm(ctx, config.hidden_size, config.rms_norm_eps, offset=offset)

    def embed(self, ids: Tensor) -> Tensor:
        x: Tensor = self.embed_tokens(ids)
        return x

    def forward(self, input_ids: Tensor, positions: Tensor, forward_ctx: ForwardContext) -> Tensor:
        """``[tokens]`` ids and positions to ``[tokens, hidden]``, or only what ``forward_ctx.logits_indices`` names."""
        x, residual = self.embed(input_ids), None
        cos_sin = [rotary.cos_sin(positions) for rotary in self.rotary_embs]
        for layer, rope_idx in zip(self.layers, self.rope_index, strict=True):
            x, residual = layer(x, residual, cos_sin[rope_idx], forward_ctx)
        return x if residual is None else self.norm(x, residual)[0]

    def linear_norm_pairs(self, path: str) -> Iterator[LinearNormPair | Site | None]:
        """Yield what ``pair_up`` finds in each layer, or one ``Site`` with the reason why nothing fits."""
        layers: list[Any] = list(self.layers)
        overridden = [] if has_default_forward(self, Decoder) else [self]
        overridden += [
            m for m in layers if not has_default_forward(m, DecoderLayer, "forward_attention")
        ]
        if overridden:
            yield Site(path, SPLIT_K, reason=f"{type(overridden[0]).__name__} has its own forward")
            return
        norms = [layer.input_layernorm for layer in layers[1:]] + [self.norm]
        for index, (layer, next_norm) in enumerate(zip(layers, norms, strict=True)):
            yield from layer.linear_norm_pairs(f"{path}.layers.{index}", next_norm)

    def defer_all_reduce(self) -> None:
        """Move the sum over ranks that ends a linear layer into the norm that reads the result."""
        for pair in self.linear_norm_pairs(""):
            if isinstance(pair, LinearNormPair):
                pair.defer_all_reduce()

    def kernel_sites(self, path: str) -> Iterator[Site]:
        for pair in self.linear_norm_pairs(path):
            if pair is not None:
                yield pair if isinstance(pair, Site) else pair.split_k_site()


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

    def forward(self, input_ids: Tensor, positions: Tensor, forward_ctx: ForwardContext) -> Tensor:
        """As ``CausalModel.forward``."""
        hidden: Tensor = self.model(input_ids, positions, forward_ctx)
        return hidden

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """``[rows, hidden]`` to ``[rows, vocab]``."""
        logits: Tensor = self.lm_head(hidden)
        return logits
