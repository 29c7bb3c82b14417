"""weft-awq against checkpoints in AutoAWQ's packing."""

from __future__ import annotations

from weft.testing.packing import AwqFormat
from weft.testing.plugin import PluginSuite
from weft.testing.quantization import QuantizationSuite


class TestAwq(PluginSuite, QuantizationSuite):
    plugin = "quantization:awq"
    formats = {
        "groups of 32": AwqFormat(32),
        "groups of 128": AwqFormat(128),
        "one group": AwqFormat(-1),
        "old names": AwqFormat(
            64, {"bits": None, "w_bit": 4, "group_size": None, "q_group_size": 64}
        ),
    }
    refused = {
        "bits": ({"bits": 3}, "3 bits"),
        "no number": ({"bits": "four"}, "'four'"),
        "version": ({"version": "gemv_fast"}, "'gemv_fast'"),
        "group size": ({"group_size": 0}, "group_size 0"),
        "names": ({"modules_to_not_convert": "lm_head"}, "modules_to_not_convert"),
        "another method": ({"quant_method": "squeezellm"}, "'squeezellm'"),
    }
