"""Experts in FP8 and int8 whose activations are rounded, too: one product for all that were chosen.

Triton reads TRITON_INTERPRET when a kernel is defined, so kernels run in processes of their own. In the interpreter
torch rounds activations, because that rounds to FP8 wrongly.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from quantized_formats.compressed_tensors import FloatFormat, UnpackedFormat
from quantized_formats.experts import PackedLayer, choices
from quantized_formats.modelopt import ModelOptFormat
from quantized_formats.quark import QuarkFormat
from quantized_formats.torchao import TorchAoFormat
from torch import Tensor

from treadle.api.cache import DeviceInfo
from treadle.errors import CheckpointError
from treadle.testing.packing import Format, Fp8Format
from treadle_fp8_kit.tiles import choose_experts_tile
from treadle_layers_kit import Experts
from treadle_layers_kit.plain import PlainLinear
from treadle_layers_kit.rounded_experts import RoundedExperts, as_rounded
from treadle_layers_kit.rounded_inputs import SupportsExperts

pytest.importorskip("triton")

CARD = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
FP8: dict[str, Format] = {
    "matrix": Fp8Format(),
    "static": Fp8Format(static=True),
    "outputs": Fp8Format("channel"),
    "blocks": Fp8Format("block"),
    "compressed-tensors": FloatFormat("channel", static=True),
    "modelopt": ModelOptFormat(),
    "quark": QuarkFormat(),
    "torchao": TorchAoFormat("fp8"),
}
INT8: dict[str, Format] = {
    "W8A8": UnpackedFormat(inputs="symmetric"),
    "zero points": UnpackedFormat(inputs="asymmetric"),
    "quark": QuarkFormat("int8", "per_channel", rounds_inputs=True),
    "torchao": TorchAoFormat(rounds_inputs=True),
}
PROLOGUE = """
    from types import SimpleNamespace
    import torch
    from treadle_fp8_kit import kernels, quantize
    from treadle_fp8_kit.kernels import multiply
    from treadle_fp8_kit.tiles import MANY_BY_BLOCK, Tile
    from treadle_triton_kit.expert_tiles import plan
    torch.manual_seed(0)
    def close(found, want, limit):
        assert found.shape == want.shape
        error = (found.double() - want.double()).norm() / want.double().norm()
        assert error < limit, (found.shape, error)
"""
PLANNED = """
    for tokens, k, experts, block_m in (
        (0, 2, 4, 16), (1, 1, 1, 16), (1, 3, 5, 16), (7, 2, 64, 16), (40, 4, 6, 16), (700, 2, 3, 32), (513, 2, 2, 128), (2100, 2, 3, 128)
    ):
        for last in (experts, max(k, experts - 2)):  # in the second case nobody chooses the last ones
            ids = torch.rand(tokens, last).topk(k).indices + (experts - last) // 2
            order, tiles = plan(ids, experts, block_m)
            flat = ids.flatten()
            assert tiles.shape[1] <= tokens * k // block_m + experts and tiles.shape[1] <= tokens * k
            found = []
            for expert, begin, end in tiles.t().tolist():
                if expert < 0:
                    continue
                places = order[begin : min(end, begin + block_m)].long()
                assert len(places) and (flat[places] == expert).all()
                found += places.tolist()
            assert found == flat.sort(stable=True).indices.tolist(), "each choice once, by experts"
