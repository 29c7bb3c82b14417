"""The quantization plugins on a CUDA device, with the kernels that an engine gives their layers:
``pytest -m gpu``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import pytest
import torch
from quantized_formats.bitsandbytes import FourBitFormat, Int8Format
from quantized_formats.compressed_tensors import (
    FloatFormat,
    Fp4Format,
    IntFormat,
    UnpackedFormat,
)
from quantized_formats.gguf_blocks import GgufFormat, RandomBlocks
from quantized_formats.hqq import HqqFormat
from quantized_formats.loaded import as_loaded
from quantized_formats.modelopt import ModelOptFormat
from quantized_formats.mxfp4 import Mxfp4Format
from quantized_formats.quark import QuarkFormat
from quantized_formats.torchao import TorchAoFormat
from treadle_gguf.types import TYPES

from treadle.api.cache import DeviceInfo
from treadle.api.devices import dtype_name
from treadle.api.kinds import QUANTIZATION
from treadle.api.types import KernelOffer, KernelRequest
from treadle.plugins import PluginManager
from treadle.testing.linears import Layer, fill, pack
from treadle.testing.packing import AwqFormat, Format, Fp8Format, GptqFormat
from treadle.testing.quantization import QuantizationSuite
from treadle_layers_kit import Linear, ops
from treadle_layers_kit.int4 import PackedInt4
from treadle_layers_kit.packed_layout import packed_linear
from treadle_worker_kit.fusion import apply_fusions, kernel_finder

CARD = torch.cuda.get_device_capability() if torch.cuda.is_available() else None


@pytest.mark.gpu
@pytest.mark.skipif(CARD is None, reason="needs a CUDA device")
class OnCuda(QuantizationSuite):
    device = DeviceInfo("cuda", CARD)
    always_packed: ClassVar[bool] = True

    @property
    def layers(self) -> Mapping[str, Layer]:
        return {**super().layers, "large": Layer(4096, (1024, 512, 512))}

    def load(self, *arguments: Any, **named: Any) -> Linear:
        built = super().load(*arguments, **named)
        packed = dict(built.named_children()).get("int4")
        served = apply_fusions(
            built, kernel_finder(PluginManager()), self.device, dtype_name(built.dtype)
        )
        assert isinstance(packed, PackedInt4) == ("int4_linear" in served.backends)
        assert hasattr(built, "repacked") == ("packed_linear" in served.backends)
        if hasattr(built, "repacked"):
            assert built.repacked.op is not packed_linear
        if self.always_packed and built.dtype is not torch.float32:
            assert served.backends, "the weight is unpacked for each step"
        return built

    def test_the_gate_may_be_in_the_product(self) -> None:
        """Kernels read the packed weight alone, so that nothing else may take part in the layer."""
        layer, served = Layer(512, (512, 512)), 0
        for title, format in self.formats.items():
            for dtype in (torch.bfloat16, torch.float16):
                built = self.load(format, layer, pack(format, layer)[0], dtype)
                packed = Linear.packed_weight.fget(built)  # type: ignore[attr-defined]
                if packed is None:
                    continue
                request = KernelRequest(self.device, dtype_name(dtype), packed.sizes)
                name = f"{packed.OP}_silu_and_mul"
                offer = kernel_finder(PluginManager())(name, request)
                assert isinstance(offer, KernelOffer), title
                op, served = offer.load(), served + 1
                for rows in (3, 300, 2500):
                    x = self.inputs(layer, dtype, rows)
                    expected = ops.silu_and_mul(built(x)).float()
                    error = (packed.multiply(x, op).float() - expected).norm()
                    assert error < 0.01 * expected.norm(), (title, rows)
        if not served:
            pytest.skip("none of these has a packed weight alone")

    # These compare on the CPU, where the same classes run in the plugins' own tests.
    test_ranks_share_a_layer: ClassVar[None] = None  # type: ignore[assignment]
    test_a_model_is_its_dequantized_self: ClassVar[None] = None  # type: ignore[assignment]


class TestAwq(OnCuda):
    plugin = "quantization:awq"
    formats = {f"groups of {n}": AwqFormat(n) for n in (16, 32, 128)}


class TestGptq(OnCuda):
    plugin = "quantization:gptq"
    formats = {
        "4 bits": GptqFormat(group_size=128),
        "4 bits, act-order": GptqFormat(desc_act=True),
        "4 bits, groups of 8": GptqFormat(group_size=8),
        "8 bits": GptqFormat(bits=8, group_size=128),
        "8 bits, act-order": GptqFormat(bits=8, group_size=64, desc_act=True, sym=False),
        "3 bits": GptqFormat(bits=3, group_size=128),
        "2 bits": GptqFormat(bits=2, group_size=-1, sym=False),
    }


class TestGguf(OnCuda):
    plugin = "quantization:gguf"
    formats = {t: GgufFormat(t) for t in ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL")}


class TestGgufOfLargeBlocks(OnCuda):
    plugin = "quantization:gguf"
    formats = {t: RandomBlocks(t) for t in TYPES if TYPES[t][0] == 256}
    layers: Any = {"plain": Layer(256, (128,)), "fused": Layer(4096, (1024, 512), bias=True)}
    test_the_format_is_a_lossy_one: ClassVar[None] = None  # type: ignore[assignment]


class Loaded(OnCuda):
    """Matrices that a load format brings into rows first."""

    def load(
        self, format: Format, layer: Layer, tensors: Mapping[str, Any], *rest: Any, **named: Any
    ) -> Linear:
        return super().load(format, layer, as_loaded(format, tensors), *rest, **named)


class TestBitsAndBytes(Loaded):
    plugin = "quantization:bitsandbytes"
    formats = {"nf4": FourBitFormat(double=True), "fp4": FourBitFormat("fp4"), "int8": Int8Format()}


class TestHqq(Loaded):
    plugin = "quantization:hqq"
    formats = {"4 bits": HqqFormat(), "2 bits": HqqFormat(2, 16), "8 bits": HqqFormat(8, None)}


class TestTorchAo(Loaded):
    plugin = "quantization:torchao"
    formats = {"int8": TorchAoFormat(), "int4": TorchAoFormat("int4")}


class TestQuark(Loaded):
    plugin = "quantization:quark"
    formats = {
        "int8": QuarkFormat("int8"),
        "uint8, groups": QuarkFormat("uint8", "per_group"),
        "int4, outputs": QuarkFormat("int4", "per_channel"),
        "MXFP4": QuarkFormat("fp4", "per_group"),
    }


class TestCompressedTensors(OnCuda):
    plugin = "quantization:compressed-tensors"
    formats = {
        "W4A16": IntFormat(),
        "W4A16, act-order": IntFormat(act_order=True, symmetric=False),
        "W8A16": IntFormat(8, strategy="channel"),
        "W8A16, act-order": IntFormat(8, act_order=True),
        "W8": UnpackedFormat(),
        "W8, zero points": UnpackedFormat(strategy="tensor", symmetric=False),
        "NVFP4": Fp4Format(),
        "MXFP4": Fp4Format(32),
    }


class TestModelOpt(OnCuda):
    plugin = "quantization:modelopt"
    formats = {"NVFP4": ModelOptFormat("NVFP4")}


class TestMxfp4(OnCuda):
    plugin = "quantization:mxfp4"
    formats = {"blocks of 32": Mxfp4Format()}


class InFp8(OnCuda):
    always_packed = False
    # Activations are rounded to FP8 as well: three bits behind the point.
    tolerance = {"float32": 1e-4, "float16": 5e-2, "bfloat16": 5e-2}


class TestCompressedTensorsInFp8(InFp8):
    plugin = "quantization:compressed-tensors"
    formats = {"FP8": FloatFormat(static=True), "FP8, blocks": FloatFormat("block")}


class TestTorchAoInFp8(InFp8, Loaded):
    plugin = "quantization:torchao"
    formats = {"fp8": TorchAoFormat("fp8")}


class TestModelOptInFp8(InFp8):
    plugin = "quantization:modelopt"
    formats = {"matrix": ModelOptFormat(), "outputs": ModelOptFormat("FP8_PER_CHANNEL_PER_TOKEN")}


class TestQuarkInFp8(InFp8, Loaded):
    plugin = "quantization:quark"
    formats = {"FP8": QuarkFormat()}


class TestFp8(InFp8):
    plugin = "quantization:fp8"
    formats = {
        "matrix": Fp8Format(),
        "matrix, static": Fp8Format(static=True),
        "blocks": Fp8Format("block"),
        "outputs": Fp8Format("channel"),
    }


class InInt8(OnCuda):
    always_packed = False
    # Activations are rounded to int8 as well: a step is 1/127 of a row's largest number.
    tolerance: ClassVar[Mapping[str, float]] = {"float32": 1e-4, "float16": 2e-2, "bfloat16": 2e-2}


class TestCompressedTensorsInInt8(InInt8):
    plugin = "quantization:compressed-tensors"
    formats = {
        "W8A8": UnpackedFormat(inputs="symmetric"),
        "matrix": UnpackedFormat(strategy="tensor", inputs="symmetric"),
        "zero points": UnpackedFormat(inputs="asymmetric"),
        "static": UnpackedFormat(inputs="symmetric", static=True),
        "static, zero points": UnpackedFormat(inputs="asymmetric", static=True),
    }


class TestQuarkInInt8(InInt8, Loaded):
    plugin = "quantization:quark"
    formats = {"int8": QuarkFormat("int8", "per_channel", rounds_inputs=True)}


class TestTorchAoInInt8(InInt8, Loaded):
    plugin = "quantization:torchao"
    formats = {"int8": TorchAoFormat(rounds_inputs=True)}


FAST = {"outputs": Fp8Format("channel"), "blocks": Fp8Format("block")}


@pytest.mark.gpu
@pytest.mark.skipif(CARD is None or CARD < (9, 0), reason="needs a Hopper card")
@pytest.mark.parametrize("name", FAST)
def test_hopper_multiplies_in_fp8(name: str) -> None:
    """Otherwise the tests above compare the dequantized product with itself."""
    format: Format = FAST[name]
    layer = Layer(512, (256,))
    scheme = (
        TestFp8()
        .plugin_manager()
        .create(QUANTIZATION, "fp8", checkpoint=format.config(), device=DeviceInfo("cuda", CARD))
    )
    built = fill(scheme, layer, pack(format, layer)[0], torch.bfloat16, device="cuda")
    assert built.method.uses_product
