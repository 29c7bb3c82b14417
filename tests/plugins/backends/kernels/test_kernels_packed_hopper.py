"""Hopper's kernel of packed weights: what it serves, its arithmetic, its code; on a card, its results."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from itertools import islice
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from quantized_formats.packed import cases
from quantized_formats.ptx import execute
from torch import Tensor

pytest.importorskip("triton.experimental.gluon")

from treadle_kernels_triton.hopper import (
    packed_fragments,
    packed_kernel,
    packed_product,
    split_tiles,
)

from treadle_layers_kit.int4_layout import pack_codes, pack_steps
from treadle_layers_kit.int4_layout import unpack as unpack_int4
from treadle_layers_kit.packed_layout import E2M1, INT8, Levels, unpack

HOPPER = (9, 0)
KINDS = {torch.bfloat16: "bf16", torch.float16: "fp16"}
INT4 = packed_product.biased_levels(torch.bfloat16)
Weight = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Levels]
NUM_CASES = sum(1 for _ in cases("cpu", 2, 128))
INT4_GROUPS = (32, 64, 128, 256)
COMPILED = (3, 4, 5, 9, 14, 17, NUM_CASES, NUM_CASES + 2)
"""One of each kind."""


def int4(
    device: str, out: int, inputs: int, group: int, dtype: torch.dtype
) -> tuple[Weight, Tensor]:
    """A weight of ``int4_linear``, and its numbers in float32."""
    with torch.device(device):
        codes, shape = torch.randint(16, (inputs, out)), (inputs // group, out)
        scales, zeros = torch.rand(shape).half() / 50, torch.randint(17, shape)
    words, steps = pack_codes(codes), pack_steps(scales, zeros, dtype)
    levels = packed_product.biased_levels(dtype)
    numbers = unpack_int4(words, steps, inputs, group, dtype)
    return (words, steps, None, None, levels), numbers.float()


def weight_of(
    index: int, device: str, out: int, inputs: int, dtype: torch.dtype
) -> tuple[Weight, int, Tensor]:
    """One of all kinds, its group, and its numbers in float32."""
    if index < NUM_CASES:
        weight, group = next(islice(cases(device, out, inputs), index, None))
        return weight, group, unpack(*weight, inputs, group)
    group = INT4_GROUPS[index - NUM_CASES]
    packed, numbers = int4(device, out, inputs, group, dtype)
    return packed, group, numbers


def test_what_it_serves() -> None:
    sizes = {"in_features": 4096, "out_features": 192, "group": 128}
    assert packed_product.supports(HOPPER, sizes)
    for capability in (8, 0), (10, 0), None:
        assert not packed_product.supports(capability, sizes)
    for group in (16, 32, 64, 384):
        assert packed_product.supports(HOPPER, {**sizes, "group": group})
    for other in {"out_features": 72}, {"in_features": 4100}, {"group": 48}, {"group": 192}:
        assert not packed_product.supports(HOPPER, sizes | other)


@pytest.mark.parametrize(
    ("rows", "tiles"),
    [
        (0, None), (16, None), (17, 32), (33, 64), (64, 64), (65, 128), (128, 128), (129, (128, 128, 256, 256)), (256, (128, 128, 256, 256)),
        (257, (128, 128, 128, 128)), (512, (128, 128, 256, 256)), (768, 256), (2048, 256), (2049, None),
    ],
)  # fmt: skip
def test_the_rule_gives_what_was_measured(rows: int, tiles: Any) -> None:
    shapes = ((4096, 6144), (4096, 4096), (4096, 24576), (12288, 4096))  # in, out: of Qwen3-8B
    expected_rows = tiles if isinstance(tiles, tuple) else (tiles,) * 4
    for shape, expected in zip(shapes, expected_rows, strict=True):
        assert packed_product.choose_block_m(rows, *shape, E2M1, torch.uint8) == expected
        if 128 < rows <= 256:
            assert packed_product.choose_block_m(rows, *shape, INT8, torch.float16) == 128
            assert packed_product.choose_block_m(rows, *shape, INT4, torch.int32) == 128
    assert packed_product.choose_block_m(32, 4096, 4096, INT8, None) is None
    assert packed_product.choose_block_m(33, 4096, 4096, INT8, None) == 64


def test_stages_fit_into_shared_memory() -> None:
    assert [packed_product.num_slots(n, 4, 4) for n in packed_product.BLOCKS] == [10, 9, 5, 3]
    assert [packed_product.num_slots(n, 8, 32) for n in packed_product.BLOCKS] == [7, 6, 4, 2]


# ------------------------------------------------------------------------------ arithmetic


class Bits(Tensor):
    """For ``x.to(kind, bitcast=True)``."""

    def to(self, kind: Any, bitcast: bool = False) -> Tensor:  # type: ignore[override]
        kind = getattr(kind, "dtype", kind)
        return (self.view(kind) if bitcast else super().to(kind)).as_subclass(Bits)


class Memory:
    """Shared memory: what ``loaded`` gives for the n-th buffer."""

    def __init__(self, loaded: Callable[[int], Tensor]) -> None:
        self.loaded = loaded

    def index(self, n: int) -> Any:
        return SimpleNamespace(load=lambda layout: self.loaded(n).as_subclass(Bits))


def on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let torch do what the device's language does in the fragments."""

    def assembly(text: Any, form: str, inputs: list[Tensor], *more: Any, **named: Any) -> Any:
        given = [x.as_subclass(Tensor) for x in inputs]
        given = [x.view(torch.int32) if x.dtype is torch.float32 else x for x in given]
        results = [x.as_subclass(Bits) for x in execute(getattr(text, "value", text), given)]
        return results if len(results) > 1 else results[0]

    device = SimpleNamespace(
        inline_asm_elementwise=assembly,
        join=lambda a, b: torch.stack((a, b), -1),
        permute=lambda x, order: x.permute(order),
        reshape=lambda x, shape: x.reshape(shape),
        convert_layout=lambda x, layout, assert_trivial: x,
        SliceLayout=lambda dim, layout: None,
        constexpr=None,
        int16=torch.int16, int32=torch.int32, float32=torch.float32, float16=torch.float16, float8e4nv=torch.float8_e4m3fn,
    )  # fmt: skip
    monkeypatch.setattr(packed_fragments, "gl", device)
    monkeypatch.setattr(split_tiles, "gl", device)
    monkeypatch.setattr(packed_fragments, "split_pair", split_tiles.split_pair.fn)
    for name in ("pairs_layout", "memory_layout"):
        monkeypatch.setattr(packed_fragments, name, lambda run: None)
    for name, function in vars(packed_fragments).copy().items():
        if hasattr(function, "fn") and name != "split_pair":
            monkeypatch.setattr(packed_fragments, name, function.fn)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("index", range(NUM_CASES + len(INT4_GROUPS)))
