"""Linear layers on tensor cores: the kernel through Triton's interpreter, and when it is used.

Triton reads TRITON_INTERPRET when a kernel is defined, so kernels run in processes of their own.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from typing import Any

import pytest

from weft.api.cache import DeviceInfo
from weft.api.types import KernelOffer, KernelRequest

PROLOGUE = """
    import torch
    from torch.nn.functional import linear as product
    from weft.layers import ops
    from weft_kernels_triton import linear as module
    from weft_kernels_triton.activation import silu_mul
    from weft_kernels_triton.swapped import Tickets, swapped_linear
    from weft_kernels_triton.tiles import Block
    torch.manual_seed(0)
    tickets = Tickets(5)
    counted = tickets.on(torch.device("cpu"))
    def close(found, want, limit=1e-5):
        assert found.shape == want.shape
        assert (found.float() - want).norm() < limit * want.norm(), (found - want).abs().max()
"""
KERNEL = """
    assert counted.dtype == torch.int32 and len(counted) == 5
    assert tickets.on(torch.device("cpu")) is counted
    for splits in 1, 3, 9:
        # The last has more tiles than tickets: its depth is not shared.
        for width, depth in (70, 96), (24, 200), (200, 80):
            for rows in (5,) if splits == 9 else (5, 16):
                x, weight = torch.randn(rows, depth + 16)[:, :depth], torch.randn(width, depth)
                given = Block(32, 16, 32, 1, 2, splits), counted, False
                for bias in None, torch.randn(width):
                    want = product(x, weight, bias)
                    close(swapped_linear(x, weight, bias, False, *given), want)
                    close(swapped_linear(x, weight, bias, True, *given), ops.silu_mul(want))
                    # Of numbers whose sums are exact; rounded before the gate, and after silu.
                    whole = [torch.randint(-64, 65, t.shape) for t in (x, weight)]
                    half = [(t / 64).half() for t in whole]
                    y = swapped_linear(*half, None, False, *given)
                    assert torch.equal(y, product(*(t.float() for t in half)).half())
                    found = swapped_linear(*half, None, True, *given)
                    assert found.dtype == torch.float16 and torch.equal(found, silu_mul(y))
                    assert not counted.any(), "the tickets are not as they were"
"""
OPERATIONS = """
    calls, plain = [], module.swapped_linear
    def counting(*args):
        calls.append(args[4])
        return plain(*args)
    module.swapped_linear = counting
    weight = torch.randn(1024, 1040).half() / 32
    for shape, called in ((2, 4, 1040), 1), ((17, 1040), 1), ((64, 1040), 0):
        x, bias = torch.randn(shape).half(), torch.randn(1024).half()
        want = product(x.float(), weight.float(), bias.float())
        for op, want in (module.linear, want), (module.silu_linear, ops.silu_mul(want)):
            calls.clear()
            y = op(x, weight, bias, tickets=tickets)
            assert len(calls) == called, (op, shape, calls)
            close(y, want, 2e-3)
    calls.clear()
    module.linear(x[:8], weight, None)
    module.linear(x[:8].float(), weight.float(), None, tickets=tickets)
    module.linear(x[:8], weight[::2], None, tickets=tickets)
    class Capturing:
        def on(self, device):
            return None
    module.linear(x[:8], weight, None, tickets=Capturing())
    assert not calls