"""
GROUPED = """
    small, large = Tile(64, 16, 128, 4, 4, group_m=8), Tile(32, 32, 128, 4, 3, group_m=1)
    for tokens, k, experts, width, depth, tile in (
        (1, 1, 1, 48, 64, small), (1, 3, 5, 33, 208, small), (9, 2, 4, 128, 256, small), (70, 2, 3, 200, 336, large),
        (70, 2, 3, 256, 384, small), (150, 2, 3, 128, 256, large),
    ):
        ids = torch.rand(tokens, max(k, experts - 1)).topk(k).indices  # the last one has no rows
        grouping, flat = plan(ids, experts, tile.block_m), ids.flatten()
        for rows in tokens, tokens * k:
            x = torch.randn(rows, depth) * torch.logspace(-1, 1, depth) + 1
            spread = torch.arange(tokens * k) // (tokens * k // rows)
            real = torch.randn(experts, width, depth)
            scale = torch.rand(experts, width) + 0.5
            for dtype, has_zero in (torch.float8_e4m3fn, False), (torch.int8, False), (torch.int8, True):
                weight = (real * 30).to(dtype)
                sums = weight.sum(dim=2).float() if has_zero else None
                few, own = quantize.quantize_per_row(x, None, None, rows, dtype=dtype, has_zero=has_zero)
                seen = few.double() * own[:, :1] + (own[:, 1:] if has_zero else 0)
                dense = weight.double() * scale[..., None]
                y = multiply(few, own, weight, scale, None, torch.float32, tile, w_sum=sums, grouping=grouping, use_pdl=False)
                close(y, torch.einsum("mk,mnk->mn", seen[spread], dense[flat]), 1e-5)
            if width % 128 or depth % 128:
                continue
            weight = (real * 30).to(torch.float8_e4m3fn)
            scale = torch.rand(experts, width // 128, depth // 128) + 0.5
            few, own = quantize.quantize_per_block(x, rows)
            dense = weight.double() * scale.repeat_interleave(128, 1).repeat_interleave(128, 2)
            want = torch.einsum("mk,mnk->mn", (few.double() * own.repeat_interleave(128, 1))[spread], dense[flat])
            for block_tile in Tile(64, 16, 128, 4, 4, group_m=8), MANY_BY_BLOCK:
                sorted_by = plan(ids, experts, block_tile.block_m)
                y = multiply(few, own, weight, scale, None, torch.float32, block_tile, grouping=sorted_by, use_pdl=False)
                close(y, want, 1e-5)
"""
LAYERS = """
    from threading import Lock
    from torch.utils._python_dispatch import TorchDispatchMode
    from treadle_fp8_kit import product_checks, scaled_mm

    lock = Lock()  # ranks are threads, of which the interpreter knows one

    def alone_in(function):
        def call(*arguments, **named):
            with lock:
                return function(*arguments, **named)
        return call

    class Interpreted(scaled_mm.ScaledMM):
        groups = True

        def __init__(self, device):
            super().__init__(device)
            self._kernels = SimpleNamespace(
                quantize_per_row=quantize.quantize_per_row, quantize_per_block=quantize.quantize_per_block,
                multiply=alone_in(kernels.multiply), plan=alone_in(kernels.plan),
            )
            self._shared_bytes, self._use_pdl = 1 << 17, False

        def supports_blocks(self, weight, dtype):
            return True  # of up to 64 rows the kernel multiplies, and torch has no product of more on a CPU

        def supports_experts(self, *arguments, **named):
            return self.groups and super().supports_experts(*arguments, **named)

    scaled_mm.ScaledMM = Interpreted
    # The interpreter takes long: kernels with the tiles of many rows are another test's.
    product_checks.MANY, product_checks._batches = 24, lambda x: (x[:5],)
    from quantized_formats.compressed_tensors import UnpackedFormat
    from quantized_formats.experts import PackedLayer, choices
    from treadle.api.cache import DeviceInfo
    from treadle.testing.packing import Fp8Format
    from treadle.testing.ranks import run_on_ranks
    from treadle_layers_kit import ops
    from treadle_layers_kit.rounded_experts import RoundedExperts

    class NoWaits(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, arguments=(), named=None):
            assert torch.Tag.data_dependent_output not in function.tags, function
            assert torch.Tag.dynamic_output_shape not in function.tags, function
            return function(*arguments, **(named or {}))

    hopper = DeviceInfo("cuda", (9, 0))
    blocks = Fp8Format("block")
    for format, online, limit in (
        (Fp8Format(), "", 0.12), (Fp8Format(static=True), "", 0.12), (Fp8Format("channel"), "", 0.12), (blocks, "", 0.12),
        (None, "fp8", 0.12), (UnpackedFormat(inputs="symmetric"), "", 0.03), (UnpackedFormat(inputs="asymmetric"), "", 0.03),
    ):
        hidden, inner = (256, 256) if format is blocks else (128, 64)
        layer = PackedLayer(format, 4, hidden, inner, online)
        Interpreted.groups = True
        built = layer.load(torch.float16, hopper)
        assert isinstance(built.rounded_gate_up, RoundedExperts) and isinstance(built.rounded_down, RoundedExperts)
        assert not any(name.isdecimal() for name in built._modules), "nothing is kept twice"
        shares = run_on_ranks(2, lambda ranks: layer.load(torch.float16, hopper, tp_group=ranks))
        assert all(share.rounded_down.weight.shape == (4, hidden, inner // 2) for share in shares)
        Interpreted.groups = False
        alone = layer.load(torch.float16, hopper)  # one product for each expert
        assert "0" in alone._modules
        for tokens in 0, 5:
            x, ids = torch.randn(tokens, hidden).half(), choices(tokens, 2, 4, last=1)
            with NoWaits():
                y = built.method.apply(built, x, ids, ops.silu_and_mul)
            assert y.shape == (tokens, 2, hidden) and y.dtype is torch.float16
            if not tokens:
                continue
            want = layer.expected(x, ids)
            close(y, want, limit)
            close(y, alone.method.apply(alone, x, ids, ops.silu_and_mul), 5e-3 if format is not blocks else 0.02)
            parts = [s.method.apply(s, x, ids, ops.silu_and_mul).float() for s in shares]
            close(sum(parts), want, limit)
            if format is not None:
                continue
            # Another activation is computed as it is.
            built.method._is_silu = False
            close(built.method.apply(built, x, ids, lambda gate_up: ops.silu_and_mul(gate_up)), y, 5e-3)

    class Wrong(Interpreted):
        groups = True

        def mm_experts(self, *arguments, **named):
            return super().mm_experts(*arguments, **named).roll(1, 0)

    wrong, said = Wrong(hopper), []
    scaled_mm.log.setLevel("INFO")
    scaled_mm.log.addFilter(lambda record: said.append(record.getMessage()) or True)
    like, scale = torch.zeros(4, 128, 128, dtype=torch.int8), torch.ones(4, 128)
    Interpreted.groups = True
    assert Interpreted(hopper).supports_experts(like, scale, torch.float16)
    assert not said
    assert not wrong.supports_experts(like, scale, torch.float16), "results that are wrong are noticed"
    assert said == ["no int8 product of experts [4, 128, 128] (its result is wrong)"]
    assert not Interpreted(hopper).supports_experts(like[..., :120], scale, torch.float16), "rows of no 16 bytes"
    assert not Interpreted(hopper).supports_experts(like, scale, torch.float32)
    assert not Interpreted(DeviceInfo("cuda", (7, 5))).supports_experts(like, scale, torch.float16)
"""
COMPILED = """
    import re, subprocess, tempfile
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from treadle_fp8_kit.tiles import choose_experts_tile

    def spilled(code):
        with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
            file.write(code)
            file.flush()
            assemble = [triton.knobs.nvidia.ptxas.path, "-v", "--gpu-name=sm_90a", file.name, "-o", "/dev/null"]
            said = subprocess.run(assemble, capture_output=True, text=True, check=True).stderr
        return [int(number) for number in re.findall(r"(\\d+) bytes spill", said)]
    from treadle_triton_kit.expert_tiles import BLOCKS, plan_kernel

    def build(kernel, warps, stages, constants, **types):
        names = kernel.arg_names
        signature = {n: "constexpr" if n in constants else types.get(n, "i32") for n in names}
        values = {(names.index(n),): value for n, value in constants.items()}
        aligned = [n for n in names if n not in constants and n not in ("shared", "M", "num_choices", "num_tiles")]
        source = ASTSource(kernel, signature, values, {(names.index(n),): [["tt.divisibility", 16]] for n in aligned})
        options = {"num_warps": warps, "num_stages": stages, "launch_pdl": True}
        made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
        assert made.metadata.shared <= 227 << 10
        code = made.asm["ptx"]
        wait = code.index("griddepcontrol.wait")
        assert "ld.global" not in code[:wait] and "st.global" not in code[:wait]
        assert spilled(code) and not any(spilled(code)), "sums stay in registers"
        return code

    fp32, int32 = "*fp32", "*i32"
    rest = dict(x_scale=fp32, w_scale=fp32, w_sum=fp32, bias="*bf16", out="*bf16", order=int32, tiles=int32)
    for dtype, blocks, zero in ("*fp8e4nv", False, False), ("*fp8e4nv", True, False), ("*i8", False, True):
        tiles = {choose_experts_tile(tokens, 8, 128, has_block_scales=blocks) for tokens in (1, 32, 200, 400, 8192)}
        assert len(tiles) >= 3
        for tile in tiles:
            code = build(
                kernels.scaled_mm_kernel, tile.num_warps, tile.num_stages,
                dict(BLOCK_N=tile.block_n, BLOCK_M=tile.block_m, BLOCK_K=tile.block_k, GROUP_M=tile.group_m, BLOCK_SCALES=blocks,
                     SPLIT_K=False, HAS_ZERO=zero, HAS_BIAS=False, EXPERTS=True, USE_PDL=True),
                x=dtype, weight=dtype, **rest,
            )
            numbers = "s32.s8.s8" if dtype == "*i8" else "f32.e4m3.e4m3"
            columns = tile.block_n if blocks and tile.block_m >= 64 else tile.block_m
            assert f"m64n{columns}k32.{numbers}" in code, "tensor cores multiply them as they are"
            loads = [line for line in code.splitlines() if "cp.async.c" in line and "commit" not in line]
            assert loads and all(", 0x10" in line for line in loads), "16 bytes at a time"
    for block, warps in BLOCKS:
        build(plan_kernel, warps, 3, dict(BLOCK_M=16, BLOCK=block, USE_PDL=True), topk_ids="*i64", order=int32, tiles=int32)
"""


@pytest.mark.parametrize("code", [PLANNED, GROUPED, LAYERS], ids=["planned", "grouped", "layers"])
def test_interpreted_kernels_equal_the_plain_product(
    code: str, in_process: Callable[..., None]
) -> None:
    in_process(PROLOGUE, code, interpret=True)


def test_kernels_compile_for_hopper_and_wait_before_they_read(
    in_process: Callable[..., None],
) -> None:
    in_process(PROLOGUE, COMPILED, interpret=False)


def test_tiles_have_room_for_the_rows_of_an_expert() -> None:
    for experts, k, blocks in (128, 8, False), (8, 2, True), (8, 2, False), (16, 1, True):
        tiles = [
            choose_experts_tile(tokens, k, experts, has_block_scales=blocks)
            for tokens in range(1, 1000)
        ]
        assert [t.block_m for t in tiles] == sorted(t.block_m for t in tiles)
        most = 64 if blocks else 128
        assert all(
            2 * tokens * k <= experts * 64 or t.block_m == most for tokens, t in enumerate(tiles, 1)
        )
        assert len(set(tiles[512:])) == 1, (
            "a start runs 513 rows and the most, and compiles for these"
        )
        assert all(t.block_k == 128 and t.block_n <= 128 for t in tiles), "one scale a tile"


def test_a_scale_that_is_no_number_is_refused() -> None:
    for format, leaf in (FP8["blocks"], "weight_scale_inv"), (INT8["W8A8"], "weight_scale"):
        layer = PackedLayer(format, 3, 128, 128)

        def damage(tensors: dict[str, Tensor], leaf: str = leaf) -> None:
            name = next(n for n in tensors if n.endswith(f"experts.2.down_proj.{leaf}"))
            tensors[name] = torch.full_like(tensors[name], float("nan"))

        with pytest.raises(CheckpointError, match=r"experts\.2\.down_proj"):
            layer.load(torch.bfloat16, DeviceInfo("cuda", (9, 0)), change=damage)


def test_static_scales_of_int8_are_left_to_other_kernels() -> None:
    """Those of experts differ: one for all would cut numbers off, or lose the small ones."""
    layer = PackedLayer(UnpackedFormat(inputs="symmetric", static=True), 3, 128, 128)
    built = layer.load(torch.bfloat16, DeviceInfo("cuda", (9, 0)))
    for linear in built.modules():
        method = getattr(linear, "method", None)
        if isinstance(method, SupportsExperts):
            assert method.uses_product and as_rounded(linear) is None


def test_matrices_that_are_not_alike_are_not_stacked() -> None:
    assert RoundedExperts.stack([None], torch.bfloat16) is None
    assert as_rounded(torch.nn.Linear(2, 2)) is None
    assert not isinstance(PlainLinear(), SupportsExperts)


def apply(built: Experts, x: Tensor, ids: Tensor) -> Tensor:
    y: Tensor = built.method.apply(built, x.to(built.rounded_down.weight.device), ids, built.op)  # type: ignore[union-attr]
    return y


@pytest.mark.gpu
@pytest.mark.skipif(CARD is None or CARD < (9, 0), reason="needs a Hopper card")
@pytest.mark.parametrize(
    "layer",
    [
        *(pytest.param(PackedLayer(f, 8, 512, 256), id=f"fp8, {name}") for name, f in FP8.items()),
        *(
            pytest.param(PackedLayer(f, 8, 528, 304), id=f"int8, {name}")
            for name, f in INT8.items()
        ),
        pytest.param(PackedLayer(None, 8, 528, 304, "fp8"), id="fp8, made while loading"),
        pytest.param(PackedLayer(Fp8Format("block"), 8, 2048, 768), id="fp8, larger blocks"),
    ],
)
def test_a_card_multiplies_by_all_experts_at_once(layer: PackedLayer) -> None:
    built = layer.load(torch.bfloat16, DeviceInfo("cuda", CARD), device="cuda")
    assert {"rounded_gate_up", "rounded_down"} == set(built._modules), "the log says why"
    # What float64 loses by rounding the same numbers: 0.021 in int8, 0.049 in FP8, and 0.076 where it rounds the weights, too.
    limit = 0.09 if layer.online else 0.03 if layer.format in INT8.values() else 0.06
    for tokens in 1, 7, 40, 100, 600:
        x = torch.randn(
            tokens, layer.hidden, generator=torch.Generator().manual_seed(tokens)
        ).bfloat16()
        ids = choices(tokens, 3, 8, last=1)
        given = x.cuda(), ids.cuda()
        y = apply(built, *given)
        want = layer.expected(x, ids)
        error = float((y.cpu().float() - want).norm() / want.norm())
        assert error < limit, (tokens, error)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            replayed = apply(built, *given)
        graph.replay()
        assert torch.equal(replayed, y)
