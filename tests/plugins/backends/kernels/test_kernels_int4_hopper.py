"""Hopper's kernel of four-bit weights: what it serves, its arithmetic and shares, its code; on a card,
its results."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from quantized_formats.ptx import execute
from torch import Tensor

pytest.importorskip("triton.experimental.gluon")

import treadle_kernels_triton
from treadle_kernels_triton.int4 import fragments, hopper, hopper_kernel, linear, self_check
from treadle_kernels_triton.int4.stream_k import StreamKSchedule, schedule_stream_k
from treadle_kernels_triton.int4.tiles import HOPPER_TILES, HopperTile, choose_hopper_tile

from treadle.api.cache import DeviceInfo
from treadle.api.types import KernelOffer, KernelRequest
from treadle_layers_kit.int4 import PackedInt4
from treadle_layers_kit.int4_layout import pack_codes, pack_steps, unpack

HOPPER = (9, 0)
SHAPES = ((4096, 6144), (4096, 4096), (4096, 24576), (12288, 4096))  # in, out: of Qwen3-8B
KINDS = {torch.bfloat16: "bf16", torch.float16: "fp16"}


def test_what_it_serves() -> None:
    assert hopper.supports(HOPPER, 4096, 128) and hopper.supports(HOPPER, 192, 384)
    for capability, outputs, group in (
        ((8, 0), 4096, 128), ((10, 0), 4096, 128), (None, 4096, 128), (HOPPER, 4096, 64),
        (HOPPER, 4096, 192), (HOPPER, 72, 128),
    ):  # fmt: skip
        assert not hopper.supports(capability, outputs, group)


@pytest.mark.parametrize(
    ("rows", "tiles"),
    [
        (0, None), (1, None), (16, None), (17, (None, None, 32, 32)), (32, (None, None, 32, 32)),
        (33, 64), (64, 64), (65, 128), (256, 128), (257, 128), (512, (128, 128, 256, 256)),
        (600, 128), (768, 256), (1024, 256), (2048, 256), (2049, None), (8192, None),
    ],
)  # fmt: skip
def test_the_rule_gives_what_was_measured(rows: int, tiles: Any) -> None:
    expected_rows = tiles if isinstance(tiles, tuple) else (tiles,) * 4
    for shape, expected in zip(SHAPES, expected_rows, strict=True):
        tile = choose_hopper_tile(rows, *shape)
        assert (tile and tile.block_m) == expected
        assert tile is None or tile in HOPPER_TILES


# ------------------------------------------------------------------------------ arithmetic


class Bits(Tensor):
    """For ``x.to(kind, bitcast=True)``."""

    def to(self, kind: torch.dtype, bitcast: bool) -> Tensor:  # type: ignore[override]
        assert bitcast
        return self.view(kind)


@pytest.mark.parametrize("kind", KINDS)
def test_words_become_the_fragments_of_the_weight(
    kind: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel's own functions, its assembly among them, on the layout of all other kernels."""

    def assembly(
        text: Any, constraints: str, inputs: list[Tensor], *more: Any, **named: Any
    ) -> Any:
        results = execute(getattr(text, "value", text), inputs)
        return results if len(results) > 1 else results[0]

    device = SimpleNamespace(
        inline_asm_elementwise=assembly,
        join=lambda a, b: torch.stack((a, b), -1),
        permute=lambda x, order: x.permute(order),
        reshape=lambda x, shape: x.reshape(shape).as_subclass(Bits),
        convert_layout=lambda x, layout, assert_trivial: x,
        int16=None,
        int32=None,
    )
    monkeypatch.setattr(fragments, "gl", device)
    monkeypatch.setattr(fragments, "split_pair", fragments.split_pair.fn)
    kinds = SimpleNamespace(is_bf16=lambda: kind is torch.bfloat16)
    inputs, outputs = 3 * 128, 192
    codes = torch.randint(16, (inputs, outputs))
    scales, zeros = torch.rand(3, outputs).half(), torch.randint(17, (3, outputs))
    packed, steps = pack_codes(codes), pack_steps(scales, zeros, kind)
    expected = (codes - zeros.repeat_interleave(128, 0)).to(kind)
    expected = (expected * scales.to(kind).repeat_interleave(128, 0)).t()
    twos = packed.view(torch.int32).view(-1, 32)  # as TMA sees it
    for chunk in range(3):
        for n in range(0, outputs, 64):
            offset = (chunk * outputs + n) // 2
            pairs = twos[offset : offset + 32].reshape(64, 16)
            way = fragments.unpack_scales.fn(steps[chunk, n : n + 64], kinds)
            for half in range(2):
                two = fragments.dequantize.fn(pairs, way, half, kinds)
                actual = fragments.fragment.fn(two, kind, None)
                k = chunk * 128 + half * 64
                assert torch.equal(actual.as_subclass(Tensor), expected[n : n + 64, k : k + 64])


