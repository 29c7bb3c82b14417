"""The Triton kernels against the plain dequantized product, through Triton's interpreter.

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
    "awq": """
        from weft_awq.gemm import Gemm
        from weft_awq.kernel import awq_gemm, awq_unpack
        from weft_awq.packing import dequantize
        for rows, depth, columns, group in (
            (1, 128, 64, 32), (5, 256, 136, 64), (17, 1024, 256, 128), (40, 96, 8, 96),
        ):
            qweight = words(depth, columns // 8)
            scales = torch.rand(depth // group, columns)
            zeros = torch.randint(0, 16, scales.shape).float()
            x = torch.randn(rows, depth)
            weight = dequantize(qweight, scales, zeros, group, x.dtype)
            close(awq_gemm(x, qweight, scales, zeros, group), x @ weight)
            close(awq_unpack(qweight, scales, zeros, group, x.dtype), weight)
        args = words(96, 1), torch.rand(3, 8).half(), torch.rand(3, 8).half(), 32
        for x in torch.randn(2, 3, 96).half(), torch.randn(2, 20, 96).half():
            close(Gemm(awq_gemm, awq_unpack)(x, *args), x @ dequantize(*args, x.dtype), 3e-3)
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
    from weft_awq.gemm import find_gemm as find_awq
    from weft_gptq.gemm import find_gemm as find_gptq

    for find in (find_awq, find_gptq):
        assert find(DeviceInfo("cpu")) is None
        assert find(DeviceInfo("cuda", (7, 5))) is None
    awq, gptq = find_awq(DeviceInfo("cuda", (9, 0))), find_gptq(DeviceInfo("cuda", (8, 0)))
    assert awq is not None and gptq is not None
    few = torch.empty(3, 128).half()
    assert awq.fits(few, 32) and awq.fits(few[None], 128)
    assert not awq.fits(few, 16), "a tile would cross groups"
    assert not awq.fits(few.float(), 32) and not awq.fits(few[:0], 32)
    assert gptq.fits(few, 4, 8, None) and not gptq.fits(few, 4, 4, None)
    assert gptq.fits(few, 4, 4, torch.zeros(128)) and not gptq.fits(few[:0], 4, 128, None)
