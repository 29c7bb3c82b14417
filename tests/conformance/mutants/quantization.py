"""Weights in int8, how a checkpoint stores them, and what may be wrong with either."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mutants.specimen import Mutant, Specimen
from treadle.testing.linears import Layer
from treadle.testing.packing import Format
from treadle.testing.quantization import QuantizationSuite

SOURCE = """
import torch
from treadle.api import impl
from treadle.errors import CheckpointError
from treadle_layers_kit import empty_weight
from treadle.testing.packing import Packed

TREADLE = {"quantization": ["mine"]}


class Format:
    optional = ()

    def config(self, unquantized=()):
        return {"quant_method": "mine", "bits": 8, "skip": list(unquantized)}

    def pack(self, weight):
        scale = weight.abs().amax(dim=1) / 127
        codes = (weight / scale[:, None]).round().to(torch.int8)
        return Packed({"weight": codes, "weight_scale": scale}, codes.float() * scale[:, None])


class Method:
    def create_weights(self, module, spec):
        outputs = sum(spec.out_features)
        codes = empty_weight((outputs, spec.in_features), torch.int8, output_dim=0, input_dim=1)
        module.register_parameter("weight", codes)
        scale = empty_weight((outputs,), torch.float32, output_dim=0)
        module.register_parameter("weight_scale", scale)

    def process_weights_after_loading(self, module):
        pass

    def apply(self, module, x, bias):
        full = module.weight.float() * module.weight_scale[:, None]
        y = (x.float() @ full.t()).to(x.dtype)
        return y if bias is None else y + bias


class Scheme:
    name = "mine"

    def __init__(self, skip):
        self.skip = skip

    def linear_method(self, spec):
        if spec.names == ("lm_head",):
            return None
        kept = [name for name in spec.names if not self.left(name)]
        if not kept:
            return None
        if len(kept) < len(spec.names):
            raise CheckpointError(f"{', '.join(kept)} is quantized and others beside it are not")
        return Method()

    def left(self, name):
        return any(f".{name}".endswith(f".{end}") for end in self.skip)

    def experts_method(self, spec):
        return None

    def kv_cache_dtype(self, layer):
        return None


@impl
def treadle_quantization(method, checkpoint):
    if method != "mine":
        return None
    if checkpoint["bits"] != 8:
        raise CheckpointError(f"there are {checkpoint['bits']} bits, mine has 8")
    return Scheme(checkpoint["skip"])
"""
APPLIED = "test_every_layer_is_its_dequantized_weight"
SMALL = "test_weights_stay_small"


class Quantized(QuantizationSuite):
    refused = {"bits": ({"bits": 4}, "4 bits")}
    model = {
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 32,
    }

    @property
    def layers(self) -> Mapping[str, Layer]:
        return {"plain": Layer(64, (32,)), "fused": Layer(64, (32, 16), bias=True)}

    @property
    def shared(self) -> Mapping[str, Layer]:
        return {
            "columns": Layer(64, (32, 16), bias=True, split="column"),
            "rows": Layer(96, (32,), split="row"),
        }

    @property
    def formats(self) -> Mapping[str, Format]:
        plugin: Any = self.plugin_manager().load(self.kind, self.key)
        return {"int8": plugin.Format()}


SPECIMENS = (
    Specimen(
        suite=Quantized,
        plugin="quantization:mine",
        source=SOURCE,
        mutants=(
            Mutant(  # a scale of the inputs where there are none
                APPLIED, {"y = (x.float()": "x.abs().amax()\n        y = (x.float()"}
            ),
            Mutant(
                APPLIED,
                {"y if bias is None else y + bias": "y"},
                also=frozenset({"test_ranks_share_a_layer"}),
                why="its layers have biases too",
            ),
            Mutant(
                "test_the_format_is_a_lossy_one",
                {
                    "abs().amax(dim=1) / 127": "new_ones(len(weight))",
                    "[:, None]).round()": "[:, None])",
                    "torch.int8": "torch.float32",
                },
                also=frozenset({SMALL}),
                why="what loses nothing saves nothing",
            ),
            Mutant(
                "test_inputs_may_lie_apart", {"(x.float()": "(x.view(-1).view(x.shape).float()"}
            ),
            Mutant(
                SMALL,
                {
                    "        pass\n": "        module.register_buffer('full', module.weight.float())\n"
                },
            ),
            Mutant(
                "test_what_is_missing_is_named",
                {"torch.float32, output_dim=0)": "torch.float32, output_dim=0, default=1.0)"},
            ),
            Mutant(
                "test_ranks_share_a_layer",
                {
                    "        outputs = sum": "        if spec.in_features % 32:\n            raise ValueError('a tile has 32 inputs')\n"
                    "        outputs = sum"
                },
            ),
            Mutant(
                "test_layers_that_are_left_alone",
                {"if len(kept) < len(spec.names)": "if len(kept) > len(spec.names)"},
            ),
            Mutant(
                "test_two_layers_share_nothing",
                {
                    "class Scheme": "ONE = Method()\n\n\nclass Scheme",
                    "return Method()": "return ONE",
                },
            ),
            Mutant("test_it_answers_for_experts_and_caches", {"def experts_method": "def expert"}),
            Mutant("test_what_it_cannot_read_is_refused", {" != 8:": " == 3:"}),
            Mutant(
                "test_a_model_is_its_dequantized_self",
                {'spec.names == ("lm_head",)': 'spec.names[-1].endswith(("lm_head", "o_proj"))'},
            ),
        ),
    ),
)
