"""Kernels and layouts of the plugins against the plain dequantized product.

Triton reads TRITON_INTERPRET when a kernel is defined, so kernels run in a process of their own.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

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
"""What a scheme packs for, though the tensors here are on the CPU; without kernels of GPTQ's own."""
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
GPTQ = """
    import torch
    torch.manual_seed(0)
    def words(*shape):
        return torch.randint(-2**31, 2**31, shape).to(torch.int32)
    def close(found, want, limit=1e-5):
        assert found.shape == want.shape and found.dtype == want.dtype
        error = (found.float() - want.float()).norm() / want.float().norm()
        assert error < limit, (found.shape, error)
    from treadle_gptq.gemm import Gemm
    from treadle_gptq.kernel import gptq_gemm, gptq_unpack
    from treadle_gptq.packing import dequantize
    for rows, depth, columns, group, bits, gather in (
        (1, 128, 64, 32, 4, False), (5, 256, 72, 64, 4, False), (17, 2048, 64, 128, 4, False),
        (3, 96, 16, 8, 4, False), (40, 256, 128, 256, 8, False), (4, 128, 64, 16, 2, False),
        (5, 256, 72, 64, 4, True), (2, 192, 64, 128, 8, True),
    ):
        qweight = words(depth * bits // 32, columns)
        scales = torch.rand(-(-depth // group), columns)
        zeros = torch.randint(0, 2**bits, scales.shape).float()
        index = torch.randint(0, len(scales), (depth,)) if gather else None
        args = qweight, scales, zeros, bits, group, index
        x = torch.randn(rows, depth)
        weight = dequantize(*args, x.dtype)
        close(gptq_gemm(x, *args), x @ weight)
        close(gptq_unpack(*args, x.dtype), weight)
    args = words(8, 8), torch.rand(2, 8).half(), torch.rand(2, 8).half(), 4, 32, None
    for x in torch.randn(2, 3, 64).half(), torch.randn(2, 20, 64).half():
        close(Gemm(gptq_gemm, gptq_unpack)(x, *args), x @ dequantize(*args, x.dtype), 3e-3)
"""


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


@pytest.mark.parametrize("format", [AwqFormat(16), GptqFormat(group_size=16)], ids=str)
def test_what_the_layout_cannot_hold_stays_as_it_is(format: Format) -> None:
    layer = Layer(128, (32,))
    tensors, weight, _ = pack(format, layer)
    for dtype in torch.float16, torch.float32:
        built = fill(scheme(format), layer, tensors, dtype)
        assert not dict(built.named_children())
        x = torch.randn(3, 128).to(dtype)
        assert error(built(x), x.float() @ weight.t()) < 3e-3


def test_kernels_equal_the_dequantized_product() -> None:
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(GPTQ)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr


def test_a_kernel_is_taken_where_it_fits() -> None:
    pytest.importorskip("triton")
    from treadle_gptq.gemm import create_gemm

    assert create_gemm(DeviceInfo("cpu")) is None
    assert create_gemm(DeviceInfo("cuda", (7, 5))) is None
    gptq = create_gemm(DeviceInfo("cuda", (8, 0)))
    assert gptq is not None
    x = torch.empty(3, 128).half()
    assert gptq.supports(x, 4, 8, None) and not gptq.supports(x, 4, 4, None)
    assert gptq.supports(x, 4, 4, torch.zeros(128)) and not gptq.supports(x[:0], 4, 128, None)
