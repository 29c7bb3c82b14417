"""weft-gptq against checkpoints in AutoGPTQ's packing."""

from __future__ import annotations

from weft.testing.packing import GptqFormat
from weft.testing.plugin import PluginSuite
from weft.testing.quantization import QuantizationSuite


class TestGptq(PluginSuite, QuantizationSuite):
    plugin = "quantization:gptq"
    formats = {
        "4 bits": GptqFormat(),
        "4 bits, no g_idx": GptqFormat(group_size=128, with_g_idx=False),
        "4 bits, one group": GptqFormat(group_size=-1, sym=False),
        "4 bits, act-order": GptqFormat(desc_act=True),
        "4 bits, act-order, asymmetric": GptqFormat(group_size=64, desc_act=True, sym=False),
        "4 bits, version 2": GptqFormat(sym=False, version=2),
        "8 bits": GptqFormat(bits=8, group_size=128),
        "8 bits, act-order, version 2": GptqFormat(bits=8, desc_act=True, sym=False, version=2),
        "2 bits": GptqFormat(bits=2, sym=False),
    }
    refused = {
        "three bits": ({"bits": 3}, "3 bits"),
        "no bits": ({"bits": None}, "None"),
        "format": ({"checkpoint_format": "marlin"}, "'marlin'"),
        "group size": ({"group_size": 0}, "group_size 0"),
        "names": ({"modules_to_not_convert": "lm_head"}, "modules_to_not_convert"),
        "another method": ({"quant_method": "squeezellm"}, "'squeezellm'"),
        "pattern": ({"dynamic": {"-:(": {}}}, "'-:('"),
    }
