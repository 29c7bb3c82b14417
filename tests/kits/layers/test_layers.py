"""Norms, activations, the plain method and what layers ask of quantization and attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from treadle.api.attention import MaskKind
from treadle.api.models import LinearSpec, ModelContext
from treadle.errors import UnsupportedModelError
from treadle_layers_kit import (
    Attention,
    GatedMLP,
    LayerNorm,
    Linear,
    LMHead,
    PlainLinear,
    QKVLinear,
    RMSNorm,
    empty_weight,
    mlp,
    ops,
)

Context = Callable[..., ModelContext]


def random_tensor(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_is_its_formula(context: Context, dtype: torch.dtype, offset: float) -> None:
    norm = RMSNorm(context(dtype=dtype), 24, 1e-5, offset=offset)
    norm.weight.data.copy_(random_tensor(24, seed=1))
    x, residual = random_tensor(3, 24, dtype=dtype) * 4, random_tensor(3, 24, seed=2, dtype=dtype)

    def formula(x: Tensor) -> Tensor:
        x = x.double()
        scale = norm.weight.double() + offset
        return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * scale

    close = {"atol": 1e-5, "rtol": 1e-5} if dtype is torch.float32 else {"atol": 0.02, "rtol": 0.01}
    torch.testing.assert_close(norm(x).double(), formula(x), **close)
    total = x + residual
    y, carried = norm(x.clone(), residual.clone())
    torch.testing.assert_close(carried, total, atol=0, rtol=0)
    torch.testing.assert_close(y.double(), formula(total), **close)


def test_a_row_of_nan_stays_in_its_row(context: Context) -> None:
    norm = RMSNorm(context(), 8, 1e-6)
    norm.weight.data.fill_(1.0)
    x = random_tensor(3, 8)
    x[1] = float("nan")
    y = norm(x)
    assert y[1].isnan().all()
    assert y[[0, 2]].isfinite().all()


def test_layer_norm(context: Context) -> None:
    norm = LayerNorm(context(), 16, 1e-5)
    norm.weight.data.copy_(random_tensor(16))
    assert norm.bias is not None
    norm.bias.data.copy_(random_tensor(16, seed=3))
    x = random_tensor(4, 16, seed=4)
    expected = F.layer_norm(x, (16,), norm.weight, norm.bias, 1e-5)
    torch.testing.assert_close(norm(x), expected)
    assert LayerNorm(context(), 16, 1e-5, bias=False).bias is None


@pytest.mark.parametrize(
    ("op", "activation"),
    [
        (ops.silu_and_mul, F.silu),
        (mlp.gelu_mul, F.gelu),
        (mlp.gelu_tanh_mul, lambda x: F.gelu(x, approximate="tanh")),
        (mlp.relu_squared_mul, lambda x: F.relu(x) ** 2),
    ],
)
def test_gated_activations(op: Any, activation: Any) -> None:
    gate, up = random_tensor(3, 10), random_tensor(3, 10, seed=1)
    torch.testing.assert_close(op(torch.cat((gate, up), -1)), activation(gate) * up)


def test_an_unknown_activation_is_refused(context: Context) -> None:
    with pytest.raises(UnsupportedModelError, match=r"hidden_act 'mish'.*silu"):
        GatedMLP(context(), "mlp", 8, 8, activation="mish")


def test_qkv_gives_heads(context: Context) -> None:
    layer = QKVLinear(context(), "a.qkv_proj", 16, 4, 2, 8, bias=True)
    layer.weight.data.copy_(random_tensor(64, 16))
    assert layer.bias is not None
    layer.bias.data.copy_(random_tensor(64, seed=1))
    x = random_tensor(3, 16, seed=2)
    q, k, v = layer(x)
    full = F.linear(x, layer.weight, layer.bias)
    assert (q.shape, k.shape, v.shape) == ((3, 4, 8), (3, 2, 8), (3, 2, 8))
    torch.testing.assert_close(torch.cat([t.flatten(1) for t in (q, k, v)], 1), full)


# ---------------------------------------------------------------------- the plain method


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 7])
def test_prepacking_changes_no_bit(context: Context, rows: int, bias: bool) -> None:
    layer = Linear(context(dtype=torch.bfloat16), "up", 96, 64, bias=bias)
    for parameter in layer.parameters():
        parameter.data.copy_(random_tensor(*parameter.shape))
    x = random_tensor(rows, 96, seed=9, dtype=torch.bfloat16)
    before = layer(x)
    layer.process_weights_after_loading()
    packed = "prepacked" in layer.__dict__
    assert packed == torch.ops.mkldnn._is_mkldnn_bf16_supported()
    assert hasattr(layer, "weight") != packed, "the plain weight stays in memory"
    assert torch.equal(layer(x), before)


def test_without_the_private_operators_the_layer_still_works(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> Tensor:
        raise RuntimeError("gone in this torch")

    monkeypatch.setattr(torch.ops.mkldnn, "_reorder_linear_weight", broken, raising=False)
    layer = Linear(context(dtype=torch.bfloat16), "up", 8, 4)
    layer.weight.data.fill_(1.0)
    layer.process_weights_after_loading()
    assert layer(torch.ones(1, 8, dtype=torch.bfloat16)).tolist() == [[8.0] * 4]


def test_float32_is_not_packed(context: Context) -> None:
    layer = Linear(context(), "up", 8, 4)
    layer.weight.data.fill_(1.0)
    layer.process_weights_after_loading()
    assert layer.weight.shape == (4, 8)


# ------------------------------------------------------- what layers ask of other plugins


class Doubling:
    """A quantization scheme that remembers what it was asked and skips ``*.skipped``."""

    name = "doubling"

    def __init__(self) -> None:
        self.specs: list[LinearSpec] = []
        self.finished = 0

    def linear_method(self, spec: LinearSpec) -> Doubling | None:
        self.specs.append(spec)
        return None if spec.prefix.endswith("skipped") else self

    def experts_method(self, spec: Any) -> None:
        return None

    def kv_cache_dtype(self, layer: str) -> str | None:
        return "fp8_e4m3" if layer == "model.layers.0.attn" else None

    def create_weights(self, module: nn.Module, spec: LinearSpec) -> None:
        shape = [sum(spec.out_features), spec.in_features]
        module.register_parameter(
            "halved", empty_weight(shape, spec.dtype, output_dim=0, input_dim=1)
        )

    def process_weights_after_loading(self, module: nn.Module) -> None:
        self.finished += 1

    def apply(self, module: Any, x: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, 2 * module.halved, bias)


def test_a_scheme_is_asked_for_each_layer_with_the_names_of_the_checkpoint(
    context: Context,
) -> None:
    scheme = Doubling()
    ctx = context(quantization=scheme)
    layer = QKVLinear(ctx, "model.layers.3.qkv_proj", 16, 4, 2, 8, bias=True)
    (spec,) = scheme.specs
    assert spec.prefix == "model.layers.3.qkv_proj"
    assert spec.names == tuple(f"model.layers.3.{n}_proj" for n in "qkv")
    assert (spec.in_features, spec.out_features, spec.bias) == (16, (32, 16, 16), True)
    layer.halved.data.copy_(random_tensor(64, 16))
    assert layer.bias is not None
    layer.bias.data.zero_()
    x = random_tensor(2, 16, seed=1)
    torch.testing.assert_close(layer(x)[0].flatten(1), F.linear(x, 2 * layer.halved[:32]))
    layer.process_weights_after_loading()
    assert scheme.finished == 1


def test_what_a_scheme_leaves_alone_is_plain(context: Context) -> None:
    ctx = context(quantization=Doubling())
    assert isinstance(Linear(ctx, "a.skipped", 8, 8).method, PlainLinear)
    assert isinstance(Linear(ctx, "a.gate", 8, 8, method=PlainLinear()).method, PlainLinear)
    assert isinstance(LMHead(ctx, "lm_head", 8, 64).method, Doubling)


def test_attention_says_what_it_needs(context: Context) -> None:
    ctx = context(quantization=Doubling(), dtype=torch.bfloat16, max_model_len=64)
    layer = Attention(ctx, "model.layers.0.attn", 8, 2, 16, window=32, softcap=50.0, scale=0.1)
    r, s = layer.request, layer.spec
    assert (r.num_heads, r.num_kv_heads, r.head_size, r.dtype, r.kv_dtype) == (
        8,
        2,
        16,
        "bfloat16",
        "fp8_e4m3",
    )
    assert (r.mask, r.window, r.softcap, r.scale) == (MaskKind.SLIDING, 32, 50.0, 0.1)
    assert (s.layer, s.num_kv_heads, s.dtype, s.kind, s.window) == (
        "model.layers.0.attn",
        2,
        "fp8_e4m3",
        "sliding",
        32,
    )
    plain = Attention(ctx, "model.layers.1.attn", 8, 2, 16)
    assert (plain.request.mask, plain.request.scale, plain.spec.kind) == (
        MaskKind.CAUSAL,
        0.25,
        "full",
    )
    assert plain.spec.dtype == "bfloat16"