def test_parts_are_stored_and_read_in_one_order(monkeypatch: pytest.MonkeyPatch) -> None:
    device = SimpleNamespace(
        permute=lambda x, order: x.permute(order), reshape=lambda x, shape: x.reshape(shape)
    )
    monkeypatch.setattr(fragments, "gl", device)
    for tile in HOPPER_TILES:
        sums = torch.arange(64 * tile.block_m).view(64, tile.block_m)
        assert torch.equal(
            fragments.unflatten.fn(fragments.flatten.fn(sums, tile.block_m), tile.block_m), sums
        )


# ------------------------------------------------------------------------------ shares


def check_schedule(
    tiles: int, chunks: int, schedule: StreamKSchedule, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every chunk of every tile is multiplied once, and every part has a place of its own."""
    covered: set[tuple[int, int]] = set()
    places: set[int] = set()
    parts: dict[int, list[tuple[int, int]]] = {}
    slots = max(schedule.max_partials, 1)
    for me in range(schedule.num_programs):
        device = SimpleNamespace(
            program_id=lambda _, me=me: me, num_programs=lambda _: schedule.num_programs, minimum=min,
            maximum=max, where=lambda test, a, b: a if test else b,
        )  # fmt: skip
        monkeypatch.setattr(hopper_kernel, "gl", device)
        bounds = hopper_kernel.segments.fn(
            schedule.num_split_tiles, schedule.chunks_per_program, chunks, schedule.num_waves
        )
        begin, end, touched, count = bounds
        assert count >= 1, "the first stage is taken without asking"
        total = 0
        for n in range(count):
            tile, first, last = hopper_kernel.segment.fn(
                n, begin, end, touched, schedule.num_split_tiles, chunks
            )
            assert 0 <= first < last <= chunks and tile < tiles
            total += last - first
            covered |= {(tile, chunk) for chunk in range(first, last)}
            if (first, last) != (0, chunks):
                place = me * slots + (me * schedule.chunks_per_program < tile * chunks)
                assert (
                    schedule.max_partials
                    and place not in places
                    and place < schedule.num_programs * slots
                )
                places.add(place)
                parts.setdefault(tile, []).append((me, place))
        assert total == end - begin + schedule.num_waves * chunks
    assert len(covered) == tiles * chunks
    for tile, owners in parts.items():
        assert tile < schedule.num_split_tiles
        low, high = (
            tile * chunks // schedule.chunks_per_program,
            ((tile + 1) * chunks - 1) // schedule.chunks_per_program,
        )
        assert owners == [
            (p, p * slots + (p * schedule.chunks_per_program < tile * chunks))
            for p in range(low, high + 1)
        ]


@pytest.mark.parametrize("seed", range(4))
def test_shares_cover_the_product(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = random.Random(seed)
    for _ in range(40):
        tiles, chunks = drawn.randint(1, 300), drawn.randint(1, 40)
        programs = drawn.choice((1, 7, 78, 132))
        schedule = schedule_stream_k(tiles, chunks, programs)
        assert schedule.num_programs <= programs and schedule.num_split_tiles < 2 * programs
        check_schedule(tiles, chunks, schedule, monkeypatch)


def test_the_shapes_of_a_model_keep_every_program_busy() -> None:
    for inputs, outputs in SHAPES:
        for rows in (33, 128, 256, 1024):
            tile = choose_hopper_tile(rows, inputs, outputs)
            assert tile is not None
            tiles, chunks = -(-rows // tile.block_m) * outputs // 128, inputs // 128
            schedule = schedule_stream_k(tiles, chunks, 132)
            longest = schedule.num_waves * chunks + schedule.chunks_per_program
            assert longest <= 1.5 * -(-tiles * chunks // 132) + 2


# ------------------------------------------------------------------------------ code


@pytest.mark.parametrize(
    ("tile", "kind"),
    [
        *((tile, "bf16") for tile in HOPPER_TILES),
        pytest.param(HOPPER_TILES[2], "fp16", marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_it_compiles_without_spills(
    tile: HopperTile, kind: str, for_hopper: Callable[..., str]
) -> None:
    x, codes, steps = hopper.smem_layouts()
    types = {
        "x_desc": f"tensordesc<{kind}[{tile.block_m}, 64],{x!r}>",
        "codes_desc": f"tensordesc<i32[64, 32],{codes!r}>",
        "scales_desc": f"tensordesc<i32[1, 128],{steps!r}>",
        "out": f"*{kind}", "partials": "*fp32", "tile_counters": "*i32",
    }  # fmt: skip
    constants = {"BLOCK_M": tile.block_m, "NUM_STAGES": tile.num_stages}
    aligned = ("out", "partials", "tile_counters", "N")
    options = {"num_warps": hopper_kernel.WARPS, "maxnreg": hopper_kernel.REGISTERS}
    ptx = for_hopper(hopper_kernel.int4_hopper_kernel, constants, types, aligned, **options)
    assert ptx.count("wgmma.mma_async") == 16


# ------------------------------------------------------------------------------ where it works


def loaded(group: int = 128, outputs: int = 256, capability: tuple[int, int] = HOPPER) -> Any:
    shape = {"in_features": 512, "out_features": outputs, "group": group}
    request = KernelRequest(DeviceInfo("cuda", capability), "bfloat16", shape)
    offer = treadle_kernels_triton.treadle_kernel_op("int4_linear", request)
    assert isinstance(offer, KernelOffer)
    return offer.load()


def test_what_does_not_work_falls_back_alone_with_one_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    if torch.cuda.is_available():
        pytest.skip("it works on a card")
    self_check.kernel_works.cache_clear()
    with caplog.at_level(logging.WARNING):
        op = loaded()
    assert not (op.use_hopper or op.use_small_m or op.use_unpack)
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 3
    for text, expected in zip(
        messages, ("Triton's serves them", "unpacked first", "torch does"), strict=True
    ):
        assert expected in text
    loaded()
    assert len(caplog.records) == 3, "they were tried once"
    self_check.kernel_works.cache_clear()


def test_what_is_tried_is_what_the_shape_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    trials: list[tuple[Any, ...]] = []

    def kernel_works(path: str, *more: Any) -> bool:
        trials.append((path, *more))
        return path not in failing

    monkeypatch.setattr(linear, "kernel_works", kernel_works)
    kind = torch.bfloat16
    failing: set[str] = set()
    op = loaded()
    assert op.use_hopper and op.use_small_m and op.use_unpack
    assert trials == [("hopper", kind), ("triton with hopper", kind, 128), ("unpack", kind, 128)]
    trials.clear()
    failing = {"hopper"}
    op = loaded()
    assert not op.use_hopper and op.use_small_m and op.use_unpack
    assert trials == [("hopper", kind), ("triton", kind, 128), ("unpack", kind, 128)]
    trials.clear()
    failing = {"triton with hopper"}
    op = loaded()
    assert op.use_hopper and not op.use_small_m and op.use_unpack and len(trials) == 3
    for changes in {"group": 64}, {"outputs": 72}, {"capability": (8, 0)}:
        trials.clear()
        op = loaded(**changes)
        assert not op.use_hopper and op.use_small_m and trials[0][:2] == ("triton", kind)
        assert trials[0][2] == (32 if "group" in changes else 128)


@pytest.mark.gpu
@pytest.mark.usefixtures("on_hopper")
class TestOnHopper:
    @pytest.mark.parametrize("dtype", KINDS)
    @pytest.mark.parametrize("group", [128, 256])
    @pytest.mark.parametrize(("inputs", "outputs"), [(512, 192), (4096, 4096), (1280, 25600)])
    def test_results(self, inputs: int, outputs: int, group: int, dtype: torch.dtype) -> None:
        generator = torch.Generator("cuda").manual_seed(0)
        with torch.device("cuda"):
            codes = torch.randint(16, (inputs, outputs), generator=generator)
            scales = torch.rand(inputs // group, outputs, generator=generator).half() * 0.02
            zeros = torch.randint(17, scales.shape, generator=generator)
        packed = PackedInt4.pack(lambda a, b: codes[:, a:b], scales, zeros, inputs, group, dtype)
        assert packed is not None
        packed.op = loaded(group, outputs)
        assert packed.op.use_hopper and packed.op.use_small_m
        if dtype is torch.float16:
            assert self_check.kernel_works("hopper", dtype)
            packed.op = linear.Int4Linear(dtype, use_hopper=True, use_small_m=True, use_unpack=True)
        weight = unpack(packed.codes, packed.scales, inputs, group, dtype).float()
        for rows in (1, 16, 17, 33, 64, 65, 128, 200, 256, 300, 512, 700, 1024, 3000):
            wide = torch.randn(rows, inputs + 72, generator=generator, device="cuda").to(dtype)
            for x in wide[:, :inputs], wide[:, 4 : inputs + 4]:
                expected = x.float() @ weight.t()
                actual = packed(x)
                assert (actual.float() - expected).norm() < 5e-3 * expected.norm(), (
                    rows,
                    x.stride(),
                )
                assert torch.equal(actual, packed(x)), "the same in every run"

    def test_graphs_replay_it(self) -> None:
        packed_class, _ = PackedInt4, torch.manual_seed(0)
        with torch.device("cuda"):
            codes = torch.randint(16, (4096, 512))
            scales, zeros = torch.rand(32, 512).half(), torch.randint(17, (32, 512))
        packed = packed_class.pack(
            lambda a, b: codes[:, a:b], scales, zeros, 4096, 128, torch.bfloat16
        )
        assert packed is not None
        packed.op = loaded(128, 512)
        for rows in (1, 40, 300):
            x = torch.randn(rows, 4096, device="cuda").bfloat16()
            packed(x)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                y = packed(x)
            for _ in range(3):
                x.normal_()
                graph.replay()
                assert torch.equal(y, packed(x))
