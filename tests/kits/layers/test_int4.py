"""The layout of four-bit weights, the plain product of it, and how a layer gets a kernel for it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from treadle.api.attention import KernelOffer, KernelRequest
from treadle.api.cache import DeviceInfo
from treadle.api.models import LinearSpec, ModelContext
from treadle_layers_kit import Linear, SingleRankCommunicator, int4_layout
from treadle_layers_kit.int4 import PackedInt4
from treadle_layers_kit.int4_layout import CHUNK, pack_codes
from treadle_worker_kit.fusion import apply_fusions


def pack_random(
    inputs: int, out: int, group: int, dtype: torch.dtype, symmetric: bool = False
) -> tuple[PackedInt4, Tensor]:
    """Packed, and the weight ``[out, inputs]`` in float32."""
    drawn = torch.Generator().manual_seed(inputs + out)
    codes = torch.randint(0, 16, (inputs, out), generator=drawn)
    scales = torch.rand(inputs // group, out, generator=drawn).half()
    zeros = torch.randint(0, 17, scales.shape, generator=drawn)
    zeros = torch.full_like(zeros, 8) if symmetric else zeros
    packed = PackedInt4.pack(
        lambda first, last: codes[:, first:last], scales, zeros, inputs, group, dtype
    )
    assert packed is not None
    weight = codes - zeros.repeat_interleave(group, 0)
    return packed, (weight * scales.float().repeat_interleave(group, 0)).t()


@pytest.mark.parametrize("inputs", [128, 96, 320])
def test_codes_come_back(inputs: int) -> None:
    codes = torch.randint(0, 16, (inputs, 24), dtype=torch.int32)
    packed = pack_codes(codes)
    assert packed.shape == (-(-inputs // CHUNK), 24, 32) and packed.dtype == torch.int16
    places = torch.stack([packed >> shift & 15 for shift in range(0, 16, 4)], dim=1)
    assert torch.equal(places.transpose(2, 3).flatten(0, 2)[:inputs], codes.to(torch.int16))


def test_the_layout() -> None:
    """A word holds four codes that are 32 inputs apart, the first in its lowest bits."""
    codes = torch.zeros(128, 1, dtype=torch.int32)
    codes[[5, 37, 69, 101], 0] = torch.tensor([1, 2, 3, 4], dtype=torch.int32)
    assert pack_codes(codes)[0, 0, 5] == 0x4321


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("inputs", "out", "group"),
    [(256, 64, 128), (1024, 1136, 256), (160, 40, 32), (320, 72, 64), (96, 8, 96), (384, 24, 96)],
)
def test_the_product_is_the_dequantized_one(
    inputs: int, out: int, group: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(int4_layout, "PIECE", 48)
    packed, weight = pack_random(inputs, out, group, dtype, symmetric=out == 72)
    rounded = int4_layout.unpack(packed.codes, packed.scales, inputs, group, dtype)
    assert torch.equal(rounded, weight.to(dtype)), "rounded once"
    for shape in (3, inputs), (2, 5, inputs), (0, inputs):
        x = torch.randn(shape).to(dtype)
        y = packed(x)
        expected = x.float() @ weight.t()
        assert y.dtype == dtype and y.shape == expected.shape
        limit = 3e-3 if dtype is torch.float16 else 8e-3
        assert not y.numel() or (y.float() - expected).norm() < limit * expected.norm()


def test_what_cannot_be_packed() -> None:
    def unpack(first: int, last: int) -> Tensor:
        raise AssertionError("nothing is to be unpacked")

    for group, dtype in ((16, torch.float16), (128, torch.float32)):
        steps = torch.ones(256 // group, 8)
        assert PackedInt4.pack(unpack, steps, steps, 256, group, dtype) is None
    steps = torch.ones(2, 8)  # the last group is a smaller one
    assert PackedInt4.pack(unpack, steps, steps, 96, 64, torch.float16) is None


class Method:
    """A method of a plugin, whose weight is packed when it is finished. The engine sees no more of it
    than these three methods, for guards stand between."""

    def __init__(self) -> None:
        self._packed: PackedInt4 | None = None

    def create_weights(self, module: nn.Module, spec: LinearSpec) -> None:
        self.sizes = spec.in_features, sum(spec.out_features)

    def process_weights_after_loading(self, module: nn.Module) -> None:
        self._packed, _ = pack_random(*self.sizes, 64, torch.bfloat16)
        module.add_module("anything", self._packed)

    def apply(self, module: Any, x: Tensor, bias: Tensor | None) -> Tensor:
        assert self._packed is not None
        y = self._packed(x)
        return y if bias is None else y + bias


def test_layers_take_the_kernel_that_is_offered() -> None:
    requests: list[tuple[str, dict[str, int]]] = []
    loaded: list[str] = []
    calls: list[tuple[Any, ...]] = []

    def kernel(x: Tensor, codes: Tensor, steps: Tensor, inputs: int, group: int) -> Tensor:
        calls.append((codes, steps, inputs, group))
        return x.new_full((len(x), codes.shape[1]), 7.0)

    class Offers:
        def kernel(self, op: str, request: KernelRequest) -> KernelOffer | None:
            requests.append((op, dict(request.shape)))
            if op != "int4_linear":
                return None
            return KernelOffer("mine", 1, lambda: loaded.append(op) or kernel)  # type: ignore[func-returns-value]

    context = ModelContext(
        hf_config=None,
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
        tp_group=SingleRankCommunicator(),
        quantization=None,
        register_attention=lambda request, spec: pytest.fail("there is no attention here"),
    )
    layers = [Linear(context, f"a{i}", 128, (32, 16), method=Method()) for i in range(3)]
    for layer in layers[:2]:
        layer.process_weights_after_loading()
    cuda = DeviceInfo("cuda", (9, 0))
    served = apply_fusions(nn.ModuleList(layers), Offers().kernel, cuda, "bfloat16")
    assert served.backends == {"int4_linear": "mine"}
    shape = {"in_features": 128, "out_features": 48, "group": 64}
    assert requests == [("int4_linear", shape)] and loaded == ["int4_linear"], (
        "one for all of a shape"
    )
    for layer in layers[:2]:
        assert (layer(torch.randn(3, 128).bfloat16()) == 7.0).all()
    for layer, (codes, steps, inputs, group) in zip(layers, calls, strict=False):
        packed = layer.get_submodule("anything")
        assert codes is packed.codes and steps is packed.scales and (inputs, group) == (128, 64)
