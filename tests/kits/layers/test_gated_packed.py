"""Gated layers whose weight is packed: when product and activation may be one kernel, and what that computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from treadle.api.cache import DeviceInfo
from treadle.api.models import LinearSpec, ModelContext
from treadle.api.types import KernelOffer, KernelRequest
from treadle.testing.kernel_ops import KERNEL_OPS
from treadle_layers_kit import SingleRankCommunicator, ops
from treadle_layers_kit.dequantized import REPACKED, DequantizedLinear
from treadle_layers_kit.mlp import GatedMLP
from treadle_layers_kit.packed import PackedWeight
from treadle_layers_kit.packed_layout import INT8, unpack
from treadle_worker_kit.fusion import FusionReport, apply_fusions

FUSED = "packed_linear_silu_and_mul"
HIDDEN, INNER = 128, 64


class Method(DequantizedLinear):
    """Packs random codes as for a CUDA device. ``tensors``: what its module has besides."""

    def __init__(self, tensors: str = "", *, alone: bool = True) -> None:
        self.tensors, self.applies_packed_alone = tensors, alone

    def register(self, module: nn.Module, out: int) -> None:
        generator = torch.Generator().manual_seed(out)
        codes = torch.randint(-128, 128, (out, HIDDEN), generator=generator).to(torch.int8)
        scale = torch.rand(out, 1, generator=generator) / 512
        taken, PackedWeight.takes = PackedWeight.takes, staticmethod(lambda *_: True)  # type: ignore[method-assign]
        try:
            packed = PackedWeight.pack(
                lambda first, last: codes[first:last],
                scale, HIDDEN, HIDDEN, torch.bfloat16, INT8,
            )  # fmt: skip
        finally:
            PackedWeight.takes = taken  # type: ignore[method-assign]
        assert packed is not None
        module.add_module(REPACKED, packed)
        if self.tensors == "parameter":
            module.register_parameter("smooth", nn.Parameter(torch.ones(HIDDEN)))
        elif self.tensors == "buffer":
            module.register_buffer("order", torch.arange(HIDDEN))
        elif self.tensors == "nothing":
            module.register_buffer("order", None)
        elif self.tensors == "module":
            module.add_module("other", nn.Identity())


class Scheme:
    """One method for gate and up, plain weights for the rest."""

    def __init__(self, method: Method) -> None:
        self.method = method

    def linear_method(self, spec: LinearSpec) -> Method | None:
        return self.method if spec.prefix.endswith("gate_up_proj") else None


def served(method: Method, **options: Any) -> tuple[GatedMLP, FusionReport, list[str]]:
    """A layer with the references of all operations on packed weights as kernels, and their calls."""
    calls: list[str] = []
    context = ModelContext(
        hf_config=None,
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
        tp_group=SingleRankCommunicator(),
        quantization=Scheme(method),  # type: ignore[arg-type]
        register_attention=lambda request, spec: pytest.fail("there is no attention here"),
    )
    layer = GatedMLP(context, "mlp", HIDDEN, INNER, **options)
    for parameter in layer.down_proj.parameters():
        nn.init.normal_(parameter, std=0.1)
    if layer.gate_up_proj.bias is not None:
        nn.init.normal_(layer.gate_up_proj.bias)

    def find(op: str, request: KernelRequest) -> KernelOffer | None:
        if not op.startswith("packed_linear"):
            return None

        def kernel(*args: Any) -> Any:
            calls.append(op)
            return KERNEL_OPS[op].reference(*args)

        return KernelOffer("mine", 1, lambda: kernel)

    device = DeviceInfo("cuda", (9, 0))
    return layer, apply_fusions(layer, find, device, "bfloat16"), calls


def expected(layer: GatedMLP, x: Tensor) -> Tensor:
    packed = layer.gate_up_proj.get_submodule(REPACKED)
    assert isinstance(packed, PackedWeight)
    arguments = packed.codes, packed.scales, packed.offsets, packed.factors
    weight = unpack(*arguments, packed.levels, packed.inputs, packed.group).bfloat16()
    gate_up = nn.functional.linear(x, weight)
    if layer.gate_up_proj.bias is not None:
        gate_up = gate_up + layer.gate_up_proj.bias
    y: Tensor = layer.down_proj(ops.silu_and_mul(gate_up))
    return y


@pytest.mark.parametrize("tensors", ["", "nothing"])
def test_they_are_one_kernel(tensors: str) -> None:
    layer, report, calls = served(Method(tensors))
    x = torch.randn(5, HIDDEN).bfloat16()
    torch.testing.assert_close(layer(x), expected(layer, x))
    assert calls == [FUSED] and report.fused == {FUSED: [""]}


@pytest.mark.parametrize(
    ("method", "options"),
    [
        (Method("parameter"), {}),
        (Method("buffer"), {}),
        (Method("module"), {}),
        (Method(alone=False), {}),
        (Method(), {"bias": True}),
        (Method(), {"activation": "gelu"}),
    ],
)
def test_where_more_takes_part_they_are_two(method: Method, options: dict[str, Any]) -> None:
    layer, report, calls = served(method, **options)
    x = torch.randn(5, HIDDEN).bfloat16()
    y = layer(x)
    assert calls == ["packed_linear"] and not report.fused
    if not options.get("activation"):
        torch.testing.assert_close(y, expected(layer, x))
