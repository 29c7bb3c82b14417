"""Weights row by row, for libraries that run whole steps on a CPU: the same numbers as in the file."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from quantized_formats.bitsandbytes import FourBitFormat, Int8Format
from quantized_formats.compressed_tensors import FloatFormat, Fp4Format, IntFormat, UnpackedFormat
from quantized_formats.gguf_blocks import RandomBlocks
from quantized_formats.hqq import HqqFormat
from quantized_formats.loaded import as_loaded
from quantized_formats.quark import QuarkFormat
from quantized_formats.torchao import TorchAoFormat
from torch import Tensor, nn
from treadle_gguf.scheme import GgufScheme
from treadle_gguf.types import FLOATS, TYPES

from treadle.api.cache import DeviceInfo
from treadle.api.kinds import QUANTIZATION
from treadle.plugins import PluginManager
from treadle.testing.linears import Layer, QuantizedLinear, fill, pack
from treadle.testing.packing import AwqFormat, Format, Fp8Format, GptqFormat
from treadle_layers_kit.row_bytes import RowBytes
from treadle_layers_kit.row_int4 import RowInt4
from treadle_layers_kit.row_packing import RowPacking

CPU = DeviceInfo("cpu")
LAYER = Layer(512, (64, 32), bias=True)
FOUR: dict[str, Format] = {
    **{type: RandomBlocks(type) for type in ("Q4_0", "Q4_1", "Q4_K", "IQ4_NL", "IQ4_XS")},
    "AWQ, groups of 32": AwqFormat(32),
    "AWQ, one group": AwqFormat(-1),
    "GPTQ, act-order": GptqFormat(group_size=64, desc_act=True),
    "GPTQ, act-order, zero points": GptqFormat(group_size=32, desc_act=True, sym=False),
    "GPTQ, 3 bits, act-order": GptqFormat(3, 64, desc_act=True, sym=False),
    "GPTQ, 2 bits": GptqFormat(2, 128, sym=False),
    "W4A16, act-order": IntFormat(act_order=True, symmetric=False),
    "W4A16, not packed": IntFormat(packed=False),
    "HQQ, 2 bits": HqqFormat(2, 64),
    "torchao, 4 bits": TorchAoFormat("int4"),
    "NF4": FourBitFormat(),
    "FP4": FourBitFormat("fp4"),
    "MXFP4": Fp4Format(32),
}
BYTES: dict[str, Format] = {
    **{type: RandomBlocks(type) for type in TYPES if type not in (*FOUR, *FLOATS)},
    "AWQ, groups of 16": AwqFormat(16),
    "GPTQ, 8 bits": GptqFormat(8, 128),
    "GPTQ, 8 bits, one group": GptqFormat(8, -1),
    "GPTQ, 8 bits, act-order": GptqFormat(8, 32, desc_act=True, sym=False),
    "W8A16, act-order": IntFormat(8, act_order=True),
    "W8A16, zero points": IntFormat(8, group_size=16, symmetric=False),
    "W8A8": UnpackedFormat(inputs="symmetric"),
    "W8A8, a matrix, static": UnpackedFormat(strategy="tensor", inputs="symmetric", static=True),
    "W8A8, zero points": UnpackedFormat(inputs="asymmetric", symmetric=False),
    "Quark, 8 bits": QuarkFormat("int8", "per_channel"),
    "torchao, 8 bits": TorchAoFormat(rounds_inputs=True),
    "LLM.int8": Int8Format(),
    "HQQ, 8 bits": HqqFormat(8, 64),
    "FP8, a matrix": Fp8Format(),
    "FP8, outputs": FloatFormat("channel"),
    "FP8, blocks": Fp8Format("block"),
    "NVFP4": Fp4Format(),
}
NONE: dict[str, Format] = {
    "GPTQ, groups of 40": GptqFormat(group_size=40),
    "HQQ, groups of 8": HqqFormat(4, 8),
}


def load(format: Format, layer: Layer = LAYER) -> tuple[QuantizedLinear, Tensor, Tensor | None]:
    """The layer, asked for rows where it can have them, and its weight and bias."""
    tensors, weight, bias = pack(format, layer)
    config = format.config()
    scheme = PluginManager().create(
        QUANTIZATION, config["quant_method"], checkpoint=config, device=CPU
    )
    return fill(scheme, layer, as_loaded(format, tensors), torch.bfloat16), weight, bias


@pytest.fixture
def _rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a library runs the steps."""
    made = RowPacking.__init__

    def make(self: RowPacking, *arguments: Any, **named: Any) -> None:
        made(self, *arguments, **named)
        self.by_rows = not self.row_misfit()

    monkeypatch.setattr(RowPacking, "__init__", make)


