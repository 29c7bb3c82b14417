"""The kernels of treadle-fp8-kit against torch's operations, through Triton's interpreter, and compiled.

Triton reads TRITON_INTERPRET when a kernel is defined, so everything runs in a process of its own.
"""

from __future__ import annotations

from collections.abc import Callable

from treadle_fp8_kit.tiles import choose_int8_tile, choose_tile

ROUNDED = """
    from treadle_fp8_kit import kernels, quantize, quantize_kernel
    # Into a wider type, because the interpreter rounds to fp8 wrongly: what is stored, unrounded. In
    # float16, because it does not compute in bfloat16.
    quantize_kernel.FP8 = quantize.FP8 = wide = torch.float32
    for rows, size, room in (1, 48, 1), (5, 256, 8), (3, 640, 3):
        for gated in False, True:
            x = torch.randn(rows, size * (1 + gated)) * torch.logspace(-1, 1, size * (1 + gated))
            x = x.half()
            ways = [(kernels.quantize_per_row, quantize.quantize_per_row, (given, limit, room), {"dtype": wide}) for given, limit in
                    ((None, None), (torch.tensor(0.02), None), (None, 3.0))]
            if size % 128 == 0:
                ways.append((kernels.quantize_per_block, quantize.quantize_per_block, (room,), {}))
            for by_kernel, by_torch, arguments, named in ways:
                found, scale = by_kernel(x, *arguments, **named, gated=gated, use_pdl=False)
                want, right = by_torch(x, *arguments, **named, gated=gated)
                assert found.shape == want.shape == (room, size) and scale.shape == right.shape
                assert scale.shape[1] == 1 or scale.stride() == right.stride()
                close(scale[:rows], right[:rows], 1e-6)
                close(found[:rows], want[:rows], 1e-5)
            for static in None, torch.tensor([0.02, 5.0]):
                for has_zero in False, True:
                    given = static if static is None or has_zero else static[0]
                    named = {"dtype": torch.int8, "gated": gated, "has_zero": has_zero}
                    found, scale = kernels.quantize_per_row(x, given, None, room, **named, use_pdl=False)
                    want, right = quantize.quantize_per_row(x, given, None, room, **named)
                    assert found.dtype is want.dtype is torch.int8 and found.shape == want.shape
                    assert scale.shape == right.shape == (room, 1 + has_zero)
                    close(scale[:rows], right[:rows], 1e-6)
                    apart = (found[:rows].int() - want[:rows].int()).abs()
                    assert apart.max() <= 1 and (apart > 0).float().mean() < 0.01, "but for ties"
                    # The numbers themselves, in float64: half a step of each row.
                    h = x.double()
                    h = torch.nn.functional.silu(h[:, :size]) * h[:, size:] if gated else h
                    steps = scale[:rows].double()
                    again = found[:rows].double() * steps[:, :1] + (steps[:, 1:] if has_zero else 0)
                    off = (again - h).abs() / steps[:, :1]
                    assert static is not None or off.max() < (1.01 if has_zero else 0.51) + h.abs().max() / 800 / steps.min() * gated
    zeros, scale = kernels.quantize_per_row(torch.zeros(2, 16), None, None, 2, dtype=wide, use_pdl=False)
    assert (zeros == 0).all() and (scale > 0).all()
"""
INT8 = """
    from treadle_fp8_kit import quantize
    from treadle_fp8_kit.kernels import multiply, quantize_per_row
    from treadle_fp8_kit.tiles import Tile, choose_int8_tile
    cases = [(rows, width, depth, choose_int8_tile(rows, width, depth)) for (width, depth), some in (
        ((33, 208), (1, 3, 16, 17, 64, 200)), ((128, 2064), (1, 17, 64, 200))) for rows in some]
    cases += [(70, 200, 336, Tile(64, 16, 64, 4, 4, 3, group_m=2)), (40, 96, 128, Tile(32, 16, 64, 4, 4, group_m=8))]
    for case, (rows, width, depth, tile) in enumerate(cases):
        x = torch.randn(rows, depth).half() + case % 2
        weight = torch.randint(-128, 128, (width, depth), dtype=torch.int8)
        scale, bias = torch.rand(width) / 64, torch.randn(width) if case % 3 else None
        sums = weight.sum(dim=1).float()
        for w_sum in None, sums:
            few, own = quantize_per_row(
                x, None, None, rows, dtype=torch.int8, has_zero=w_sum is not None, use_pdl=False
            )
            seen = few.double() * own[:, :1].double() + (0 if w_sum is None else own[:, 1:].double())
            want = seen @ (weight.double() * scale[:, None].double()).t()
            want = want if bias is None else want + bias
            products = few.int() @ weight.int().t()
            by_torch = quantize.scale_products(products, own, scale, bias, torch.float32, w_sum)
            got = multiply(few, own, weight, scale, bias, torch.float32, tile, w_sum=w_sum, use_pdl=False)
            close(by_torch.double(), want, 1e-6)
            close(got.double(), want, 1e-6)
            # What rounding the activations costs, and no more.
            true = x.double() @ (weight.double() * scale[:, None].double()).t() + (0 if bias is None else bias)
            close(got.double(), true, 0.02)
"""
MULTIPLIED = """
    from treadle_fp8_kit import quantize
    from treadle_fp8_kit.kernels import multiply
    from treadle_fp8_kit.tiles import Tile
    for rows, width, depth, biased, *tile in (
        (1, 96, 384, False, 64, 16, 128, 4, 4, 1), (5, 128, 640, True, 64, 16, 128, 4, 4, 3),
        (20, 256, 256, False, 64, 16, 128, 4, 4, 2), (3, 200, 336, True, 64, 16, 256, 4, 4, 2),
        (70, 128, 128, True, 128, 64, 128, 8, 4, 1),
    ):
        x, weight = torch.randn(rows, depth), (torch.randn(width, depth) * 30).to(torch.float8_e4m3fn)
        bias = torch.randn(width) if biased else None
        by_rows = quantize.quantize_per_row(x, None, None, rows), torch.rand(width) + 0.5
        ways = [(*by_rows, lambda own: own, lambda scale: scale[:, None])]
        if not (width % 128 or depth % 128):
            scales = torch.rand(width // 128, depth // 128) + 0.5
            ways.append((
                quantize.quantize_per_block(x, rows), scales, lambda own: own.repeat_interleave(128, 1),
                lambda scale: scale.repeat_interleave(128, 0).repeat_interleave(128, 1),
            ))
        for (few, own), scale, left, right in ways:
            want = (few.float() * left(own)) @ (weight.float() * right(scale)).t()
            want = want if bias is None else want + bias
            got = multiply(few, own, weight, scale, bias, torch.float32, Tile(*tile), use_pdl=False)
            close(got, want, 1e-5)
"""
PROLOGUE = """
    import torch
    torch.manual_seed(0)
    def close(found, want, limit):
        assert found.shape == want.shape and found.dtype == want.dtype
        error = (found.float() - want.float()).norm() / want.float().norm()
        assert error < limit, (found.shape, error)
"""
COMPILED = """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from treadle_fp8_kit import kernels, quantize_kernel
    from treadle_fp8_kit.tiles import choose_int8_tile, choose_tile

    def build(kernel, warps, stages, constants, **types):
        names = kernel.arg_names
        signature = {n: "constexpr" if n in constants else types.get(n, "i32") for n in names}
        values = {(names.index(n),): value for n, value in constants.items()}
        source = ASTSource(kernel, signature, values, {
            (i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if n not in constants
        })
        options = {"num_warps": warps, "num_stages": stages, "launch_pdl": True}
        made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
        assert made.metadata.shared <= 227 << 10
        code = made.asm["ptx"]
        wait = code.index("griddepcontrol.wait")
        assert code.index("griddepcontrol.launch_dependents") < wait
        assert "ld.global" not in code[:wait] and "st.global" not in code[:wait]
        return code

    fp8, int8, fp32 = "*fp8e4nv", "*i8", "*fp32"
    rest = dict(x_scale=fp32, w_scale=fp32, w_sum=fp32, bias="*bf16", out="*bf16", order=fp32, tiles=fp32)
    types = dict(x=fp8, weight=fp8, **rest)
    def constants(tile, blocks=False, zero=False):
        sizes = dict(BLOCK_N=tile.block_n, BLOCK_M=tile.block_m, BLOCK_K=tile.block_k, GROUP_M=tile.group_m)
        return sizes | dict(BLOCK_SCALES=blocks, SPLIT_K=False, HAS_ZERO=zero, HAS_BIAS=zero, EXPERTS=False, USE_PDL=True)
    for rows in (1, 17, 33, 65, 128):
        for width, depth in (4096, 4096), (4096, 12288), (6144, 4096), (24576, 4096):
            for blocks in (False, True):
                tile = choose_tile(rows, width, depth, blocks)
                if tile is None:
                    continue
                code = build(kernels.scaled_mm_kernel, tile.num_warps, tile.num_stages, constants(tile, blocks), **types)
                assert f"m64n{tile.block_m}k32.f32.e4m3.e4m3" in code, "tensor cores multiply fp8 as it is"
    for rows, zero in (1, False), (48, True), (200, False), (2000, True):
        tile = choose_int8_tile(rows, 4096, 4096)
        code = build(kernels.scaled_mm_kernel, tile.num_warps, tile.num_stages, constants(tile, zero=zero), x=int8, weight=int8, **rest)
        assert "k32.s32.s8.s8" in code, "tensor cores multiply int8 as it is"
        loads = [line for line in code.splitlines() if "cp.async.c" in line and "commit" not in line]
        assert loads and all("cp.async.cg" in line and ", 0x10" in line for line in loads), "16 bytes at a time"
        assert ".local" not in code, "sums stay in registers"
    chosen = dict(NUM_SPLITS=4, BLOCK_N=1024, BLOCK_SCALES=False, HAS_ZERO=True, HAS_BIAS=True, USE_PDL=True)
    for sums in fp32, "*i32":
        build(kernels.split_k_reduce_kernel, 4, 3, chosen, partials=sums, **rest)
    chosen = dict(HIDDEN_SIZE=12288, GROUP_SIZE=12288, NUM_GROUPS_PADDED=1, GROUP_SIZE_PADDED=16384, GATED=True, HAS_STATIC_SCALE=False, HAS_MAX_ABS=True)
    types = dict(x="*bf16", static_scale=fp32, scales=fp32, max_abs="fp32")
    for out, lowest, largest, zero in (fp8, -448.0, 448.0, False), (int8, -128.0, 127.0, True):
        numbers = dict(LOWEST=lowest, LARGEST=largest, HAS_ZERO=zero, USE_PDL=True)
        build(quantize_kernel.quantize_kernel, 16, 3, {**chosen, **numbers}, out=out, **types)
"""


