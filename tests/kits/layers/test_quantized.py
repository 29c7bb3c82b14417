"""Which layers a list of names leaves alone, and torch's int4 product."""

from __future__ import annotations

import pytest
import torch

from treadle.api.models import LinearSpec
from treadle.errors import UnsupportedModelError
from treadle_layers_kit.quantized import CpuInt4, is_layer_skipped

HOME = "model.layers.1"


def spec(prefix: str, *names: str) -> LinearSpec:
    return LinearSpec(
        prefix, names or (prefix,), 8, (8,) * max(1, len(names)), False, torch.float32
    )


@pytest.mark.parametrize(
    ("pattern", "named"),
    [
        ("model.layers.1.mlp.gate", True),
        ("mlp.gate", True),
        ("gate", True),
        ("model.layers.1.", True),
        ("layers.*.mlp", True),
        ("g*e", True),
        ("mlp.gate_proj", False),
        ("gat", False),
        ("layers.1.gate", False),
        ("model.layers.11", False),
        ("gate.1", False),
        ("", False),
        (".", False),
    ],
)
def test_names_by_whole_components(pattern: str, named: bool) -> None:
    assert is_layer_skipped(spec(f"{HOME}.mlp.gate"), [pattern]) is named
    assert is_layer_skipped(spec(f"{HOME}.mlp.gate"), ["other", pattern]) is named


def test_a_component_is_not_its_beginning() -> None:
    assert not is_layer_skipped(
        spec(f"{HOME}.mlp.gate_proj"), ["mlp.gate", "layers.11", "model.layers.1.mlp.g"]
    )


def test_fused_layers_by_their_own_name_or_by_all_of_their_matrices() -> None:
    names = [f"{HOME}.attn.{n}_proj" for n in "qkv"]
    fused = spec(f"{HOME}.attn.qkv_proj", *names)
    assert is_layer_skipped(fused, ["qkv_proj"]) and is_layer_skipped(fused, names)
    assert is_layer_skipped(fused, ["attn"]) and not is_layer_skipped(fused, ["mlp"])
    with pytest.raises(UnsupportedModelError) as raised:
        is_layer_skipped(fused, names[:1])
    message = str(raised.value)
    assert f"{names[0]} is left unquantized" in message
    assert f"{names[1]}, {names[2]} is not" in message and "qkv_proj" in message


def test_int4_is_the_dequantized_product() -> None:
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 16, (128, 48), generator=generator)
    scales = torch.rand(4, 48, generator=generator)
    zeros = torch.randint(0, 16, (4, 48), generator=generator)
    packed = CpuInt4.pack(codes, scales, zeros, 32, torch.bfloat16)
    if packed is None:
        pytest.skip("torch has no int4 operator here")
    dense = (codes - zeros.repeat_interleave(32, 0)) * scales.repeat_interleave(32, 0)
    for shape in ((1,), (7,), (2, 3), (0,)):
        x = torch.randn(*shape, 128, generator=generator).bfloat16()
        expected = x.float() @ dense
        actual = packed(x)
        assert actual.shape == expected.shape and actual.dtype == x.dtype
        assert (actual.float() - expected).norm() <= 0.01 * expected.norm()


@pytest.mark.parametrize(
    ("columns", "group", "dtype"),
    [(40, 32, torch.bfloat16), (48, 16, torch.bfloat16), (48, 32, torch.float32)],
)
def test_int4_is_only_taken_where_it_fits(columns: int, group: int, dtype: torch.dtype) -> None:
    codes = torch.zeros(64, columns, dtype=torch.int32)
    scales = torch.ones(64 // group, columns)
    assert CpuInt4.pack(codes, scales, scales, group, dtype) is None