def check(
    built: QuantizedLinear, kind: type[nn.Module], weight: Tensor, bias: Tensor | None
) -> None:
    (rows,) = built.children()
    assert isinstance(rows, RowInt4 | RowBytes) and type(rows) is kind
    left = {name for name, _ in built.named_parameters(recurse=False)} - {"bias"}
    assert not left, "nothing is kept twice"
    order = dict(built.named_buffers(recurse=False)).get("order")
    dense = rows.dense(torch.float32)
    if order is not None:
        dense = dense[:, torch.argsort(order)]
    torch.testing.assert_close(dense, weight, rtol=3e-6, atol=3e-6 * float(weight.abs().max()))
    assert bias is not None
    x = torch.randn(2, 3, dense.shape[1]).bfloat16()
    expected = x.float() @ weight.t() + bias
    assert float((built(x).float() - expected).norm() / expected.norm()) < 8e-3


@pytest.mark.usefixtures("_rows")
@pytest.mark.parametrize("name", [*FOUR, *BYTES])
def test_numbers_are_those_of_the_file(name: str) -> None:
    kind, format = (RowInt4, FOUR[name]) if name in FOUR else (RowBytes, BYTES[name])
    built, weight, bias = load(format)
    check(built, kind, weight, bias)


@pytest.mark.usefixtures("_rows")
@pytest.mark.parametrize(
    "types", [("Q4_K", "Q6_K"), ("Q4_0", "Q8_0"), ("IQ4_NL", "Q5_1"), ("Q4_0", "Q4_1")]
)
def test_matrices_of_several_types_are_one_weight_of_bytes(types: tuple[str, str]) -> None:
    """In the smallest groups of them."""
    tensors: dict[str, Tensor] = {}
    weights = []
    for name, type in zip(LAYER.names, types, strict=True):
        packed = RandomBlocks(type).pack(LAYER.weights()[name])
        tensors[f"model.layers.0.block.{name}.weight"] = packed.tensors["weight"]
        tensors[f"model.layers.0.block.{name}.bias"] = torch.ones(len(packed.weight))
        weights.append(packed.weight)
    names = [f"model.layers.0.block.{name}" for name in LAYER.names]
    scheme = GgufScheme(dict(zip(names, types, strict=True)), "model.gguf")
    built = fill(scheme, LAYER, tensors, torch.bfloat16)
    check(built, RowBytes, torch.cat(weights), torch.ones(96))


@pytest.mark.usefixtures("_rows")
@pytest.mark.parametrize("name", NONE)
def test_other_weights_stay_as_they_are(name: str) -> None:
    layer = Layer(240, (64, 32), bias=True) if "40" in name else LAYER
    built, weight, bias = load(NONE[name], layer)
    assert not any(isinstance(child, RowInt4 | RowBytes) for child in built.children())
    x = torch.randn(5, layer.inputs).bfloat16()
    expected = x.float() @ weight.t() + bias  # type: ignore[operator]
    assert float((built(x).float() - expected).norm() / expected.norm()) < 8e-3


def test_who_does_not_ask_gets_no_rows() -> None:
    for format in (
        BYTES["Q8_0"],
        BYTES["FP8, blocks"],
        BYTES["W8A8"],
        FOUR["GPTQ, 3 bits, act-order"],
    ):
        built, *_ = load(format)
        assert not any(isinstance(child, RowInt4 | RowBytes) for child in built.children())
