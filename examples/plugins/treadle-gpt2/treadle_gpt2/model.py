"""GPT-2: learned positions, layer norms with biases, and matrices stored the other way round."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn.functional import gelu

from treadle.api.types import ForwardContext, LinearSpec, ModelContext
from treadle.errors import ConfigError
from treadle_layers_kit import Attention, Embedding, LayerNorm, Linear, LMHead, empty_weight

__all__ = ("GPT2LMHeadModel",)


class InputsFirst:
    """A ``LinearMethod`` for a weight of ``[in_features, out_features]``."""

    def create_weights(self, module: nn.Module, spec: LinearSpec) -> None:
        shape = (spec.in_features, sum(spec.out_features))
        module.register_parameter(
            "weight", empty_weight(shape, spec.dtype, output_dim=1, input_dim=0)
        )

    def process_weights_after_loading(self, module: nn.Module) -> None:
        """Nothing is repacked."""

    def apply(self, module: Any, x: Tensor, bias: Tensor | None) -> Tensor:
        y: Tensor = x @ module.weight
        return y if bias is None else y + bias


def linear(ctx: ModelContext, prefix: str, inputs: int, outputs: int) -> Linear:
    return Linear(ctx, prefix, inputs, outputs, bias=True, method=InputsFirst())


class SelfAttention(nn.Module):
    """One matrix makes queries, keys and values."""

    def __init__(self, ctx: ModelContext, prefix: str) -> None:
        super().__init__()
        config = ctx.hf_config
        self.heads, self.size = config.n_head, config.n_embd // config.n_head
        self.c_attn = linear(ctx, f"{prefix}.c_attn", config.n_embd, 3 * config.n_embd)
        self.c_proj = linear(ctx, f"{prefix}.c_proj", config.n_embd, config.n_embd)
        self.attention = Attention(ctx, f"{prefix}.attention", self.heads, self.heads, self.size)

    def forward(self, x: Tensor, forward_ctx: ForwardContext) -> Tensor:
        q, k, v = (y.unflatten(-1, (self.heads, self.size)) for y in self.c_attn(x).chunk(3, -1))
        out: Tensor = self.c_proj(self.attention(q, k, v, forward_ctx))
        return out


class MLP(nn.Module):
    def __init__(self, ctx: ModelContext, prefix: str) -> None:
        super().__init__()
        config = ctx.hf_config
        intermediate_size = config.n_inner or 4 * config.n_embd
        self.c_fc = linear(ctx, f"{prefix}.c_fc", config.n_embd, intermediate_size)
        self.c_proj = linear(ctx, f"{prefix}.c_proj", intermediate_size, config.n_embd)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.c_proj(gelu(self.c_fc(x), approximate="tanh"))
        return out


class Block(nn.Module):
    def __init__(self, ctx: ModelContext, prefix: str) -> None:
        super().__init__()
        size, eps = ctx.hf_config.n_embd, ctx.hf_config.layer_norm_epsilon
        self.ln_1 = LayerNorm(ctx, size, eps)
        self.attn = SelfAttention(ctx, f"{prefix}.attn")
        self.ln_2 = LayerNorm(ctx, size, eps)
        self.mlp = MLP(ctx, f"{prefix}.mlp")

    def forward(self, x: Tensor, forward_ctx: ForwardContext) -> Tensor:
        x = x + self.attn(self.ln_1(x), forward_ctx)
        out: Tensor = x + self.mlp(self.ln_2(x))
        return out


class Transformer(nn.Module):
    def __init__(self, ctx: ModelContext, prefix: str) -> None:
        super().__init__()
        config = ctx.hf_config
        self.wte = Embedding(ctx, config.vocab_size, config.n_embd)
        self.wpe = Embedding(ctx, config.n_positions, config.n_embd)
        self.h = nn.ModuleList(Block(ctx, f"{prefix}.h.{i}") for i in range(config.n_layer))
        self.ln_f = LayerNorm(ctx, config.n_embd, config.layer_norm_epsilon)

    def forward(self, ids: Tensor, positions: Tensor, forward_ctx: ForwardContext) -> Tensor:
        x = self.wte(ids) + self.wpe(positions)
        for block in self.h:
            x = block(x, forward_ctx)
        out: Tensor = self.ln_f(x)
        return out


class GPT2LMHeadModel(nn.Module):
    """Raises ``ConfigError`` on several devices: the stored matrix mixes the heads' shares."""

    def __init__(self, ctx: ModelContext) -> None:
        super().__init__()
        config = ctx.hf_config
        if ctx.tp_group.world_size > 1:
            raise ConfigError(
                f"tensor_parallel_size is {ctx.tp_group.world_size}, but treadle-gpt2 runs on one device"
            )
        if config.activation_function not in ("gelu_new", "gelu_pytorch_tanh"):
            raise ConfigError(
                f"activation_function is {config.activation_function!r}; treadle-gpt2 has gelu_new"
            )
        self.transformer = Transformer(ctx, "transformer")
        tied = self.transformer.wte if config.tie_word_embeddings else None
        self.lm_head = LMHead(ctx, "lm_head", config.n_embd, config.vocab_size, tied=tied)

    def forward(self, input_ids: Tensor, positions: Tensor, forward_ctx: ForwardContext) -> Tensor:
        hidden: Tensor = self.transformer(input_ids, positions, forward_ctx)
        return hidden

    def compute_logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.lm_head(hidden)
        return logits
