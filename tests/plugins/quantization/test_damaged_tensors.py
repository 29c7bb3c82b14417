"""Every method refuses a matrix whose tensors cannot be right, by tensor and file, before anything is computed.

Rows are the formats of all methods, columns the faults. What a format does not have (a scale, bytes of FP8)
makes no case.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import pytest
import torch
from quantized_formats.awq import GemvFormat
from quantized_formats.bitsandbytes import FourBitFormat, Int8Format
from quantized_formats.compressed_tensors import (
    FloatFormat,
    Fp4Format,
    IntFormat,
    UnpackedFormat,
)
from quantized_formats.gguf_blocks import GgufFormat
from quantized_formats.hqq import HqqFormat
from quantized_formats.loaded import FILE, as_loaded
from quantized_formats.modelopt import ModelOptFormat
from quantized_formats.mxfp4 import Mxfp4Format
from quantized_formats.quark import QuarkFormat
from quantized_formats.torchao import TorchAoFormat
from torch import Tensor

from treadle.api.cache import DeviceInfo
from treadle.api.kinds import QUANTIZATION
from treadle.errors import CheckpointError
from treadle.plugins import PluginManager
from treadle.testing.linears import HOME, Layer, fill, pack
from treadle.testing.packing import AwqFormat, Format, Fp8Format, GptqFormat

FORMATS: Mapping[str, Format] = {
    "awq": AwqFormat(),
    "awq gemv": GemvFormat(),
    "awq gemv_fast": GemvFormat("gemv_fast"),
    "gptq": GptqFormat(desc_act=True),
    "gptq 3": GptqFormat(3, sym=False),
    "fp8": Fp8Format(static=True),
    "fp8 blocks": Fp8Format("block", block=(32, 32)),
    "fbgemm_fp8": Fp8Format("channel"),
    "bitsandbytes nf4": FourBitFormat(),
    "bitsandbytes nf4 double": FourBitFormat(double=True),
    "bitsandbytes int8": Int8Format(),
    "compressed int4": IntFormat(symmetric=False),
    "compressed int8": UnpackedFormat(),
    "compressed fp8": FloatFormat("channel"),
    "compressed nvfp4": Fp4Format(),
    "compressed mxfp4": Fp4Format(32),
    "modelopt fp8": ModelOptFormat(),
    "modelopt nvfp4": ModelOptFormat("NVFP4"),
    "gguf Q4_0": GgufFormat("Q4_0"),
    "gguf Q6_K": GgufFormat("Q6_K"),
    "hqq": HqqFormat(),
    "hqq 3": HqqFormat(3, 32),
    "torchao int8": TorchAoFormat(),
    "torchao intx": TorchAoFormat("intx"),
    "torchao int4": TorchAoFormat("int4"),
    "torchao fp8": TorchAoFormat("fp8"),
    "quark fp8": QuarkFormat(),
    "quark int4": QuarkFormat("int4", "per_group"),
    "quark uint8": QuarkFormat("uint8", "per_group"),
    "quark mxfp4": QuarkFormat("fp4", "per_group"),
    "mxfp4": Mxfp4Format(),
}
LAYER = Layer(256, (64,))
MATRIX = f"{HOME}.a_proj"
NAN, INF = float("nan"), float("inf")
# What may be below 0: auto-round writes signs, and zero points and tables are no scales.
SIGNED = ("scales", "zero", "zero_point", "qzeros", "quant_map", "absmax")


@dataclass(frozen=True)
class Fault:
    """A damaged copy of one tensor."""

    kind: str
    leaf: str
    tensor: Tensor


def value(tensor: Tensor, number: float) -> Tensor:
    damaged = tensor.clone()
    damaged.view(-1)[-1] = number
    return damaged


def faults(leaf: str, tensor: Tensor) -> Iterator[Fault]:
    """What is done to a tensor of a matrix, by what it is."""
    is_scale = "scale" in leaf or leaf in ("SCB", "weight.absmax", "weight.nested_absmax")
    if tensor.is_floating_point() and tensor.element_size() > 1:
        yield Fault("NaN", leaf, value(tensor, NAN))
        yield Fault("infinite", leaf, value(tensor, INF))
        if is_scale and "nested" not in leaf:  # what is nested is a difference
            yield Fault("zero", leaf, torch.zeros_like(tensor))
        if is_scale and not leaf.endswith(SIGNED):
            yield Fault("negative", leaf, value(tensor, -1.0))
    if tensor.dtype is torch.float8_e4m3fn:
        damaged = tensor.clone()
        damaged.view(torch.uint8).view(-1)[-1] = 0x7F
        yield Fault("NaN", leaf, damaged)
    if tensor.dtype is torch.uint8 and is_scale and tensor.dim() == 2:
        yield Fault("NaN", leaf, value(tensor, 255))
    if tensor.dim() == 3 and leaf == "weight":  # blocks of GGUF, which begin or end with a scale
        damaged = tensor.clone()
        damaged[-1, -1, :2] = damaged[-1, -1, -2:] = torch.tensor([0, 0x7E], dtype=torch.uint8)
        yield Fault("NaN", leaf, damaged)
        yield Fault("zero", leaf, torch.zeros_like(tensor))
    elif tensor.numel() == 1 and not tensor.is_floating_point():
        yield Fault("number", leaf, torch.full_like(tensor, 77))
    if tensor.numel() > 1:
        yield Fault("cut", leaf, tensor.reshape(-1)[:-1].clone())
        yield Fault("shorter", leaf, tensor.narrow(0, 0, len(tensor) - 1).clone())
        yield Fault("type", leaf, torch.zeros(tensor.shape, dtype=torch.int64))


@pytest.fixture(scope="module")
def plugins() -> PluginManager:
    return PluginManager()


def load(plugins: PluginManager, format: Format, tensors: Mapping[str, Tensor]) -> None:
    config = format.config()
    scheme = plugins.create(
        QUANTIZATION, config["quant_method"], checkpoint=config, device=DeviceInfo("cpu")
    )
    fill(scheme, LAYER, as_loaded(format, tensors), torch.float32)


def outcome(load: Callable[[], None]) -> str:
    try:
        load()
    except CheckpointError as error:
        return str(error)
    return "it was taken"


@pytest.mark.parametrize("title", FORMATS)
def test_damaged_tensors_are_refused_by_name(title: str, plugins: PluginManager) -> None:
    format = FORMATS[title]
    files = (FILE, format.config().get("file", FILE))
    tensors = pack(format, LAYER)[0]
    load(plugins, format, tensors)
    missed = []
    for name, tensor in tensors.items():
        leaf = name.removeprefix(f"{MATRIX}.")
        if leaf in format.optional:
            continue
        for fault in faults(leaf, tensor):
            damaged = {**tensors, name: fault.tensor}
            said = outcome(lambda damaged=damaged: load(plugins, format, damaged))  # type: ignore[misc]
            if MATRIX not in said or not any(file in said for file in files):
                missed.append(f"{fault.kind} {leaf}: {said}")
    assert missed == []
