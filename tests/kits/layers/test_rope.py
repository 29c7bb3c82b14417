"""Rotary frequencies and rotations against transformers and against complex numbers."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from treadle.api.models import ModelContext
from treadle.errors import UnsupportedModelError
from treadle_layers_kit import RotaryEmbedding, rope_parameters
from treadle_layers_kit.rope import frequencies

Context = Callable[..., ModelContext]
HEAD = 16
SCALINGS: list[dict[str, Any]] = [
    {"rope_type": "linear", "factor": 3.0},
    {"rope_type": "linear", "factor": 3.0, "partial_rotary_factor": 0.5},
    {"rope_type": "dynamic", "factor": 2.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.25},
    {"rope_type": "yarn", "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.707},
    {"rope_type": "yarn", "factor": 4.0, "beta_fast": 8, "beta_slow": 3, "truncate": False},
    {"rope_type": "yarn", "factor": 2.0, "partial_rotary_factor": 0.5},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    {
        "rope_type": "longrope",
        "short_factor": [1.0 + i / 9 for i in range(8)],
        "long_factor": [1.0 + i for i in range(8)],
        "original_max_position_embeddings": 64,
    },
    {"rope_type": "proportional", "partial_rotary_factor": 0.25},
    {"rope_type": "proportional", "partial_rotary_factor": 0.5, "factor": 8.0},
]


@pytest.mark.parametrize("theta", [10_000.0, 500_000.0])
@pytest.mark.parametrize("longest", [None, 64, 200, 1000])
@pytest.mark.parametrize("values", SCALINGS, ids=lambda v: v["rope_type"])
def test_frequencies_are_those_of_transformers(
    values: dict[str, Any], longest: int | None, theta: float
) -> None:
    config = LlamaConfig(
        hidden_size=4 * HEAD,
        num_attention_heads=4,
        max_position_embeddings=256,
        rope_parameters={"rope_theta": theta, **values},
    )
    length = longest if longest is not None else 256
    expected, scaling = ROPE_INIT_FUNCTIONS[values["rope_type"]](config, "cpu", seq_len=length)
    actual, factor = frequencies(
        rope_parameters(config), HEAD, max_position_embeddings=256, max_model_len=longest
    )
    assert torch.equal(actual, expected), "not the same bits"
    assert factor == pytest.approx(scaling, rel=1e-12)


def test_old_configurations_are_understood() -> None:
    old = SimpleNamespace(
        rope_theta=5e5, rope_scaling={"type": "linear", "factor": 2.0}, partial_rotary_factor=0.5
    )
    assert rope_parameters(old) == {
        "rope_type": "linear",
        "type": "linear",
        "factor": 2.0,
        "rope_theta": 5e5,
        "partial_rotary_factor": 0.5,
    }
    assert rope_parameters(SimpleNamespace())["rope_type"] == "default"


def test_parameters_may_differ_by_layer_type() -> None:
    config = SimpleNamespace(
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        }
    )
    assert rope_parameters(config, "full_attention")["factor"] == 8.0
    assert rope_parameters(config, "sliding_attention")["rope_theta"] == 1e4


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"rope_type": "spiral"}, r"rope_type 'spiral'; treadle knows default, linear"),
        ({"rope_type": "linear"}, r"'linear' need a number 'factor', not None"),
        (
            {"rope_type": "longrope", "short_factor": [1.0]},
            r"need 8 numbers in short_factor, not \[1.0\]",
        ),
    ],
)
def test_wrong_parameters_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        frequencies(values, HEAD, max_position_embeddings=64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotation_equals_transformers(context: Context, dtype: torch.dtype) -> None:
    positions = torch.tensor([0, 1, 17, 250])
    config = LlamaConfig(hidden_size=4 * HEAD, num_attention_heads=4, max_position_embeddings=256)
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    generator = torch.Generator().manual_seed(0)
    q = torch.randn(4, 4, HEAD, generator=generator).to(dtype)
    k = torch.randn(4, 2, HEAD, generator=generator).to(dtype)
    cos, sin = LlamaRotaryEmbedding(config)(q, positions[None])
    expected = apply_rotary_pos_emb(q[None], k[None], cos, sin, unsqueeze_dim=2)
    rotary = RotaryEmbedding(context(dtype=dtype, rope_parameters=config.rope_parameters), HEAD)
    actual = rotary(q, k, rotary.cos_sin(positions))
    close = {"atol": 1e-6, "rtol": 0} if dtype is torch.float32 else {"atol": 0.02, "rtol": 0}
    for output, reference in zip(actual, expected, strict=True):
        torch.testing.assert_close(output, reference[0], **close)


def test_interleaved_pairs_are_complex_numbers(context: Context) -> None:
    rotary = RotaryEmbedding(context(), HEAD, parameters={"rope_type": "default"}, interleaved=True)
    positions = torch.tensor([0, 3, 100])
    q, k = torch.randn(3, 2, HEAD), torch.randn(3, 1, HEAD)
    turned = rotary(q, k, rotary.cos_sin(positions))
    turns, _ = frequencies({"rope_type": "default"}, HEAD)
    wheel = torch.polar(torch.ones(3, 8), positions[:, None] * turns)[:, None]
    for mine, x in zip(turned, (q, k), strict=True):
        expected = torch.view_as_real(torch.view_as_complex(x.view(3, -1, 8, 2)) * wheel).flatten(
            -2
        )
        torch.testing.assert_close(mine, expected, atol=1e-5, rtol=0)


def test_features_beyond_the_rotary_part_pass_unchanged(context: Context) -> None:
    parameters = {"rope_type": "default", "partial_rotary_factor": 0.5}
    rotary = RotaryEmbedding(context(), HEAD, parameters=parameters)
    small = RotaryEmbedding(context(), HEAD // 2, parameters={"rope_type": "default"})
    positions = torch.arange(6)
    q, k = torch.randn(6, 2, HEAD), torch.randn(6, 1, HEAD)
    turned, _ = rotary(q, k, rotary.cos_sin(positions))
    inner, _ = small(q[..., :8], k[..., :8], small.cos_sin(positions))
    assert torch.equal(turned[..., 8:], q[..., 8:])
    torch.testing.assert_close(turned[..., :8], inner)


def test_scaled_angles_scale_both_parts(context: Context) -> None:
    parameters = {"rope_type": "yarn", "factor": 4.0, "attention_factor": 3.0}
    ctx = context(max_position_embeddings=64)
    rotary = RotaryEmbedding(ctx, HEAD, parameters=parameters)
    q = torch.randn(5, 2, HEAD)
    turned, _ = rotary(q, q, rotary.cos_sin(torch.arange(5)))
    torch.testing.assert_close(turned.norm(dim=-1), 3.0 * q.norm(dim=-1))
