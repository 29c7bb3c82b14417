"""Each layer on two and more ranks gives what it gives on one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from treadle.api.attention import ForwardContext
from treadle.api.communicators import Communicator
from treadle.api.models import ModelContext
from treadle.errors import ConfigError
from treadle.testing.attention_reference import reference_step
from treadle.testing.ranks import run_on_ranks
from treadle_layers_kit import (
    Attention,
    CausalDecoder,
    CosSin,
    DecoderLayer,
    Embedding,
    GatedMLP,
    Linear,
    LMHead,
    MoE,
    QKVLinear,
    RMSNorm,
    RotaryEmbedding,
    SelfAttention,
    WeightTarget,
    layout_of,
    shard_heads,
)
from treadle_layers_kit.fusion import defer_all_reduce
from treadle_worker_kit.shards import load_weight

Context = Callable[..., ModelContext]
X = torch.randn(5, 32, generator=torch.Generator().manual_seed(1))


def fill(module: nn.Module, scale: float = 0.3) -> None:
    """Give every parameter the same full matrices on every rank, through ``place``."""
    generator = torch.Generator().manual_seed(7)
    for name, parameter in module.named_parameters():
        layout = layout_of(parameter)
        for part, out in enumerate(layout.outputs or (None,)):
            shape = [1] if layout.per_part else list(parameter.shape)
            if layout.output_dim is not None and out is not None:
                shape[layout.output_dim] = out.total
            if layout.input_dim is not None and layout.inputs is not None:
                shape[layout.input_dim] = layout.inputs.total
            load_weight(
                parameter, torch.randn(shape, generator=generator) * scale, WeightTarget(name, part)
            )


def assert_ranks_agree(
    context: Context, make: Callable[[ModelContext], nn.Module], *inputs: Any
) -> None:
    """Build, fill and run on 1, 2 and 4 ranks; compare with one rank."""

    def run(tp_group: Communicator) -> Tensor:
        module = make(context(ranks=tp_group))
        fill(module)
        result: Tensor = module(*inputs)
        return result

    expected = run_on_ranks(1, run)[0]
    assert expected.abs().max() > 0.1
    for size in (2, 4):
        for result in run_on_ranks(size, run):
            torch.testing.assert_close(result, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("bias", [False, True])
def test_row_and_replicated(context: Context, bias: bool) -> None:
    class Pair(nn.Module):
        def __init__(self, ctx: ModelContext) -> None:
            super().__init__()
            self.up = Linear(ctx, "a.up", 32, 64, split="column", bias=bias)
            self.down = Linear(ctx, "a.down", 64, 32, split="row", bias=bias)
            self.gate = Linear(ctx, "a.gate", 32, 8, bias=bias)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.gate(self.down(self.up(x)))
            return y

    assert_ranks_agree(context, Pair, X)


def test_merged_columns_keep_their_order(context: Context) -> None:
    def run(tp_group: Communicator) -> tuple[Tensor, Tensor]:
        layer = Linear(
            context(ranks=tp_group), "gate_up", 32, (16, 8), split="column", names=("g", "u")
        )
        fill(layer)
        y = layer(X)
        shard_size = 16 // tp_group.world_size
        return tp_group.all_gather(y[:, :shard_size]), tp_group.all_gather(y[:, shard_size:])

    gate, up = run_on_ranks(1, run)[0]
    for size in (2, 4):
        for first, second in run_on_ranks(size, run):
            torch.testing.assert_close(first, gate, atol=1e-5, rtol=0)
            torch.testing.assert_close(second, up, atol=1e-5, rtol=0)


def test_a_row_layer_may_leave_the_sum_to_its_caller(context: Context) -> None:
    def run(tp_group: Communicator) -> Tensor:
        layer = Linear(context(ranks=tp_group), "down", 32, 8, split="row", reduce=False, bias=True)
        fill(layer)
        shard_size = 32 // tp_group.world_size
        x = X[:, tp_group.rank * shard_size :][:, :shard_size]
        result: Tensor = layer(x)
        return result

    torch.testing.assert_close(
        sum(run_on_ranks(2, run)), run_on_ranks(1, run)[0], atol=1e-5, rtol=0
    )


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
def test_gated_mlp(context: Context, activation: str, bias: bool) -> None:
    assert_ranks_agree(
        context, lambda c: GatedMLP(c, "mlp", 32, 48, activation=activation, bias=bias), X
    )


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_qkv_with_attention(context: Context, kv_heads: int) -> None:
    class Block(nn.Module):
        def __init__(self, ctx: ModelContext) -> None:
            super().__init__()
            self.qkv = QKVLinear(ctx, "s.qkv_proj", 32, 4, kv_heads, 8, bias=True)
            self.o = Linear(ctx, "s.o_proj", 32, 32, split="row", bias=True)
            self.attn = Attention(ctx, "s.attn", 4, kv_heads, 8)

        def forward(self, x: Tensor) -> Tensor:
            forward_ctx, pages = reference_step([5], [5])
            self.attn.cache = torch.zeros(
                self.attn.backend.kv_cache_shape(pages, 16, self.attn.spec)
            )
            y: Tensor = self.o(self.attn(*self.qkv(x), forward_ctx))
            return y

    assert_ranks_agree(context, Block, X)


@pytest.mark.parametrize("vocab", [64, 97, 130])
def test_embedding(context: Context, vocab: int) -> None:
    ids = torch.tensor([0, vocab - 1, 3, 63, vocab // 2, 0])
    assert_ranks_agree(context, lambda c: Embedding(c, vocab, 32), ids)


@pytest.mark.parametrize("vocab", [64, 97, 130])
@pytest.mark.parametrize("tied", [False, True])
def test_head(context: Context, vocab: int, tied: bool) -> None:
    class Head(nn.Module):
        def __init__(self, ctx: ModelContext) -> None:
            super().__init__()
            self.embedding = Embedding(ctx, vocab, 32)
            self.head = LMHead(
                ctx, "lm_head", 32, vocab, bias=not tied, tied=self.embedding if tied else None
            )

        def forward(self, x: Tensor) -> Tensor:
            logits: Tensor = self.head(x)
            assert logits.shape == (5, vocab)
            return logits

    assert_ranks_agree(context, Head, X)


# ------------------------------------------------------------------------- sums left to the norms

CONFIG: dict[str, Any] = {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "rms_norm_eps": 1e-5,
    "vocab_size": 97,
    "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
    "max_position_embeddings": 64,
}


class Normed(DecoderLayer):
    """Normalises what attention and MLP return, as Gemma 2 does: only the whole sum can be."""

    def forward(
        self, x: Tensor, residual: Tensor | None, angles: CosSin, forward_ctx: ForwardContext
    ) -> tuple[Tensor, Tensor]:
        x, residual = self.forward_attention(x, residual, angles, forward_ctx)
        return self.mlp(self.post_attention_layernorm(x)), residual


class Doubled(SelfAttention):
    """Reads its own output."""

    def forward(self, x: Tensor, angles: CosSin, forward_ctx: ForwardContext) -> Tensor:
        return super().forward(x, angles, forward_ctx).clamp(-0.5, 0.5)


def decoder(
    ctx: ModelContext,
    kind: type[DecoderLayer] = DecoderLayer,
    attention: type[SelfAttention] = SelfAttention,
    experts: Callable[[int], bool] = lambda index: False,
) -> CausalDecoder:
    def layer(ctx: ModelContext, prefix: str, index: int, rotary: RotaryEmbedding) -> nn.Module:
        attn = attention(
            ctx, f"{prefix}.self_attn", rotary, hidden_size=32, heads=4, kv_heads=2, head_size=8,
            output_bias=True,
        )  # fmt: skip
        mlp: nn.Module = GatedMLP(ctx, f"{prefix}.mlp", 32, 48)
        if experts(index):
            mlp = MoE(
                ctx, f"{prefix}.mlp", hidden_size=32, intermediate_size=16, experts=4, top_k=2,
                activation="silu",
            )  # fmt: skip
        return kind(ctx, attn, mlp)

    model = CausalDecoder(ctx, layer)
    defer_all_reduce(model)
    return model


class Run(nn.Module):
    """Logits of five tokens, or of two of them."""

    def __init__(self, model: CausalDecoder, logits_indices: Tensor | None) -> None:
        super().__init__()
        self.model, self.logits_indices = model, logits_indices

    def forward(self, ids: Tensor) -> Tensor:
        forward_ctx, pages = reference_step([5], [5])
        forward_ctx.logits_indices = self.logits_indices
        for attn in (m for m in self.modules() if isinstance(m, Attention)):
            attn.cache = torch.zeros(attn.backend.kv_cache_shape(pages, 16, attn.spec))
        return self.model.compute_logits(self.model(ids, torch.arange(5), forward_ctx))


def reducing_modules(model: CausalDecoder) -> list[str]:
    """The norms that sum, and the linear layers."""
    norms = [
        n for n, m in model.named_modules() if isinstance(m, RMSNorm) and m.tp_group is not None
    ]
    linears = [n for n, m in model.named_modules() if isinstance(m, Linear) and m.reduce_results]
    return [name.removeprefix("model.") for name in norms + linears]


@pytest.mark.parametrize("logits_indices", [None, torch.tensor([1, 4])])
@pytest.mark.parametrize(("kind", "attention"), [(DecoderLayer, SelfAttention), (Normed, Doubled)])
def test_decoder(
    context: Context,
    kind: type[DecoderLayer],
    attention: type[SelfAttention],
    logits_indices: Tensor | None,
) -> None:
    def make(ctx: ModelContext) -> Run:
        return Run(decoder(ctx, kind, attention), logits_indices)

    assert_ranks_agree(partial(context, **CONFIG), make, torch.tensor([3, 1, 4, 1, 96]))


def test_sums_are_left_to_the_norms_that_follow_them(context: Context) -> None:
    """Where the layer does with them what every layer does; a mixture makes its own."""

    def reducing_on_two_ranks(**options: Any) -> list[str]:
        by_rank = run_on_ranks(
            2, lambda c: reducing_modules(decoder(context(ranks=c, **CONFIG), **options))
        )
        assert by_rank[0] == by_rank[1]
        return by_rank[0]

    assert reducing_modules(decoder(context(**CONFIG))) == []
    assert reducing_on_two_ranks() == [
        "layers.0.post_attention_layernorm",
        "layers.1.input_layernorm",
        "layers.1.post_attention_layernorm",
        "layers.2.input_layernorm",
        "layers.2.post_attention_layernorm",
        "norm",
    ]
    assert reducing_on_two_ranks(experts=lambda index: index != 1) == [
        "layers.0.post_attention_layernorm",
        "layers.1.post_attention_layernorm",
        "layers.2.input_layernorm",
        "layers.2.post_attention_layernorm",
    ]
    outputs = [f"layers.{index}.self_attn.o_proj" for index in range(3)]
    assert reducing_on_two_ranks(attention=Doubled) == [
        "layers.1.input_layernorm",
        "layers.2.input_layernorm",
        "norm",
        *outputs,
    ]
    downs = [f"layers.{index}.mlp.down_proj" for index in range(3)]
    names = [name for pair in zip(outputs, downs, strict=True) for name in pair]
    assert reducing_on_two_ranks(kind=Normed) == names


def test_a_tied_head_has_no_weight_of_its_own(context: Context) -> None:
    ctx = context()
    embedding = Embedding(ctx, 64, 32)
    head = LMHead(ctx, "lm_head", 32, 64, tied=embedding)
    assert head.get_parameter("weight") is embedding.weight


def test_ranks_that_share_a_key_head_hold_the_same_one() -> None:
    class Rank:
        def __init__(self, rank: int, size: int) -> None:
            self.rank, self.world_size = rank, size

    starts = [shard_heads(Rank(r, 8), 16, 2, 4)[1] for r in range(8)]  # type: ignore[arg-type]
    assert [p.start for p in starts] == [0, 0, 0, 0, 4, 4, 4, 4]
    assert {p.size for p in starts} == {4}


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size"), [(6, 2, 4), (12, 3, 2), (8, 3, 1), (9, 9, 6)]
)
def test_heads_that_cannot_be_shared_are_refused(
    context: Context, heads: int, kv_heads: int, size: int
) -> None:
    with pytest.raises(ConfigError, match="tensor_parallel_size"):
        run_on_ranks(size, lambda c: QKVLinear(context(ranks=c), "qkv", 32, heads, kv_heads, 8))


def test_features_that_cannot_be_shared_are_refused(context: Context) -> None:
    with pytest.raises(ConfigError, match=r"m\.down has 33 features, which 2 ranks"):
        run_on_ranks(2, lambda c: Linear(context(ranks=c), "m.down", 33, 8, split="row"))
