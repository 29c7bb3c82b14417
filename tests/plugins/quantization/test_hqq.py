"""treadle-hqq against matrices as HQQ stores them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from quantized_formats.hqq import HqqFormat
from quantized_formats.loaded import as_loaded
from torch import Tensor
from treadle_hqq.config import read_config
from treadle_hqq.scheme import HqqScheme

from treadle.api.cache import DeviceInfo
from treadle.api.communicators import Communicator
from treadle.api.models import LinearSpec
from treadle.errors import UnsupportedModelError
from treadle.testing.linears import Layer, QuantizedLinear
from treadle.testing.packing import Format
from treadle.testing.plugin import PluginSuite
from treadle.testing.quantization import QuantizationSuite
from treadle_layers_kit.affine import AffineLinear


def params(**changes: Any) -> dict[str, Any]:
    stored: dict[str, Any] = HqqFormat().config()["quant_config"]
    return {**stored, "weight_quant_params": {**stored["weight_quant_params"], **changes}}


class TestHqq(PluginSuite, QuantizationSuite):
    plugin = "quantization:hqq"
    formats = {
        "4 bits": HqqFormat(),
        "4 bits, whole zeros, as floats": HqqFormat(whole_zeros=True, as_float=True),
        "2 bits": HqqFormat(2, 16),
        "3 bits": HqqFormat(3, 32),
        "8 bits, outputs": HqqFormat(8, None),
    }
    refused = {
        "bits": ({"quant_config": params(nbits=5)}, "nbits 5"),
        "axis": ({"quant_config": params(axis=0)}, "axis 0"),
        "group": ({"quant_config": params(group_size=0)}, "group_size 0"),
        "one scale": ({"quant_config": params(channel_wise=False)}, "channel_wise"),
        "scales": (
            {"quant_config": {**params(), "scale_quant_params": {"nbits": 8}}},
            "scale_quant",
        ),
        "no weights": ({"quant_config": {"self_attn.q_proj": {}}}, "weight_quant_params"),
        "names": ({"skip_modules": "lm_head"}, "skip_modules"),
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


def test_kinds_of_layers_have_their_own_bits() -> None:
    config = {
        "quant_method": "hqq",
        "quant_config": {"mlp.down_proj": params(nbits=2), "self_attn.q_proj": params(nbits=8)},
        "skip_modules": ["lm_head"],
    }
    scheme = HqqScheme(read_config(config), DeviceInfo("cpu"))

    def method(*names: str) -> Any:
        full = tuple(f"model.layers.0.{name}" for name in names)
        return scheme.linear_method(
            LinearSpec(full[0], full, 128, (64,) * len(full), False, torch.float32)
        )

    assert isinstance(down := method("mlp.down_proj"), AffineLinear) and down.bits == 2
    assert method("self_attn.q_proj").bits == 8
    assert method("mlp.up_proj") is None
    with pytest.raises(UnsupportedModelError, match="in full"):
        method("self_attn.q_proj", "self_attn.k_proj")
