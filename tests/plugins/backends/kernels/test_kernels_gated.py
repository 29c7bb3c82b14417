"""Hopper's gated product: which rows get it, its tiles, its code; on a card, its results."""

import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton.experimental.gluon")

import treadle_kernels_triton
from treadle_kernels_triton import linear
from treadle_kernels_triton.hopper import primitives
from treadle_kernels_triton.hopper.gated_linear import (
    COOPERATIVE,
    PINGPONG,
    GatedLinear,
    Variant,
    choose_variant,
    create_gated_linear,
)

from treadle.api.cache import DeviceInfo
from treadle.api.types import KernelOffer, KernelRequest

BIG, SMALL = (12288, 4096), (3072, 1024)  # width and depth of Qwen3-8B and 0.6B
VARIANTS = pytest.mark.parametrize(
    "variant", [PINGPONG, COOPERATIVE], ids=["pingpong", "cooperative"]
)


@pytest.mark.parametrize(
    ("rows", "big", "small"),
    [
        (128, None, None),
        (300, None, None),
        (512, None, None),
        (1024, PINGPONG, PINGPONG),
        (2048, COOPERATIVE, PINGPONG),
        (4096, COOPERATIVE, PINGPONG),
        (8192, COOPERATIVE, PINGPONG),
    ],
)
def test_the_rule_gives_what_was_measured(
    rows: int, big: Variant | None, small: Variant | None
) -> None:
    assert choose_variant(rows, *BIG, 132) == big
    assert choose_variant(rows, *SMALL, 132) == small


def test_the_rule_follows_the_device_and_what_tma_can_fetch() -> None:
    assert choose_variant(1024, *SMALL, 264) is None, "twice the multiprocessors, half the rounds"
    assert choose_variant(4096, 12288, 4104, 132) is COOPERATIVE
    assert choose_variant(4096, 12284, 4096, 132) is None
    assert choose_variant(4096, 12288, 4100, 132) is None
    assert choose_variant(4096, 12288, 64, 132) is None, "one step"


