"""The layouts that plugins bring weights into for kernels, whose product is that of the dequantized weight."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from treadle_awq.config import read_config as read_awq
from treadle_awq.scheme import AwqScheme
from treadle_gptq.config import read_config as read_gptq
from treadle_gptq.scheme import GptqScheme

from treadle.api.cache import DeviceInfo
from treadle.api.models import QuantizationScheme
from treadle.testing.linears import Layer, fill, pack
from treadle.testing.packing import AwqFormat, Format, GptqFormat
from treadle.testing.ranks import run_on_ranks
from treadle_layers_kit.int4 import PackedInt4

CUDA = DeviceInfo("cuda", (7, 5))
"""What a scheme packs for, though the tensors here are on the CPU."""
FORMATS: tuple[Format, ...] = (
    AwqFormat(32),
    AwqFormat(128),
    AwqFormat(-1),
    GptqFormat(),
    GptqFormat(group_size=128),
    GptqFormat(group_size=-1, sym=False),
    GptqFormat(group_size=64, desc_act=True, sym=False),
    GptqFormat(sym=False, version=2),
)


def scheme(format: Format) -> QuantizationScheme:
    if isinstance(format, AwqFormat):
        return AwqScheme(read_awq(format.config()), CUDA)
    return GptqScheme(read_gptq(format.config()), CUDA)


def error(actual: Tensor, expected: Tensor) -> float:
    assert actual.shape == expected.shape
    return float((actual.float() - expected).norm() / expected.norm())


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_the_layout_of_kernels_is_the_dequantized_weight(format: Format) -> None:
    for dtype, limit in (torch.float16, 3e-3), (torch.bfloat16, 8e-3):
        for layer in Layer(256, (72, 24)), Layer(384, (32,), split="row"):
            tensors, weight, _ = pack(format, layer)
            built = fill(scheme(format), layer, tensors, dtype)
            assert isinstance(built.get_submodule("int4"), PackedInt4)
            parameters = dict(built.named_parameters())
            assert set(parameters) == {"int4.codes", "int4.scales"}, "nothing is kept twice"
            x = torch.randn(3, layer.inputs).to(dtype)
            y = built(x)
            assert y.dtype == dtype and error(y, x.float() @ weight.t()) < limit


def test_a_share_may_begin_inside_a_group() -> None:
    layer, format = Layer(384, (32,), split="row"), AwqFormat(128)
    tensors, weight, _ = pack(format, layer)
    x = torch.randn(5, 384).half()
    shares = run_on_ranks(
        2, lambda ranks: fill(scheme(format), layer, tensors, x.dtype, tp_group=ranks)
    )
    assert [s.get_submodule("int4").group for s in shares] == [64, 64]
    parts = [s.method.apply(s, p, None) for s, p in zip(shares, x.chunk(2, 1), strict=True)]
    assert error(sum(parts), x.float() @ weight.t()) < 3e-3  # type: ignore[arg-type]
