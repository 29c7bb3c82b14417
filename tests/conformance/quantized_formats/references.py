"""Matrices that the packages themselves quantize, pack and unpack.

Each of these is a ``Format``: what a package stores, and the weight that it reads back. From the root, with
the packages installed without their dependencies, this writes the tensors that the tests have at hand:

    PYTHONPATH=tests/conformance python -m quantized_formats.references
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from quantized_formats.awq import GemvFormat, rounded
from quantized_formats.hqq import HqqFormat
from quantized_formats.quark import QuarkFormat
from quantized_formats.torchao import TorchAoFormat
from treadle.testing.packing import Format, Packed

__all__ = ("FOLDER", "REFERENCES", "Reference")

FOLDER = Path(__file__).with_name("recorded")
Pack = Callable[[Tensor, Any], Packed]


@dataclass(frozen=True)
class Reference:
    """A format whose matrices a package makes; ``like`` says what its configuration is."""

    package: str
    like: Format
    by: Pack
    inputs: int = 64
    """Of the recorded matrix."""

    @property
    def optional(self) -> Sequence[str]:
        return self.like.optional

    @property
    def is_here(self) -> bool:
        return importlib.util.find_spec(self.package) is not None

    def config(self, unquantized: Sequence[str] = ()) -> dict[str, Any]:
        return self.like.config(unquantized)

    def pack(self, weight: Tensor) -> Packed:
        return self.by(weight, self.like)


def linear(weight: Tensor) -> torch.nn.Linear:
    layer = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    layer.weight.data.copy_(weight)
    return layer


def by_hqq(weight: Tensor, like: HqqFormat) -> Packed:
    from hqq.core.quantize import BaseQuantizeConfig, HQQLinear

    config = BaseQuantizeConfig(
        nbits=like.bits, group_size=like.group, axis=1, view_as_float=like.as_float
    )
    layer = HQQLinear(linear(weight), config, compute_dtype=torch.float32, device="cpu")
    return Packed(dict(layer.state_dict()), layer.dequantize().float())


def by_torchao(weight: Tensor, like: TorchAoFormat) -> Packed:
    from torchao import quantization as ao
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict

    configs: Mapping[str, Callable[[], Any]] = {
        "int8": lambda: ao.Int8WeightOnlyConfig(version=2),
        "fp8": lambda: ao.Float8WeightOnlyConfig(version=2),
        "intx": lambda: ao.IntxWeightOnlyConfig(
            weight_dtype=getattr(torch, f"int{like.bits}"),
            granularity=ao.PerGroup(like.group),
            version=2,
        ),
    }
    layer = torch.nn.Sequential(linear(weight))
    ao.quantize_(layer, configs[like.kind]())
    tensors, _ = flatten_tensor_state_dict(layer.state_dict())
    stored = {name.rpartition(".")[2]: tensor for name, tensor in tensors.items()}
    return Packed(stored, layer[0].weight.dequantize().float())


def by_autoawq(weight: Tensor, like: GemvFormat) -> Packed:
    """AutoAWQ packs codes that it is given scales for; importing all of it needs an old transformers."""
    module = _file_of("awq", f"modules/linear/{like.version}.py")
    layer = module.WQLinear_GEMV if like.version == "gemv" else module.WQLinear_GEMVFast
    codes, scales, zeros = rounded(weight, like.group)
    spread = [t.repeat_interleave(like.group, dim=1) for t in (scales, zeros)]
    expected = (codes - spread[1]) * spread[0]
    packed = layer.from_linear(linear(expected), 4, like.group, scales=scales, zeros=zeros)
    return Packed(dict(packed.state_dict()), expected)


def _file_of(package: str, path: str) -> Any:
    """Import one file of a package, without its other modules."""
    found = importlib.util.find_spec(package)
    assert found is not None and found.origin is not None
    file = Path(found.origin).parent / path
    tools = ModuleType(f"{package}.utils.module")
    tools.try_import = lambda name: (None, "")  # type: ignore[attr-defined]
    parents = {name: ModuleType(name) for name in (package, f"{package}.utils")}
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with patch.dict(sys.modules, {**parents, tools.__name__: tools}):
        spec.loader.exec_module(module)
    return module


def by_quark(weight: Tensor, like: QuarkFormat) -> Packed:
    from quark.torch import ModelQuantizer
    from quark.torch.export.nn.modules.qparamslinear import QParamsLinear
    from quark.torch.quantization.config import config as q

    spec = q.QTensorConfig(**_quark_spec(like))
    layer = torch.nn.Sequential(linear(weight))
    quantizer = ModelQuantizer(q.QConfig(global_quant_config=q.QLayerConfig(weight=spec)))
    model = quantizer.quantize_model(layer, [torch.ones(1, weight.shape[1])])
    model = quantizer.freeze(model)
    expected = model[0](torch.eye(weight.shape[1])).t()
    packed = QParamsLinear.from_module(
        model[0], custom_mode="quark", pack_method="reorder" if like.reorder else "order"
    )
    names = {
        "weight_quantizer.scale": "weight_scale",
        "weight_quantizer.zero_point": "weight_zero_point",
    }
    stored = {names.get(name, name): t for name, t in packed.state_dict().items()}
    return Packed(stored, expected.detach().float().contiguous())


def _quark_spec(like: QuarkFormat) -> dict[str, Any]:
    from quark.torch.quantization.config import type as t
    from quark.torch.quantization.observer import observer as o

    observers = {
        "per_tensor": o.PerTensorMinMaxObserver,
        "per_channel": o.PerChannelMinMaxObserver,
        "per_group": o.PerGroupMinMaxObserver if like.dtype != "fp4" else o.PerBlockMXObserver,
    }
    spec: dict[str, Any] = {
        "dtype": t.Dtype(like.dtype),
        "qscheme": t.QSchemeType(like.scheme),
        "observer_cls": observers[like.scheme],
        "symmetric": None if like.dtype == "fp4" else not like.dtype.startswith("u"),
        "scale_type": t.ScaleType.float,
        "round_method": t.RoundType.half_even,
        "is_dynamic": False,
    }
    if like.scheme != "per_tensor":
        spec["ch_axis"] = 0 if like.scheme == "per_channel" else -1
    if like.scheme == "per_group":
        spec["group_size"] = like.group
    if like.dtype == "fp4":
        spec |= {"scale_format": "e8m0", "scale_calculation_mode": "even"}
    return spec


REFERENCES: Mapping[str, Reference] = {
    "awq-gemv": Reference("awq", GemvFormat(), by_autoawq),
    "awq-gemv-fast": Reference("awq", GemvFormat("gemv_fast"), by_autoawq, 128),
    "hqq-4": Reference("hqq", HqqFormat(4, 32), by_hqq),
    "hqq-4-float": Reference("hqq", HqqFormat(4, 32, as_float=True), by_hqq),
    "hqq-3": Reference("hqq", HqqFormat(3, 32), by_hqq),
    "hqq-2": Reference("hqq", HqqFormat(2, 32), by_hqq),
    "hqq-8": Reference("hqq", HqqFormat(8, None), by_hqq),
    "torchao-int8": Reference("torchao", TorchAoFormat(), by_torchao),
    "torchao-fp8": Reference("torchao", TorchAoFormat("fp8"), by_torchao),
    "torchao-int4-a-byte": Reference("torchao", TorchAoFormat("intx"), by_torchao),
    "quark-fp8": Reference("quark", QuarkFormat(), by_quark),
    "quark-int8-outputs": Reference("quark", QuarkFormat("int8", "per_channel"), by_quark),
    "quark-int4-outputs": Reference("quark", QuarkFormat("int4", "per_channel"), by_quark),
    "quark-int4-groups": Reference("quark", QuarkFormat("int4", "per_group"), by_quark),
    "quark-uint4-groups": Reference("quark", QuarkFormat("uint4", "per_group"), by_quark),
    "quark-mxfp4": Reference("quark", QuarkFormat("fp4", "per_group"), by_quark),
}


def main() -> None:
    from safetensors.torch import save_file

    FOLDER.mkdir(exist_ok=True)
    only = sys.argv[1:]
    for name, reference in REFERENCES.items():
        if only and name not in only:
            continue
        if not reference.is_here:
            print(f"{name}: {reference.package} is not installed")
            continue
        generator = torch.Generator().manual_seed(18)
        weight = torch.randn(48, reference.inputs, generator=generator) * 0.05
        weight[7] *= 5
        packed = reference.pack(weight)
        error = float((packed.weight - weight).norm() / weight.norm())
        assert 1e-4 < error < 0.7, (name, error)
        tensors = {n: t.detach().clone().contiguous() for n, t in packed.tensors.items()}
        save_file(
            {**tensors, "expected": packed.weight.contiguous()}, FOLDER / f"{name}.safetensors"
        )
        print(f"{name}: {', '.join(tensors)}, error {error:.4f}")


if __name__ == "__main__":
    main()