"""
BUILDS = """
    from triton import compile
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from weft_kernels_triton.swapped import swapped_kernel
    from weft_kernels_triton.tiles import choose_block

    names = swapped_kernel.arg_names
    varied = "rows", "share", "splits"
    plain = dict.fromkeys((*varied, "width", "depth", "x_stride"), "i32") | dict(tickets="*i32")

    def build(kind, block, gated):
        constants = dict(BLOCK_N=block.features, BLOCK_R=block.rows, BLOCK_K=block.depth, EVEN=True)
        constants |= dict(SPLIT=block.splits > 1, BIAS=False, GATED=gated, EARLY=True)
        types = plain | dict(parts="*fp32")
        signature = {n: "constexpr" if n in constants else types.get(n, kind) for n in names}
        values = {(names.index(n),): value for n, value in constants.items()}
        aligned = [n for n in names if n not in constants and n not in varied]
        aligned = {(names.index(n),): [["tt.divisibility", 16]] for n in aligned}
        options = dict(num_warps=block.warps, num_stages=block.stages, launch_pdl=True)
        source = ASTSource(swapped_kernel, signature, values, aligned)
        made = compile(source, target=GPUTarget("cuda", 90, 32), options=options)
        assert made.metadata.shared <= 227 << 10
        code = made.asm["ptx"]
        early, rest = code.split("griddepcontrol.wait")
        assert "griddepcontrol.launch_dependents" in early
        for access in "ld.global", "st.global", "cp.async":
            assert access not in early, "something is read or written before the wait"
        assert "wgmma" in rest and "cp.async.cg" in rest and ("atom." in rest) == (block.splits > 1)

    for rows, features, depth, gated in (
        (16, 4096, 4096, False), (32, 24576, 4096, True), (64, 6144, 1024, True), (64, 1024, 3072, False),
    ):
        for kind in "*bf16", "*fp16":
            build(kind, choose_block(rows, features, depth, gated, 132), gated)
"""


def run(code: str, interpret: str) -> None:
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": interpret},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize("code", [KERNEL, OPERATIONS], ids=["kernel", "operations"])
def test_it_equals_the_layers_own(code: str) -> None:
    pytest.importorskip("triton")
    run(PROLOGUE + code, "1")


def test_it_compiles_for_hopper_and_waits_first() -> None:
    pytest.importorskip("triton")
    run(BUILDS, "0")


def test_tensor_cores_multiply_up_to_64_rows_where_that_is_faster() -> None:
    """Of the shapes that were measured; up to 16 rows it is nowhere slower."""
    from weft_kernels_triton.tiles import choose_block

    most = {
        (4096, 1024): 16,
        (1024, 2048): 32,
        (6144, 1024): 64,
        (1024, 3072): 64,
        (6144, 4096): 16,
        (4096, 4096): 32,
        (24576, 4096): 16,
        (4096, 12288): 16,
    }
    splits = {(1024, 2048): 4, (1024, 3072): 6, (4096, 1024): 2, (4096, 4096): 2, (4096, 12288): 2}
    for (features, depth), rows in most.items():
        for m in (2, 8, 16, 32, 64):
            block = choose_block(m, features, depth, False, 132)
            assert (block is not None) == (m <= rows), (features, depth, m)
            if block is not None:
                assert block.rows == max(m, 16)
                assert block.splits == splits.get((features, depth), 1)
    assert choose_block(32, 24576, 4096, True, 132) and not choose_block(64, 24576, 4096, True, 132)
    outside = (1, 4096, 4096), (65, 6144, 1024), (8, 151936, 1024), (8, 320, 4096)
    assert not any(choose_block(*shape, True, 132) for shape in outside)
    for processors in (1, 20, 78, 132, 200):  # no more tiles are shared than there are tickets
        for features in range(1024, 20000, 64):
            block = choose_block(8, features, 4096, False, processors)
            assert block and (block.splits == 1 or -(-features // 64) <= processors)


@pytest.mark.parametrize("op", ["linear", "silu_linear"])
def test_tensor_cores_are_used_on_hopper_alone_with_tickets_of_their_own(op: str) -> None:
    pytest.importorskip("triton")
    import weft_kernels_triton

    shape = {"in_features": 1024, "out_features": 4096}

    def loaded(capability: tuple[int, int]) -> Any:
        request = KernelRequest(DeviceInfo("cuda", capability), "bfloat16", shape)
        offer = weft_kernels_triton.weft_kernel(op, request)
        assert isinstance(offer, KernelOffer)
        return offer.load()

    one, other = (loaded((9, 0)).keywords["tickets"] for _ in range(2))
    assert one is not other
    assert (
        loaded((8, 0)).keywords["tickets"] is None and loaded((10, 0)).keywords["tickets"] is None
    )
