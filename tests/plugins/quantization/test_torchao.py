"""treadle-torchao against matrices as torchao stores them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from quantized_formats.loaded import as_loaded
from quantized_formats.torchao import TorchAoFormat, typed
from torch import Tensor
from treadle_torchao.config import read_config
from treadle_torchao.scheme import TorchAoScheme

from treadle.api.cache import DeviceInfo
from treadle.api.communicators import Communicator
from treadle.api.models import LinearSpec
from treadle.errors import CheckpointError
from treadle.testing.linears import Layer, QuantizedLinear, pack
from treadle.testing.packing import Format
from treadle.testing.plugin import PluginSuite
from treadle.testing.quantization import QuantizationSuite


def default(type: str, **data: Any) -> dict[str, Any]:
    return {"quant_type": {"default": typed(type, **data)}}


class TestTorchAo(PluginSuite, QuantizationSuite):
    plugin = "quantization:torchao"
    formats = {
        "int8": TorchAoFormat(),
        "int8, matrix": TorchAoFormat(whole=True),
        "int8 times int8": TorchAoFormat(rounds_inputs=True),
        "fp8": TorchAoFormat("fp8"),
        "fp8, matrix": TorchAoFormat("fp8", whole=True),
        "int4, one a byte": TorchAoFormat("intx"),
        "int3, one a byte": TorchAoFormat("intx", 3),
        "int4": TorchAoFormat("int4"),
    }
    refused = {
        "type": (default("NVFP4WeightOnlyConfig"), "'NVFP4WeightOnlyConfig'"),
        "words": ({"quant_type": "int8_weight_only"}, "before torchao had safetensors"),
        "bits": (default("IntxWeightOnlyConfig", weight_dtype="int9"), "'int9'"),
        "layout": (
            default("Int4WeightOnlyConfig", int4_packing_format="tile_packed_to_4d"),
            "'tile_packed_to_4d'",
        ),
        "group": (default("Int4WeightOnlyConfig", group_size=-1), "group_size -1"),
        "granularity": (
            default("Int8WeightOnlyConfig", granularity=typed("PerToken")),
            "PerToken",
        ),
        "fp8": (default("Float8WeightOnlyConfig", weight_dtype="float8_e5m2"), "'float8_e5m2'"),
        "block": (
            default("Float8WeightOnlyConfig", granularity=typed("PerBlock", block_size=[128])),
            "block_size",
        ),
        "embeddings": ({"include_input_output_embeddings": True}, "embeddings"),
        "pattern": (default("FqnToConfig", fqn_to_config={"re:(": None}), "regular expression"),
        "names": ({"modules_to_not_convert": "lm_head"}, "modules_to_not_convert"),
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


def test_layers_by_name() -> None:
    """Exact names come before patterns, the first pattern counts, and ``None`` is in full."""
    table = {
        "re:.*down_proj": None,
        "model.layers.0.mlp.down_proj": TorchAoFormat("int4").type,
        "re:.*(q|k)_proj.weight": TorchAoFormat("fp8").type,
        "_default": TorchAoFormat().type,
    }
    stored = {"quant_method": "torchao", **default("FqnToConfig", fqn_to_config=table)}
    scheme = TorchAoScheme(read_config(stored), DeviceInfo("cpu"))
    kinds = []
    for name in ("0.mlp.down_proj", "1.mlp.down_proj", "0.self_attn.q_proj", "0.mlp.up_proj"):
        path = f"model.layers.{name}"
        spec = LinearSpec(path, (path,), 128, (64,), False, torch.float32)
        method: Any = scheme.linear_method(spec)
        kinds.append(getattr(method, "bits", type(method).__name__))
    assert kinds == [4, "NoneType", "Fp8Linear", 8]


@pytest.mark.parametrize("leaf", ["act_pre_scale", "scale_and_zero"])
def test_tensors_of_other_layouts_are_named(leaf: str) -> None:
    format = TorchAoFormat("int4")
    tensors = pack(format, Layer(64, (32,)))[0]
    path = next(iter(tensors)).rpartition(".")[0]
    with pytest.raises(CheckpointError, match=rf"{path}._weight_{leaf} in model.safetensors"):
        as_loaded(format, {**tensors, f"{path}._weight_{leaf}": torch.ones(1)})
