"""The fused kernels against the layers' own operations, through Triton's interpreter.

Triton reads TRITON_INTERPRET when a kernel is defined, so everything runs in a process of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest

from weft.api.cache import DeviceInfo
from weft.api.types import KernelOffer, KernelRequest, Refusal
from weft.plugins import Host

CUDA = DeviceInfo("cuda", (9, 0))

CHECKS = {
    "norms": """
        from weft_kernels_triton.norm import add_rms_norm, rms_norm
        for shape in ((5, 96), (3, 2, 64), (1, 1000)):
            x, weight = torch.randn(shape), torch.randn(shape[-1])
            close(rms_norm(x, weight, 1e-5), ops.rms_norm(x, weight, 1e-5))
            close(rms_norm(x[:, ..., :], weight, 1e-5, 1.0), ops.rms_norm(x, weight, 1e-5, 1.0))
        x, residual, weight = torch.randn(4, 80)[:, :72], torch.randn(4, 72), torch.randn(72)
        want = ops.add_rms_norm(x, residual, weight, 1e-5)
        close(add_rms_norm(x, residual, weight, 1e-5)[0], want[0])
        close(residual, want[1])
    """,
    "silu_mul": """
        from weft_kernels_triton.activation import silu_mul
        for shape in ((3, 200), (1, 8192), (2, 2, 12)):
            x = torch.randn(shape) * 5
            close(silu_mul(x), ops.silu_mul(x))
    """,
    "rotary_write": """
        from weft_kernels_triton.rotary import rotary_write
        for tokens, heads, kv_heads, size, normed in (
            (3, 4, 2, 32, True), (5, 3, 3, 64, False), (70, 2, 1, 32, True),
        ):
            qkv = torch.randn(tokens, (heads + 2 * kv_heads) * size)
            angle = torch.randn(tokens, 1, size // 2)
            cos, sin = torch.cat((angle.cos(),) * 2, -1), torch.cat((-angle.sin(), angle.sin()), -1)
            weights = torch.randn(size), torch.randn(size)
            cache = torch.full((2, 90, kv_heads, size), 7.0)
            slots = torch.randperm(90)[:tokens]
            norms = (*weights, 1e-6, 0.0) if normed else None
            q = rotary_write(qkv, cos, sin, norms, cache, slots)
            a, b, c = qkv.view(tokens, -1, size).split((heads, kv_heads, kv_heads), 1)
            if normed:
                a, b = ops.rms_norm(a, weights[0], 1e-6), ops.rms_norm(b, weights[1], 1e-6)
            a, b = ops.rotary(a, b, cos, sin)
            close(q, a)
            close(cache[0, slots], b)
            close(cache[1, slots], c)
            rest = torch.ones(90, dtype=torch.bool).index_fill(0, slots, False)
            assert (cache[:, rest] == 7.0).all(), "a foreign slot was written"
    """,
}
PROLOGUE = """
    import torch
    from weft.layers import ops
    torch.manual_seed(0)
    def close(found, want):
        assert found.shape == want.shape
        assert (found - want).norm() / want.norm() < 1e-5, (found - want).abs().max()
"""


@pytest.mark.parametrize("name", CHECKS)
def test_kernels_equal_the_layers_own(name: str) -> None:
    pytest.importorskip("triton")
    code = textwrap.dedent(PROLOGUE) + textwrap.dedent(CHECKS[name])
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120
    )
    assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize("op", ["rms_norm", "add_rms_norm", "silu_mul", "rotary_write"])
def test_offers_on_cuda_and_refuses_elsewhere(op: str) -> None:
    import weft_kernels_triton

    shape = {"size": 1024, "head_size": 128, "heads": 16, "kv_heads": 8}
    found = weft_kernels_triton.weft_kernel(op, KernelRequest(CUDA, "bfloat16", shape))
    pytest.importorskip("triton")
    assert isinstance(found, KernelOffer)
    for device, dtype, reason in (
        (DeviceInfo("cpu"), "bfloat16", "needs a CUDA device"),
        (DeviceInfo("cuda", (7, 5)), "bfloat16", "capability 8.0"),
        (CUDA, "int8", "dtype int8"),
    ):
        refusal = weft_kernels_triton.weft_kernel(op, KernelRequest(device, dtype, shape))
        assert isinstance(refusal, Refusal) and reason in refusal.reasons[0]


def test_an_unknown_operation_is_not_answered() -> None:
    request = KernelRequest(CUDA, "bfloat16", {"size": 64})
    assert Host().kernel("no_such_op", request) is None


def test_odd_shapes_are_refused() -> None:
    import weft_kernels_triton

    request = KernelRequest(CUDA, "bfloat16", {"head_size": 80, "heads": 2, "kv_heads": 2})
    refusal = weft_kernels_triton.weft_kernel("rotary_write", request)
    assert isinstance(refusal, Refusal) and "head size 80" in refusal.reasons[0]
    request = KernelRequest(CUDA, "bfloat16", {"size": 65536})
    refusal = weft_kernels_triton.weft_kernel("rms_norm", request)
    assert isinstance(refusal, Refusal) and "65536" in refusal.reasons[0]
