"""treadle-quark against matrices as Quark exports them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from quantized_formats.loaded import as_loaded
from quantized_formats.quark import QuarkFormat
from torch import Tensor
from treadle_quark.config import read_config
from treadle_quark.scheme import QuarkScheme

from treadle.api.cache import DeviceInfo
from treadle.api.communicators import Communicator
from treadle.api.models import LinearSpec
from treadle.testing.linears import Layer, QuantizedLinear
from treadle.testing.packing import Format
from treadle.testing.plugin import PluginSuite
from treadle.testing.quantization import QuantizationSuite


def weight(**changes: Any) -> dict[str, Any]:
    stored = QuarkFormat().config()["global_quant_config"]
    return {"global_quant_config": {**stored, "weight": {**stored["weight"], **changes}}}


class TestQuark(PluginSuite, QuantizationSuite):
    plugin = "quantization:quark"
    formats = {
        "FP8": QuarkFormat(),
        "FP8, outputs": QuarkFormat(scheme="per_channel"),
        "int8": QuarkFormat("int8"),
        "int8, outputs": QuarkFormat("int8", "per_channel"),
        "int8 times int8": QuarkFormat("int8", "per_channel", rounds_inputs=True),
        "uint8, groups": QuarkFormat("uint8", "per_group"),
        "int4, outputs": QuarkFormat("int4", "per_channel"),
        "int4, groups": QuarkFormat("int4", "per_group"),
        "uint4, groups, in order": QuarkFormat("uint4", "per_group", reorder=False),
        "MXFP4": QuarkFormat("fp4", "per_group"),
    }
    refused = {
        "dtype": (weight(dtype="mx6"), "'mx6'"),
        "scheme": (weight(qscheme="per_token"), "'per_token'"),
        "axis": (weight(qscheme="per_channel", ch_axis=1), "ch_axis 1"),
        "group": (weight(qscheme="per_group", group_size=0), "group_size 0"),
        "exponents": (weight(dtype="fp4", qscheme="per_group", group_size=16), "scale_format"),
        "dynamic": (weight(is_dynamic=True), "is_dynamic"),
        "stages": ({"global_quant_config": {"weight": [{}, {}]}}, "2 stages"),
        "packing": ({"export": {"pack_method": "other"}}, "'other'"),
        "not packed": ({"export": {"weight_format": "fake_quantized"}}, "'fake_quantized'"),
        "rotation": ({"algo_config": [{"name": "rotation"}]}, "rotate"),
        "names": ({"exclude": "lm_head"}, "exclude"),
        "another method": ({"quant_method": "squeezellm"}, "'squeezellm'"),
    }

    def load(
        self,
        format: Format,
        layer: Layer,
        tensors: Mapping[str, Tensor],
        dtype: torch.dtype,
        tp_group: Communicator | None = None,
    ) -> QuantizedLinear:
        return super().load(format, layer, as_loaded(format, tensors), dtype, tp_group)


def test_layers_by_pattern() -> None:
    """The first pattern counts, and what is excluded is in full whatever patterns say."""
    stored = QuarkFormat().config(["o_proj"])
    stored["layer_quant_config"] = {
        "*down_proj": QuarkFormat("int4", "per_group").config()["global_quant_config"],
        "*.mlp.*": {"weight": None},
        "*o_proj": QuarkFormat("int8").config()["global_quant_config"],
    }
    scheme = QuarkScheme(read_config(stored), DeviceInfo("cpu"))
    kinds = {}
    for name in ("mlp.down_proj", "mlp.up_proj", "self_attn.o_proj", "self_attn.q_proj"):
        path = f"model.layers.0.{name}"
        spec = LinearSpec(path, (path,), 128, (64,), False, torch.float32)
        kinds[name] = type(scheme.linear_method(spec)).__name__
    assert list(kinds.values()) == ["AffineLinear", "NoneType", "NoneType", "Fp8Linear"]


def test_scales_of_the_cache_are_kept_and_those_of_activations_are_not() -> None:
    scheme = QuarkScheme(read_config(QuarkFormat().config()), DeviceInfo("cpu"))
    block = "model.layers.0.self_attn"
    for name in (f"{block}.k_proj.output_scale", f"{block}.q_proj.weight_scale"):
        assert scheme.rename(name) == name
    for name in (f"{block}.q_proj.output_scale", f"{block}.q_proj.input_scale"):
        assert scheme.rename(name) is None