def test_activations_are_rounded_as_torch_rounds_them(in_process: Callable[..., None]) -> None:
    in_process(PROLOGUE, ROUNDED, interpret=True)


def test_products_of_few_rows_are_torchs(in_process: Callable[..., None]) -> None:
    in_process(PROLOGUE, MULTIPLIED, interpret=True)


def test_products_in_int8_are_those_of_float64(in_process: Callable[..., None]) -> None:
    in_process(PROLOGUE, INT8, interpret=True)


def test_kernels_compile_for_hopper_and_wait_before_they_read(
    in_process: Callable[..., None],
) -> None:
    in_process(PROLOGUE, COMPILED, interpret=False)


def test_tiles_follow_the_problem() -> None:
    for blocks in (False, True):
        assert choose_tile(129, 4096, 4096, blocks) is None, "cuBLAS is faster"
        narrow_blocks = choose_tile(129, 4096, 768, blocks)
        assert (narrow_blocks is not None) == blocks, "cuBLAS takes multiples of 4 blocks"
        for rows in (1, 16, 17, 64):
            tile = choose_tile(rows, 24576, 4096, blocks)
            assert tile is not None and tile.block_m >= min(rows, 16)
            assert tile.num_splits == 1, "so many outputs fill the device"
            assert not blocks or (tile.block_k == 128 and 128 % tile.block_n == 0), (
                "one scale a tile"
            )
    large = choose_int8_tile(1000, 4096, 4096)
    assert large.fit(227 << 10) == large
    assert large.fit(99 << 10).num_stages == 2, "of 48 KiB each, on cards with less shared memory"
    narrow = choose_tile(1, 4096, 4096)
    assert narrow is not None and narrow.num_splits > 1