def test_words_become_the_fragments_of_the_weight(
    index: int, kind: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel's own functions, its assembly among them, on memory as it is fetched."""
    inputs, outputs = 512, 192
    (codes, scales, offsets, factors, levels), group, numbers = weight_of(
        index, "cpu", outputs, inputs, kind
    )
    made_for = packed_product.weight_format(codes, scales, offsets, None, levels, group, kind)
    on_the_host(monkeypatch)
    kinds = SimpleNamespace(is_bf16=lambda: kind is torch.bfloat16, dtype=kind)
    rows = codes.view(torch.int32).view(-1, 32)  # as TMA sees it
    found = torch.empty(outputs, inputs)
    for stage in range(inputs // 128):
        for n in range(0, outputs, 64):

            def words(piece: int, stage: int = stage, n: int = n) -> Tensor:
                row = ((stage * made_for.chunks + piece // 2) * outputs + n) * made_for.run // 64
                return rows[row : row + made_for.run]

            def steps(tensor: Tensor, row: int, stage: int = stage, n: int = n) -> Tensor:
                first = stage // made_for.stages_per_group * made_for.steps
                piece = tensor[first + row // 2, n : n + 64]
                return piece.view(torch.uint8) if piece.itemsize == 1 else piece

            memory = [
                Memory(words),
                *(Memory(lambda row, t=t: steps(t, row)) for t in (scales, offsets)),
            ]
            for half in range(2):
                fetched = packed_fragments.fetch_half(*memory, 0, half, 0, made_for, kinds)
                made = packed_fragments.make_half(fetched, half, made_for, kinds, None)
                k = stage * 128 + half * 64
                found[n : n + 64, k : k + 64] = made.as_subclass(Tensor).float()
    found *= made_for.power or 1
    found = found if factors is None else found * factors[:, None]
    limit = 8e-3 if kind is torch.bfloat16 else 1e-3
    assert (found - numbers).abs().max() <= limit * numbers.abs().max()
    if scales is None or (made_for.scales in ("exponent", "fp8") and made_for.power):
        assert torch.equal(found, numbers), "no scale is rounded"


# ------------------------------------------------------------------------------ code


def compile_kernel(
    for_hopper: Callable[..., str], index: int, block_m: int, kind: torch.dtype
) -> str:
    weight, group, _ = weight_of(index, "cpu", 192, 512, kind)
    made_for = packed_product.weight_format(*weight, group, kind)
    name = {torch.uint8: "u8", torch.float8_e4m3fn: "u8", torch.int32: "i32", torch.float32: "fp32", torch.float16: "fp16"}  # fmt: skip

    def box(type: str, shape: list[int], swizzle: int, bits: int) -> str:
        return f"tensordesc<{type}{shape},{packed_product.smem_layout(swizzle, bits)!r}>"

    def steps(tensor: Tensor | None) -> str:
        if tensor is None:
            return box(KINDS[kind], [1, 128], 0, 16)
        return box(name[tensor.dtype], [made_for.steps, 128], 0, 8 * tensor.itemsize)

    types = {
        "x_desc": box(KINDS[kind], [block_m, 64], 128, 16),
        "codes_desc": box("i32", [2 * made_for.run, 32], 128, 32),
        "scales_desc": steps(weight[1]), "offsets_desc": steps(weight[2]),
        "factors": "*fp32", "out": f"*{KINDS[kind]}", "partials": "*fp32", "tile_counters": "*i32",
    }  # fmt: skip
    step_bytes = made_for.steps * sum(t.itemsize for t in weight[1:3] if t is not None)
    slots = packed_product.num_slots(block_m, 16 // made_for.places, step_bytes)
    fields = (
        "ASM", "PLACES", "RUN", "GROUP", "SCALE_KIND", "OFFSET_KIND", "HAS_FACTORS", "POWER"
    )  # fmt: skip
    constants = {
        **dict(zip(fields, dataclasses.astuple(made_for), strict=True)),
        "BLOCK_M": block_m,
        "NUM_SLOTS": slots,
    }
    aligned = ("factors", "out", "partials", "tile_counters", "N")
    options = {"num_warps": packed_kernel.WARPS, "maxnreg": packed_kernel.REGISTERS}
    # Two steps for each 16 bytes are more than registers hold; no format has them.
    spills = 128 if made_for.places == 2 and made_for.run == 16 else 0
    return for_hopper(
        packed_kernel.packed_hopper_kernel, constants, types, aligned, spills=spills, **options
    )


@pytest.mark.parametrize("block_m", packed_product.BLOCKS)
@pytest.mark.parametrize("index", COMPILED)
def test_it_compiles_without_spills(
    index: int, block_m: int, for_hopper: Callable[..., str]
) -> None:
    ptx = compile_kernel(for_hopper, index, block_m, torch.bfloat16)
    assert ptx.count("wgmma.mma_async") == 16


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("block_m", packed_product.BLOCKS)
@pytest.mark.parametrize("index", range(NUM_CASES + len(INT4_GROUPS)))
def test_all_of_it_compiles_without_spills(
    index: int, block_m: int, kind: torch.dtype, for_hopper: Callable[..., str]
) -> None:
    assert "wgmma" in compile_kernel(for_hopper, index, block_m, kind)


# ------------------------------------------------------------------------------ on a card


@pytest.mark.gpu
@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("index", range(NUM_CASES + len(INT4_GROUPS)))
class TestOnHopper:
    def test_results(self, index: int, kind: torch.dtype) -> None:
        for inputs, outputs in ((1280, 320), (1536, 1088)):
            weight, group, numbers = weight_of(index, "cuda", outputs, inputs, kind)
            counters = torch.zeros(4 * 132, dtype=torch.int32, device="cuda")
            for block_m in packed_product.BLOCKS:
                for rows, programs in ((block_m - 3, 132), (2 * block_m + 1, 7), (700, 132)):
                    wide = torch.randn(rows, inputs + 72, device="cuda").to(kind)
                    for x in wide[:, :inputs], wide[:, 4 : inputs + 4]:
                        arguments = (x, *weight, group, block_m, counters, programs)
                        y = packed_product.multiply(*arguments)
                        want = x.float() @ numbers.t()
                        limit = 8e-3 if kind is torch.bfloat16 else 1e-3
                        assert (y.float() - want).norm() < limit * want.norm(), (rows, block_m)
                        assert torch.equal(y, packed_product.multiply(*arguments)), (
                            "every run is the same"
                        )
                    assert not counters.any()
