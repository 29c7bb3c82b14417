"""treadle-modelopt against checkpoints as ModelOpt stores them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from quantized_formats.modelopt import ModelOptFormat
from treadle_modelopt.scheme import ModelOptScheme, read_config

from treadle.api.cache import DeviceInfo
from treadle.api.models import LinearSpec
from treadle.plugins import PluginManager
from treadle.testing.checkpoints import make_checkpoint
from treadle.testing.models import TinyModel
from treadle.testing.packing import pack_checkpoint
from treadle.testing.plugin import PluginSuite
from treadle.testing.quantization import QuantizationSuite


class TestModelOpt(PluginSuite, QuantizationSuite):
    plugin = "quantization:modelopt"
    formats = {
        "FP8": ModelOptFormat(),
        "FP8, outputs": ModelOptFormat("FP8_PER_CHANNEL_PER_TOKEN"),
        "NVFP4": ModelOptFormat("NVFP4", in_its_file=True),
    }
    refused = {
        "algorithm": ({"quant_algo": "W4A8_AWQ"}, "'W4A8_AWQ'"),
        "names": ({"ignore": "lm_head"}, "ignore in"),
        "group": ({"group_size": -1}, "group_size"),
        "layers": ({"quant_algo": "MIXED_PRECISION", "quantized_layers": [1]}, "quantized_layers"),
        "another method": ({"quant_method": "squeezellm"}, "'squeezellm'"),
    }


@pytest.mark.parametrize("algorithm", ["FP8", "NVFP4"])
def test_the_file_of_its_own_is_read(tmp_path: Path, algorithm: str) -> None:
    """Earlier versions say nothing in ``config.json``."""
    sizes = {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 1}
    source = make_checkpoint(tmp_path / "source", **sizes)
    packed, plain = tmp_path / "packed", tmp_path / "plain"
    format = ModelOptFormat(algorithm, in_its_file=True)
    pack_checkpoint(source, packed, plain, format)
    config = json.loads((packed / "config.json").read_text())
    stored = config.pop("quantization_config")
    (packed / "config.json").write_text(json.dumps(config))
    own = {"producer": {"name": "modelopt"}, "quantization": stored["quantization"]}
    (packed / "hf_quant_config.json").write_text(json.dumps(own))
    ids, plugins = torch.arange(3, 20), PluginManager()
    logits = TinyModel(packed, plugins).logits(ids)
    assert (logits - TinyModel(plain, plugins).logits(ids)).abs().max() < 1e-4


def test_layers_of_different_algorithms() -> None:
    layers = {"a.up_proj": {"quant_algo": "NVFP4"}, "a.down_proj": {"quant_algo": "FP8"}}
    config = {
        "quant_algo": "MIXED_PRECISION",
        "quantized_layers": layers,
        "exclude_modules": ["a.o*"],
    }
    built = ModelOptScheme(read_config({"quantization": config}), DeviceInfo("cpu"))
    kinds = {}
    for name in ("a.up_proj", "a.down_proj", "a.q_proj", "a.o_proj"):
        method = built.linear_method(LinearSpec(name, (name,), 64, (64,), False, torch.float32))
        kinds[name] = type(method).__name__
    assert list(kinds.values()) == ["Fp4Linear", "Fp8Linear", "NoneType", "NoneType"]
