"""The kernels of four-bit weights: Triton's interpreter against the plain product, their code, and
what takes their place.

Triton reads TRITON_INTERPRET when a kernel is defined, so kernels run in processes of their own.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from treadle.api.cache import DeviceInfo
from treadle.api.types import KernelOffer, KernelRequest, Refusal

pytest.importorskip("triton")

import treadle_kernels_triton
from treadle_kernels_triton.int4.tiles import (
    FOLD_MIN_FEATURES,
    LARGE_M_TILE,
    MAX_ROWS,
    MEDIUM_M_TILE,
    SMALL_M_TILES,
    choose_tile,
    split_k,
)

pytestmark = pytest.mark.early

SHAPE = {"in_features": 256, "out_features": 64, "group": 128}
MADE = """
    import torch
    torch.manual_seed(0)
    from treadle_layers_kit.int4 import PackedInt4
    from treadle_kernels_triton.int4.linear import Int4Linear

    def made(depth, columns, group, dtype, symmetric=False):
        group = depth if group == -1 else group
        codes = torch.randint(0, 16, (depth, columns))
        scales = torch.rand(depth // group, columns).half()
        zeros = torch.full(scales.shape, 8) if symmetric else torch.randint(0, 16, scales.shape)
        weight = (codes - zeros.repeat_interleave(group, 0)) * scales.float().repeat_interleave(group, 0)
        cut = lambda first, last: codes[:, first:last]
        product = PackedInt4.pack(cut, scales, zeros, depth, group, dtype)
        product.op = Int4Linear(dtype, use_hopper=False, use_small_m=True, use_unpack=True)
        return product, weight
"""
EQUAL = """
    from dataclasses import replace
    from treadle_kernels_triton.int4.kernel import multiply, unpack
    from treadle_kernels_triton.int4.tiles import SMALL_M_TILES, MEDIUM_M_TILE, LARGE_M_TILE

    def close(found, want, dtype):
        assert found.shape == want.shape and found.dtype == dtype
        error = (found.float() - want).norm() / want.norm()
        assert error < (1e-3 if dtype == torch.float16 else 8e-3), (want.shape, dtype, error)

    cases = (
        (1, 256, 64, 128), (2, 1024, 136, 128), (5, 160, 40, 32), (9, 320, 264, 64), (3, 96, 8, -1),
        (17, 1024, 64, 256), (33, 384, 72, 96), (70, 384, 72, -1),
    )
    for dtype in torch.float16, torch.bfloat16:
        for rows, depth, columns, group in cases:
            product, weight = made(depth, columns, group, dtype, symmetric=rows == 2)
            x = torch.randn(rows, depth).to(dtype)
            close(product(x), x.float() @ weight, dtype)
            if rows == 5:
                close(product(x[None]), (x.float() @ weight)[None], dtype)
            unpacked = unpack(product.codes, product.scales, depth, product.group, dtype)
            close(unpacked, weight.t(), dtype)
        if dtype == torch.float16:
            continue  # tiles are the same for both
        product, weight = made(1280, 72, 128, dtype)
        wide = torch.randn(131, 2, 1280).to(dtype)
        close(product(wide), wide.float() @ weight, dtype)
        assert product(wide[:0]).shape == (0, 2, 72)
        counters = product.op.tile_counters.for_device(x.device)
        for tile in *SMALL_M_TILES, MEDIUM_M_TILE, LARGE_M_TILE, replace(MEDIUM_M_TILE, block_m=32, fold_scales=True):
            x = wide[: tile.block_m + 3, 1]  # a tile and a part of one; rows are not side by side
            for processors in 1, 12:
                y = multiply(x, product.codes, product.scales, 128, tile, counters, processors)
                close(y, x.float() @ weight, dtype)
                assert not counters.any()
"""
FALLBACKS = """
    import logging
    from treadle_kernels_triton.int4 import hopper, kernel, linear as home, self_check
    logging.basicConfig()
    cpu, kinds = torch.device("cpu"), (torch.float16, torch.bfloat16)
    assert all(self_check.check_path(path, kind, 128, cpu) for path in ("triton", "unpack") for kind in kinds)
    assert self_check.check_path("triton with hopper", torch.float16, 32, cpu)
    multiply, unpack = kernel.multiply, kernel.unpack
    kernel.multiply = lambda x, *more, **named: multiply(x, *more, **named) * 1.1
    assert not self_check.check_path("triton", torch.float16, 128, cpu)
    kernel.multiply, kernel.unpack = multiply, lambda *given: unpack(*given) * 1.1
    assert not self_check.check_path("unpack", torch.float16, 128, cpu)
    kernel.unpack = unpack
    # What is asked for, of what takes part: Hopper's kernel is replaced by one that is right.
    calls = []
    def wide(x, codes, scales_and_zeros, group_size, tile, tile_counters, num_sms):
        calls.append((len(x), tile.block_m))
        weight = unpack(codes, scales_and_zeros, x.shape[-1], group_size, x.dtype)
        return torch.nn.functional.linear(x, weight)
    hopper.multiply = wide
    assert self_check.check_path("hopper", torch.bfloat16, 256, cpu)
    assert calls == [(2 * r - 5, r) for r in (32, 64, 128, 256) for _ in range(2)]
    calls.clear()
    packed, weight = made(256, 64, 128, torch.bfloat16)
    for wide in True, False:
        for few in True, False:
            for use_unpack in True, False:
                op = Int4Linear(torch.bfloat16, use_hopper=wide, use_small_m=few, use_unpack=use_unpack)
                assert op.tile_counters is not packed.op.tile_counters
                packed.op = op
                for rows in 0, 3, 40, 130:
                    x = torch.randn(rows, 2, 256).bfloat16()
                    y, want = packed(x), x.float() @ weight
                    assert y.shape == want.shape and y.dtype == x.dtype
                    assert not rows or (y.float() - want).norm() < 8e-3 * want.norm()
    assert calls == [(80, 128), (260, 128)] * 4
    half = packed(torch.randn(3, 256).half())
    assert half.dtype == torch.float16, "of another type: torch's"
    packed.op.tile_counters.for_device = lambda device: None  # in a capture
    x = torch.randn(3, 256).bfloat16()
    assert torch.equal(packed(x), torch.nn.functional.linear(x, weight.t().bfloat16()))
"""
BUILDS = """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from treadle_kernels_triton.int4 import kernel
    from dataclasses import replace
    from treadle_kernels_triton.int4.tiles import SMALL_M_TILES, MEDIUM_M_TILE, LARGE_M_TILE

    def build(made, capability, tile, constants, kind):
        names = made.arg_names
        types = dict(x=kind, out=kind, codes="*i16", scales_and_zeros="*i32", partials="*fp32", tile_counters="*i32")
        signature = {n: "constexpr" if n in constants else types.get(n, "i32") for n in names}
        values = {(names.index(n),): value for n, value in constants.items()}
        even = [n for n in names if n in types or n in ("N", "K", "stride")]
        hints = {(names.index(n),): [["tt.divisibility", 16]] for n in even}
        options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
        return triton.compile(
            ASTSource(made, signature, values, hints),
            target=GPUTarget("cuda", capability, 32), options=options,
        )

    for kind, every in CHOSEN:
        folded = replace(MEDIUM_M_TILE, fold_scales=True)
        small = SMALL_M_TILES if every else SMALL_M_TILES[-1:]
        for tile in *small, MEDIUM_M_TILE, LARGE_M_TILE, folded:
            for capability, group, split in (90, 128, True), (90, 32, False), (80, 128, False):
                if group == 32 and tile is not MEDIUM_M_TILE or capability == 80 and tile is folded:
                    continue  # compiled alike, and compiling takes long
                chosen = dict(
                    GROUP_SIZE=group, BLOCK_N=tile.block_n, BLOCK_M=tile.block_m, SPLIT_K=split, FOLD_SCALES=tile.fold_scales,
                    EVEN_K=True, USE_ASM=True,
                )
                code = build(kernel.int4_kernel, capability, tile, chosen, kind)
                room = 99 if capability < 90 else 227  # the least of Ampere and Ada, and Hopper's
                assert code.metadata.shared <= room << 10
                text = code.asm["ptx"]
                if group == 128:
                    assert "cp.async" in text and "cvt.rn.f32.s" not in text
        chosen = dict(GROUP_SIZE=128, BLOCK_N=64, USE_ASM=True)
        build(kernel.int4_unpack_kernel, 90, SMALL_M_TILES[0], chosen, kind)
"""


@pytest.mark.parametrize(
    "code",
    [
        pytest.param(EQUAL, id="equal"),
        pytest.param(FALLBACKS, id="fallbacks", marks=pytest.mark.slow),
    ],
)
def test_kernels_and_what_replaces_them_equal_the_plain_product(
    code: str, in_process: Callable[..., None]
) -> None:
    in_process(MADE, code, interpret=True)


@pytest.mark.parametrize(
    "chosen",
    [
        '("*bf16", False),',
        pytest.param('("*bf16", True), ("*fp16", True)', marks=pytest.mark.slow),
    ],
)
def test_kernels_build_for_hopper_and_ampere(chosen: str, in_process: Callable[..., None]) -> None:
    in_process(f"CHOSEN = {chosen}\n", BUILDS, interpret=False)


def test_where_it_is_offered() -> None:
    def offer_or_refusal(dtype: str = "bfloat16", **shape: int) -> object:
        request = KernelRequest(DeviceInfo("cuda", (8, 0)), dtype, {**SHAPE, **shape})
        return treadle_kernels_triton.treadle_kernel_op("int4_linear", request)

    assert isinstance(offer_or_refusal(), KernelOffer) and isinstance(
        offer_or_refusal("float16", group=96), KernelOffer
    )
    for refusal, reason in (
        (offer_or_refusal("float32"), "float32"),
        (offer_or_refusal(group=16), "group 16"),
    ):
        assert isinstance(refusal, Refusal) and reason in refusal.reasons[0]
    request = KernelRequest(DeviceInfo("cuda", (7, 5)), "bfloat16", SHAPE)
    assert isinstance(treadle_kernels_triton.treadle_kernel_op("int4_linear", request), Refusal)


def test_tiles_fit_their_rows() -> None:
    assert choose_tile(0, 4096) is None and choose_tile(MAX_ROWS + 1, 4096) is None
    for rows in range(1, MAX_ROWS + 1):
        tile = choose_tile(rows, 4096)
        assert tile is not None and tile in (*SMALL_M_TILES, MEDIUM_M_TILE, LARGE_M_TILE)
        assert rows <= tile.block_m or tile.block_m >= 64
    wide = choose_tile(128, FOLD_MIN_FEATURES)
    assert wide is not None and wide.fold_scales


@pytest.mark.parametrize("chunks", [1, 3, 32, 33, 97])
@pytest.mark.parametrize("tiles", [1, 64, 5000])
def test_shares_cover_the_inputs(chunks: int, tiles: int) -> None:
    splits, share = split_k(SMALL_M_TILES[0], tiles, chunks, 132)
    assert (splits - 1) * share < chunks <= splits * share