@pytest.mark.parametrize("programs", [1, 7, 132])
@pytest.mark.parametrize("tiles", [(1, 1), (3, 5), (16, 12), (17, 9), (64, 48), (35, 4)])
def test_every_tile_is_taken_once(
    tiles: tuple[int, int], programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    m_tiles, n_tiles = tiles
    programs = min(programs, m_tiles * n_tiles)
    tiles_taken = []
    for pid in range(programs):
        device = SimpleNamespace(
            program_id=lambda _, pid=pid: pid, num_programs=lambda _: programs, minimum=min
        )
        monkeypatch.setattr(primitives, "gl", device)
        monkeypatch.setattr(primitives, "_GROUP_SIZE_M", 16)
        count = primitives.num_program_tiles.fn(m_tiles, n_tiles)
        assert count >= 1, "cooperative writes without asking whether there was a tile"
        tiles_taken += [primitives.tile_coordinates.fn(n, m_tiles, n_tiles) for n in range(count)]
    assert sorted(tiles_taken) == [(m, n) for m in range(m_tiles) for n in range(n_tiles)]


class Spy(GatedLinear):
    """Instead of multiplying it notes what it is asked for."""

    def __init__(self) -> None:
        super().__init__(torch.bfloat16, 1)
        self.calls: list[tuple[Any, ...]] = []

    def forward(self, x: torch.Tensor, weight: torch.Tensor, variant: Variant) -> torch.Tensor:
        self.calls.append((tuple(x.shape), x.stride(0), variant))
        return x.new_zeros(len(x), len(weight) // 2)


def test_the_operation_takes_it_for_many_rows_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "silu_and_mul", lambda y, use_pdl: y[..., : y.shape[-1] // 2])
    spy = Spy()
    weight, bias = torch.zeros(256, 128).bfloat16(), torch.zeros(256).bfloat16()
    x = torch.zeros(2, 750, 144).bfloat16()[:, :, :128]
    assert linear.linear_silu_and_mul(x, weight, None, gated_linear=spy).shape == (2, 750, 128)
    assert spy.calls == [((1500, 128), 144, PINGPONG)], (
        "rows further apart are no reason for a copy"
    )
    for arguments in (
        (x[0], weight, None),
        (x, weight, bias),
        (x.half(), weight.half(), None),
        (x, torch.zeros(256, 256).bfloat16()[:, ::2], None),  # not contiguous
        (torch.zeros(1500, 132).bfloat16()[:, :128], weight, None),  # 8 bytes
        (torch.zeros(1500, 136).bfloat16()[:, 4:132], weight, None),
        (torch.zeros(1, 128).bfloat16().expand(1500, 128), weight, None),
        (torch.zeros(128, 1500).bfloat16().t(), weight, None),
    ):
        assert linear.linear_silu_and_mul(*arguments, gated_linear=spy).shape == (
            *arguments[0].shape[:-1],
            128,
        )
    assert len(spy.calls) == 1


def test_where_it_does_not_work_torch_serves(
    fails: Callable[..., bool], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("treadle_kernels_triton.hopper.gated_linear._self_check", fails)

    def loaded(op: str, capability: tuple[int, int], dtype: str = "bfloat16") -> Any:
        shape = {"in_features": 1024, "out_features": 6144}
        request = KernelRequest(DeviceInfo("cuda", capability), dtype, shape)
        offer = treadle_kernels_triton.treadle_kernel_op(op, request)
        assert isinstance(offer, KernelOffer)
        return offer.load().keywords.get("gated_linear")

    def warned() -> int:
        messages = [record.getMessage() for record in caplog.records]
        return sum(
            "no gated product" in text and "torch's linear serves" in text for text in messages
        )

    with caplog.at_level(logging.WARNING):
        assert loaded("linear_silu_and_mul", (9, 0)) is None
    assert warned() == 1
    loaded("linear_silu_and_mul", (9, 0), "float32")
    loaded("linear_silu_and_mul", (8, 0))
    loaded("linear_silu_and_mul", (10, 0))
    loaded("linear", (9, 0))
    assert warned() == 1, "nothing else was tried"


@VARIANTS
@pytest.mark.parametrize("kind", ["bf16", pytest.param("fp16", marks=pytest.mark.slow)])
def test_it_compiles_without_spills(
    variant: Variant, kind: str, for_hopper: Callable[..., str]
) -> None:
    from treadle_kernels_triton.hopper.gated_kernel import REGISTERS, WARPS, gated_kernel
    from triton.experimental.gluon import language as gl

    def described(rows: int) -> str:
        return f"tensordesc<{kind}[{rows}, 64],{gl.NVMMASharedLayout(128, 16, 2)!r}>"

    constants = {"PINGPONG": variant.pingpong, "BLOCK_N": variant.block_n}
    constants |= {"NUM_STAGES": variant.num_stages, "NUM_BUFFERS": variant.num_buffers}
    types = {"x_desc": described(128), "w_desc": described(variant.block_n)}
    types |= {"y_desc": described(128 if variant.pingpong else 64)}
    ptx = for_hopper(gated_kernel, constants, types, num_warps=WARPS, maxnreg=REGISTERS)
    assert ptx.count("wgmma.mma_async") == (32 if variant.pingpong else 24)
    assert "stmatrix" in ptx


def test_integers_do_not_make_other_kernels() -> None:
    from treadle_kernels_triton.hopper.gated_kernel import gated_kernel

    plain = [p.name for p in gated_kernel.params if not p.is_constexpr and "desc" not in p.name]
    assert all(p.do_not_specialize for p in gated_kernel.params if p.name in plain)
    assert plain == ["m_tiles", "n_tiles", "k_tiles", "N"]


def reference(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return linear.silu_and_mul(torch.nn.functional.linear(x, weight))


Off = Callable[[torch.Tensor, torch.Tensor], float]
CLOSE = 5e-3  # sums in another order are rounded to a neighbour now and then


@pytest.mark.gpu
@pytest.mark.usefixtures("on_hopper")
class TestOnHopper:
    @VARIANTS
    @pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
    @pytest.mark.parametrize(("width", "depth"), [(3072, 1024), (1000, 136), (72, 4096)])
    def test_results(self, variant: Variant, dtype: str, width: int, depth: int, off: Off) -> None:
        gated = create_gated_linear(dtype)
        assert gated is not None
        torch.manual_seed(0)
        weight = (torch.randn(2 * width, depth, device="cuda") * depth**-0.5).to(gated.dtype)
        for rows in (1, 7, 128, 129, 300, 1000, 8192):
            wide = torch.randn(rows, depth + 8, device="cuda").to(gated.dtype)
            wide[:, depth:] = torch.nan  # between the rows
            for x in (wide[:, :depth], wide[:, :depth].contiguous()):
                expected = reference(x, weight)
                assert off(gated.forward(x, weight, variant), expected) < CLOSE, (rows, x.stride())

    @VARIANTS
    def test_nothing_is_written_past_the_end(
        self, variant: Variant, off: Off, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        gated = create_gated_linear("bfloat16")
        assert gated is not None
        x = torch.randn(300, 1024, device="cuda").bfloat16()
        weight = torch.randn(2 * 264, 1024, device="cuda").bfloat16() * 0.03
        room = torch.full((600, 264), 7.0, dtype=x.dtype, device="cuda")
        with monkeypatch.context() as patch:
            patch.setattr(torch, "empty", lambda *_, **__: room[:300])
            gated.forward(x, weight, variant)
        assert bool((room[300:] == 7.0).all())
        assert off(room[:300], reference(x, weight)) < CLOSE

    @pytest.mark.parametrize(("width", "depth"), [BIG, SMALL])
    def test_it_can_be_captured(self, width: int, depth: int, off: Off) -> None:
        request = KernelRequest(
            DeviceInfo("cuda", torch.cuda.get_device_capability()),
            "bfloat16",
            {"in_features": depth, "out_features": 2 * width},
        )
        offer = treadle_kernels_triton.treadle_kernel_op("linear_silu_and_mul", request)
        assert isinstance(offer, KernelOffer)
        op = offer.load()
        assert op.keywords["gated_linear"] is not None
        weight = (torch.randn(2 * width, depth, device="cuda") * depth**-0.5).bfloat16()
        for rows in (300, 1024, 2048):
            x = torch.randn(rows, depth, device="cuda").bfloat16()
            reference(x, weight)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):  # the first call of all
                actual = op(x, weight, None)
            for _ in range(3):
                x.normal_()
                actual.fill_(torch.nan)
                graph.replay()
                assert off(actual, reference(x, weight)) < CLOSE, rows
