"""weft-fp8 against checkpoints as AutoFP8, DeepSeek, Mistral and Meta store them."""

from __future__ import annotations

from weft.testing.packing import Fp8Format
from weft.testing.plugin import PluginSuite
from weft.testing.quantization import QuantizationSuite


class TestFp8(PluginSuite, QuantizationSuite):
    plugin = "quantization:fp8"
    formats = {
        "matrix": Fp8Format(),
        "matrix, static": Fp8Format(static=True),
        "blocks": Fp8Format("block"),
        "small blocks": Fp8Format("block", block=(32, 64)),
        "outputs": Fp8Format("channel"),
    }
    refused = {
        "format": ({"fmt": "e5m2"}, "'e5m2'"),
        "activations": ({"activation_scheme": "sometimes"}, "'sometimes'"),
        "block": ({"weight_block_size": [128]}, "[128]"),
        "names": ({"ignored_layers": "lm_head"}, "ignored_layers"),
        "another method": ({"quant_method": "squeezellm"}, "'squeezellm'"),
    }
