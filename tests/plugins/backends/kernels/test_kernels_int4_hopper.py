"""Four-bit weights on Hopper: how tiles are shared, what is tried where; on a card, results.

The kernel itself, which is that of all packed weights, has ``test_kernels_packed_hopper``.
"""

from __future__ import annotations

import logging
import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton.experimental.gluon")

import treadle_kernels_triton
from treadle_kernels_triton.hopper import packed_product, split_tiles
from treadle_kernels_triton.hopper.stream_k import StreamKSchedule, schedule_stream_k
from treadle_kernels_triton.int4 import linear, self_check

from treadle.api.cache import DeviceInfo
from treadle.api.types import KernelOffer, KernelRequest
from treadle_layers_kit.int4 import PackedInt4
from treadle_layers_kit.int4_layout import unpack

HOPPER = (9, 0)
SHAPES = ((4096, 6144), (4096, 4096), (4096, 24576), (12288, 4096))  # in, out: of Qwen3-8B
KINDS = {torch.bfloat16: "bf16", torch.float16: "fp16"}


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
        monkeypatch.setattr(split_tiles, "gl", device)
        bounds = split_tiles.segments.fn(
            schedule.num_split_tiles, schedule.chunks_per_program, chunks, schedule.num_waves
        )
        begin, end, touched, count = bounds
        assert count >= 1, "the first stage is taken without asking"
        total = 0
        for n in range(count):
            tile, first, last = split_tiles.segment.fn(
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
            levels = packed_product.biased_levels(torch.bfloat16)
            block_m = packed_product.choose_block_m(rows, inputs, outputs, levels, torch.int32)
            assert block_m is not None
            tiles, chunks = -(-rows // block_m) * outputs // 128, inputs // 128
            schedule = schedule_stream_k(tiles, chunks, 132)
            longest = schedule.num_waves * chunks + schedule.chunks_per_program
            assert longest <= 1.5 * -(-tiles * chunks // 132) + 2


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
    assert trials == [
        ("hopper", kind, 128),
        ("triton with hopper", kind, 128),
        ("unpack", kind, 128),
    ]
    trials.clear()
    failing = {"hopper"}
    op = loaded()
    assert not op.use_hopper and op.use_small_m and op.use_unpack
    assert trials == [("hopper", kind, 128), ("triton", kind, 128), ("unpack", kind, 128)]
    trials.clear()
    failing = {"triton with hopper"}
    op = loaded()
    assert op.use_hopper and not op.use_small_m and op.use_unpack and len(trials) == 3
    trials.clear()
    assert loaded(group=64).use_hopper and {trial[2] for trial in trials} == {32}
    for changes in {"group": 96}, {"outputs": 72}, {"capability": (8, 0)}:
        trials.clear()
        op = loaded(**changes)
        assert not op.use_hopper and op.use_small_m and trials[0][:2] == ("triton", kind)
        assert trials[0][2] == (32 if "group" in changes else 128)


@pytest.mark.gpu
@pytest.mark.usefixtures("on_hopper")
class TestOnHopper:
    @pytest.mark.parametrize("dtype", KINDS)
    @pytest.mark.parametrize("group", [32, 128, 256])
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
            assert self_check.kernel_works("hopper", dtype, 128 if group % 128 == 0 else 32)
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
