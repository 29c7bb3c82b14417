"""treadle-compressed-tensors against checkpoints as llm-compressor stores them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from quantized_formats.compressed_tensors import (
    FloatFormat,
    Fp4Format,
    IntFormat,
    UnpackedFormat,
)
from treadle_compressed_tensors.config import read_config
from treadle_compressed_tensors.scheme import CompressedTensorsScheme

from treadle.api.cache import DeviceInfo
from treadle.api.models import LinearSpec
from treadle.errors import CheckpointError, UnsupportedModelError
from treadle.testing.linears import Layer, fill, pack
from treadle.testing.plugin import PluginSuite
from treadle.testing.quantization import QuantizationSuite
from treadle_layers_kit.small_floats import fp4_to_float32

WEIGHTS = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}


def groups(**changes: Any) -> dict[str, Any]:
    return {"config_groups": {"g": {"targets": ["Linear"], "weights": {**WEIGHTS, **changes}}}}


class TestCompressedTensors(PluginSuite, QuantizationSuite):
    plugin = "quantization:compressed-tensors"
    formats = {
        "W4A16": IntFormat(),
        "W4A16, zero points": IntFormat(symmetric=False),
        "W4A16, act-order and zero points": IntFormat(act_order=True, symmetric=False),
        "W8A16, outputs": IntFormat(8, strategy="channel"),
        "W8": UnpackedFormat(),
        "W8, matrix, zero points": UnpackedFormat(strategy="tensor", symmetric=False),
        "W8A8": UnpackedFormat(inputs="symmetric"),
        "W8A8, static, zero points": UnpackedFormat(inputs="asymmetric", static=True),
        "FP8, static": FloatFormat(static=True),
        "FP8, blocks": FloatFormat("block"),
        "NVFP4": Fp4Format(),
        "MXFP4": Fp4Format(32),
    }
    refused = {
        "bits": (groups(num_bits=3), "3 bits"),
        "strategy": (groups(strategy="token"), "'token'"),
        "group size": (groups(group_size=0), "group_size"),
        "negative group": (groups(group_size=-1), "group_size -1"),
        "no groups": ({"config_groups": None}, "config_groups"),
        "format": ({"format": "marlin-24"}, "'marlin-24'"),
        "pattern": ({"ignore": ["re:("]}, "regular expression"),
        "names": ({"ignore": "lm_head"}, "ignore"),
        "block": (
            groups(num_bits=8, type="float", strategy="block", block_structure=[128]),
            "block_structure",
        ),
        "sparsity": ({"sparsity_config": {"format": "sparse-24-bitmask"}}, "without sparsity"),
        "transforms": ({"transform_config": {"config_groups": {"r": {}}}}, "rotated"),
        "another method": ({"quant_method": "squeezellm"}, "'squeezellm'"),
    }


def scheme(config: dict[str, Any]) -> CompressedTensorsScheme:
    return CompressedTensorsScheme(read_config(config), DeviceInfo("cpu"))


def kind(built: CompressedTensorsScheme, name: str) -> str:
    method = built.linear_method(LinearSpec(name, (name,), 128, (64,), False, torch.float32))
    return "none" if method is None else type(method).__name__


def test_layers_have_the_scheme_that_names_them_best() -> None:
    """Names come before patterns and those before classes, whatever the order of the groups is."""
    fp8 = {"num_bits": 8, "type": "float", "strategy": "channel"}
    nvfp4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
    config = {
        "quant_method": "compressed-tensors",
        "format": "mixed-precision",
        "config_groups": {
            "a": {"targets": ["Linear"], "weights": WEIGHTS, "format": "pack-quantized"},
            "b": {"targets": ["re:.*down_proj$"], "weights": fp8, "format": "float-quantized"},
            "c": {
                "targets": ["model.layers.1.mlp.down_proj"],
                "weights": nvfp4,
                "format": "nvfp4-pack-quantized",
            },
            "d": {"targets": ["re:.*o_proj"], "weights": None},
        },
        "ignore": ["lm_head", "re:.*layers.3.*"],
    }
    built = scheme(config)
    layers = "model.layers"
    assert kind(built, f"{layers}.0.mlp.up_proj") == "IntLinear"
    assert kind(built, f"{layers}.0.mlp.down_proj") == "Fp8Linear"
    assert kind(built, f"{layers}.1.mlp.down_proj") == "Fp4Linear"
    assert kind(built, f"{layers}.0.self_attn.o_proj") == "none"
    assert kind(built, f"{layers}.3.mlp.up_proj") == "none"
    assert kind(built, "lm_head") == "none"
    names = (f"{layers}.0.mlp.down_proj", f"{layers}.0.mlp.up_proj")
    with pytest.raises(UnsupportedModelError, match="stores differently"):
        built.linear_method(LinearSpec("x", names, 128, (64, 64), False, torch.float32))


def test_tensors_that_say_nothing_about_weights_are_not_read() -> None:
    built = scheme(IntFormat().config())
    block = "model.layers.0.self_attn"
    for leaf in ("weight_shape", "input_scale", "weight_zero_point"):
        assert built.rename(f"{block}.q_proj.{leaf}") is None
    for name in (
        f"{block}.k_scale",
        f"{block}.k_proj.output_scale",
        f"{block}.q_proj.weight_scale",
    ):
        assert built.rename(name) == name
    assert scheme(IntFormat(symmetric=False).config()).rename("a.weight_zero_point")


def test_the_numbers_of_fp4() -> None:
    codes = torch.arange(16, dtype=torch.uint8)
    values = fp4_to_float32((codes | codes.flip(0) << 4)[:, None])
    positive = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    assert values[:, 0].tolist() == [*positive, *(-v for v in positive)]
    assert torch.equal(values[:, 1], values[:, 0].flip(0))


def test_groups_of_act_order_that_are_not_there() -> None:
    layer = Layer(128, (64,))
    tensors, *_ = pack(IntFormat(act_order=True), layer)
    name = next(n for n in tensors if n.endswith("g_idx"))
    tensors[name] = tensors[name] + 1
    with pytest.raises(CheckpointError, match="names groups 1 to 4, but there are 4"):
        fill(scheme(IntFormat(act_order=True).config()), layer, tensors, torch.float32)


def test_inputs_that_fill_no_word() -> None:
    layer = Layer(100, (64,))
    format = IntFormat(strategy="channel")
    whole = Layer(104, (64,))
    tensors, weight, _ = pack(format, whole)
    scaled = fill(scheme(format.config()), layer, tensors, torch.float32)
    x = torch.randn(3, 100)
    torch.testing.assert_close(scaled(x), x @ weight[:, :100].t(), atol=1e-5, rtol=1e-4)


# --------------------------------------------------------- the numbers of the package itself

SCHEMES = {
    "W4A16": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32},
    "W4A16 asym": {**WEIGHTS, "symmetric": False},
    "W8A16": {"num_bits": 8, "type": "int", "strategy": "channel"},
    "FP8": {"num_bits": 8, "type": "float", "strategy": "tensor"},
    "FP8 channel": {"num_bits": 8, "type": "float", "strategy": "channel"},
    "FP8 block": {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [32, 32]},
    "NVFP4": {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16},
    "MXFP4": {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32},
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("title", SCHEMES)
def test_logits_are_those_of_the_package(title: str, tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors", reason="compares with compressed-tensors itself")
    from quantized_formats.compressed_reference import compare

    compare(tmp_path, SCHEMES[title])
