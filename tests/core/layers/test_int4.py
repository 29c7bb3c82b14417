"""The kernels of four-bit weights: Triton's interpreter against the plain product, and for Hopper.

Triton reads TRITON_INTERPRET when a kernel is defined, so kernels run in processes of their own.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest
import torch

from weft.api.cache import DeviceInfo
from weft.layers.int4 import CHUNK, TilingInt4, choose, find_tiling, pack_codes
from weft.layers.int4.tiles import FEW, MANY, MOST, MOST_ROWS, WIDE, shares

EQUAL = """
    import torch
    from dataclasses import replace
    from weft.layers.int4 import TilingInt4
    from weft.layers.int4.kernel import multiply
    from weft.layers.int4.tiles import FEW, MANY, MOST
    torch.manual_seed(0)

    def close(found, want, dtype):
        assert found.shape == want.shape and found.dtype == dtype
        error = (found.float() - want).norm() / want.norm()
        assert error < (1e-3 if dtype == torch.float16 else 8e-3), (want.shape, dtype, error)

    def made(depth, columns, group, dtype, symmetric=False):
        group = depth if group == -1 else group
        codes = torch.randint(0, 16, (depth, columns))
        scales = torch.rand(depth // group, columns).half()
        zeros = torch.full(scales.shape, 8) if symmetric else torch.randint(0, 16, scales.shape)
        weight = (codes - zeros.repeat_interleave(group, 0)) * scales.float().repeat_interleave(group, 0)
        cut = lambda first, last: codes[:, first:last]
        return TilingInt4().pack(cut, scales, zeros, depth, group, dtype), weight

    cases = (
        (1, 256, 64, 128), (2, 1024, 136, 128), (5, 160, 40, 32), (9, 320, 1032, 64), (3, 96, 8, -1),
        (17, 1536, 64, 256), (33, 384, 72, 96), (70, 384, 72, -1),
    )
    for dtype in torch.float16, torch.bfloat16:
        for rows, depth, columns, group in cases:
            product, weight = made(depth, columns, group, dtype, symmetric=rows == 2)
            x = torch.randn(rows, depth).to(dtype)
            close(product(x), x.float() @ weight, dtype)
            close(product(x[None]), (x.float() @ weight)[None], dtype)
            close(product.unpack(dtype), weight.t(), dtype)
        product, weight = made(1280, 72, 128, dtype)
        wide = torch.randn(130, 2, 1280).to(dtype)
        close(product(wide), wide.float() @ weight, dtype)
        assert product(wide[:0]).shape == (0, 2, 72)
        x = wide[:70, 1]  # rows that are not side by side
        for tile in *FEW, MANY, MOST, replace(MANY, rows=32, fold=True):
            for processors in 1, 12:
                for _ in range(2):
                    y = multiply(
                        x, product.codes, product.scales, 128, tile, product._tickets, processors
                    )
                    close(y, x.float() @ weight, dtype)
                    assert not product._tickets.any()
"""
BUILDS = """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from weft.layers.int4 import kernel
    from dataclasses import replace
    from weft.layers.int4.tiles import FEW, MANY, MOST

    def build(made, capability, tile, constants, kind):
        names = made.arg_names
        types = dict(x=kind, out=kind, codes="*i16", steps="*i32", parts="*fp32", tickets="*i32")
        signature = {n: "constexpr" if n in constants else types.get(n, "i32") for n in names}
        values = {(names.index(n),): value for n, value in constants.items()}
        even = [n for n in names if n in types or n in ("width", "depth", "stride")]
        hints = {(names.index(n),): [["tt.divisibility", 16]] for n in even}
        options = {"num_warps": tile.warps, "num_stages": tile.stages}
        return triton.compile(
            ASTSource(made, signature, values, hints),
            target=GPUTarget("cuda", capability, 32), options=options,
        )

    for kind in "*bf16", "*fp16":
        for tile in *FEW, MANY, MOST, replace(MANY, fold=True):
            for capability, group, split in (90, 128, True), (90, 32, False), (80, 128, False):
                chosen = dict(
                    GROUP=group, BLOCK_N=tile.outputs, BLOCK_R=tile.rows, SPLIT=split, FOLD=tile.fold,
                    EVEN=True, ASM=True,
                )
                code = build(kernel.int4_kernel, capability, tile, chosen, kind)
                room = 99 if capability < 90 else 227  # the least of Ampere and Ada, and Hopper's
                assert code.metadata.shared <= room << 10
                text = code.asm["ptx"]
                if group == 128:
                    assert "cp.async" in text and "cvt.rn.f32.s" not in text
        chosen = dict(GROUP=128, BLOCK_N=64, ASM=True)
        build(kernel.int4_unpack_kernel, 90, FEW[0], chosen, kind)
"""


def run(code: str, interpret: str) -> str:
    """What it logs."""
    pytest.importorskip("triton")
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code)],
        env={**os.environ, "TRITON_INTERPRET": interpret, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stderr


def test_kernels_equal_the_plain_product() -> None:
    run(EQUAL, "1")


def test_kernels_build_for_hopper_and_ampere() -> None:
    run(BUILDS, "0")


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


def test_what_cannot_be_tiled() -> None:
    tiling = TilingInt4()

    def none(first: int, last: int) -> torch.Tensor:
        raise AssertionError("nothing is to be unpacked")

    for group, dtype in ((16, torch.float16), (128, torch.float32)):
        steps = torch.ones(256 // group, 8)
        assert tiling.pack(none, steps, steps, 256, group, dtype) is None
    steps = torch.ones(2, 8)  # the last group is a smaller one
    assert tiling.pack(none, steps, steps, 96, 64, torch.float16) is None


TRIED = """
    import logging
    import torch
    from weft.layers.int4 import TilingInt4, kernel
    logging.basicConfig()
    cpu, tiling = torch.device("cpu"), TilingInt4()
    assert tiling._works(torch.float16, 128, cpu) and tiling._works(torch.bfloat16, 96, cpu)
    multiply = kernel.multiply
    kernel.multiply = lambda x, *more: multiply(x, *more) * 1.1
    assert tiling._works(torch.float16, 384, cpu), "it is tried once"
    assert not TilingInt4()._works(torch.float16, 128, cpu)
    def fails(*arguments): raise ZeroDivisionError("no compiler")
    kernel.multiply = fails
    assert not TilingInt4()._works(torch.float16, 128, cpu)
"""


def test_kernels_that_do_not_work_here_are_not_used() -> None:
    printed = run(TRIED, "1")
    assert printed.count("no kernel for four-bit weights here") == 2
    assert "its results are wrong" in printed and "ZeroDivisionError: no compiler" in printed


def test_where_it_is_offered() -> None:
    pytest.importorskip("triton")
    assert find_tiling(DeviceInfo("cpu")) is None
    assert find_tiling(DeviceInfo("cuda", (7, 5))) is None
    assert find_tiling(DeviceInfo("cuda", (8, 0))) is not None


def test_tiles_fit_their_rows() -> None:
    assert choose(0, 4096) is None and choose(MOST_ROWS + 1, 4096) is None
    for rows in range(1, MOST_ROWS + 1):
        tile = choose(rows, 4096)
        assert tile is not None and tile in (*FEW, MANY, MOST)
        assert rows <= tile.rows or tile.rows >= 64
    wide = choose(128, WIDE)
    assert wide is not None and wide.fold


@pytest.mark.parametrize("chunks", [1, 3, 32, 33, 97])
@pytest.mark.parametrize("tiles", [1, 64, 5000])
def test_shares_cover_the_inputs(chunks: int, tiles: int) -> None:
    splits, share = shares(FEW[0], tiles, chunks, 132)
    assert (splits - 1) * share < chunks <= splits * share
