"""Kernels and layouts of the plugins against the plain dequantized product, in Triton's interpreter.

Triton reads TRITON_INTERPRET when a kernel is defined, so everything runs in a process of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest
import torch

from weft.api.cache import DeviceInfo

CHECKS = {
    "tiled": """
        from weft.api.cache import DeviceInfo
        from weft.layers.int4 import TiledInt4, TilingInt4
        from weft.testing.linears import Layer, fill, pack
        from weft.testing.packing import AwqFormat, GptqFormat
        from weft.testing.ranks import on_ranks
        from weft_awq import config as awq, scheme as awq_scheme
        from weft_gptq import config as gptq, scheme as gptq_scheme

        def tiled(format):
            name = type(format).__name__
            if name == "AwqFormat":
                made = awq_scheme.AwqScheme(awq.read_config(format.config()), DeviceInfo("cpu"))
            else:
                made = gptq_scheme.GptqScheme(gptq.read_config(format.config()), DeviceInfo("cpu"))
            made._tiling = TilingInt4()
            return made

        for format in (
            AwqFormat(32), AwqFormat(128), AwqFormat(-1), GptqFormat(), GptqFormat(group_size=128),
            GptqFormat(group_size=-1, sym=False), GptqFormat(group_size=64, desc_act=True, sym=False),
            GptqFormat(sym=False, version=2),
        ):
            for dtype, limit in (torch.float16, 3e-3), (torch.bfloat16, 8e-3):
                for layer in Layer(256, (72, 24)), Layer(384, (32,), split="row"):
                    tensors, weight, _ = pack(format, layer)
                    built = fill(tiled(format), layer, tensors, dtype)
                    assert isinstance(built.method.int4, TiledInt4)
                    for rows in 3, 150:
                        x = torch.randn(rows, layer.inputs).to(dtype)
                        close(built(x), (x.float() @ weight.t()).to(dtype), limit)
        layer = Layer(384, (32,), split="row")  # a rank's share begins inside a group of 128
        tensors, weight, _ = pack(AwqFormat(128), layer)
        x = torch.randn(5, 384).half()
        shares = on_ranks(2, lambda r: fill(tiled(AwqFormat(128)), layer, tensors, x.dtype, ranks=r))
        assert [s.method.int4.group for s in shares] == [64, 64]
        parts = sum(s.method.apply(s, p, None) for s, p in zip(shares, x.chunk(2, 1)))
        close(parts, x @ weight.t().half(), 3e-3)
    """,
    "gptq": """
        from weft_gptq.gemm import Gemm
        from weft_gptq.kernel import gptq_gemm, gptq_unpack
        from weft_gptq.packing import dequantize
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
    """,
}
PROLOGUE = """
    import torch
    torch.manual_seed(0)
    def words(*shape):
        return torch.randint(-2**31, 2**31, shape).to(torch.int32)
    def close(found, want, limit=1e-5):
        assert found.shape == want.shape and found.dtype == want.dtype
        error = (found.float() - want.float()).norm() / want.float().norm()
        assert error < limit, (found.shape, error)
"""


@pytest.mark.parametrize("name", CHECKS)
def test_kernels_equal_the_dequantized_product(name: str) -> None:
    pytest.importorskip("triton")
    code = textwrap.dedent(PROLOGUE) + textwrap.dedent(CHECKS[name])
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr


def test_a_kernel_is_taken_where_it_fits() -> None:
    pytest.importorskip("triton")
    from weft_gptq.gemm import find_gemm

    assert find_gemm(DeviceInfo("cpu")) is None
    assert find_gemm(DeviceInfo("cuda", (7, 5))) is None
    gptq = find_gemm(DeviceInfo("cuda", (8, 0)))
    assert gptq is not None
    few = torch.empty(3, 128).half()
    assert gptq.fits(few, 4, 8, None) and not gptq.fits(few, 4, 4, None)
    assert gptq.fits(few, 4, 4, torch.zeros(128)) and not gptq.fits(few[:0], 4, 128, None)
