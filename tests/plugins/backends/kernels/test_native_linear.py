"""Single linear layers of treadle-kernels-native against torch, on every instruction set."""

from __future__ import annotations

import ctypes
import shutil
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from treadle_kernels_native import library
from treadle_kernels_native.int4 import byte_sums, levels_struct, number_sums, scaled_sums
from treadle_kernels_native.int4 import quantize as quantize_int4
from treadle_kernels_native.structs import Format, InstructionSet, Linear, Model

from treadle_layers_kit.packed_layout import E2M1
from treadle_layers_kit.row_int4 import RowInt4, pack_rows, unpack_rows

# Where there is a compiler, a library that was not built is a failure of the build hook.
if library.missing_reason() is not None and shutil.which("cc") is None:
    pytest.skip(str(library.missing_reason()), allow_module_level=True)

LIBRARY = library.load_library()
SETS = library.instruction_sets(LIBRARY)
ROUNDING = (InstructionSet.AVX512_BF16, InstructionSet.AMX, InstructionSet.I8MM)
"""Those that multiply bf16 by bf16."""


@pytest.fixture(params=[(name, threads) for name in SETS for threads in (1, 3)], ids=str)
def engine(request: pytest.FixtureRequest) -> Iterator[tuple[InstructionSet, int]]:
    """An engine of the library without layers, for single linear layers of up to 1,344 inputs."""
    isa, threads = request.param
    model = Model(hidden=1344, heads=4, kv_heads=2, head_size=64, intermediate=512, page_size=16)
    handle = LIBRARY.tn_create(ctypes.byref(model), threads, isa, 0)
    yield isa, handle
    LIBRARY.tn_destroy(handle)


def product(
    handle: int,
    x: Tensor,
    weight: Tensor,
    form: Format,
    bias: Tensor | None = None,
    *,
    group: int = 0,
    levels: int | None = None,
    **others: Tensor | None,
) -> Tensor:
    pointers = {name: None if t is None else t.data_ptr() for name, t in others.items()}
    n, k = len(weight), x.shape[1]
    linear = Linear(weight=weight.data_ptr(), n=n, k=k, format=form, group=group, **pointers)
    linear.bias = None if bias is None else bias.data_ptr()
    linear.levels = levels
    y = torch.full((len(x), n), torch.nan)
    LIBRARY.tn_multiply(handle, ctypes.byref(linear), x.data_ptr(), len(x), y.data_ptr())
    return y


@pytest.mark.parametrize(("n", "k"), [(1, 32), (48, 96), (100, 512), (160, 64), (300, 1344)])
def test_linear_layers_equal_torch(engine: tuple[InstructionSet, int], n: int, k: int) -> None:
    """One row, few rows, a tile, parts of tiles, and more than a slab of registers, with and without bias.

    The longest rows are multiplied in parts.
    """
    isa, handle = engine
    generator = torch.Generator().manual_seed(n + k)
    weight = torch.randn(n, k, generator=generator) / k**0.5
    bias = torch.randn(n, generator=generator)
    scales = weight.abs().amax(1) / 127
    codes = (weight / scales[:, None]).round().to(torch.int8)
    half = weight.bfloat16()
    for m in (1, 2, 3, 4, 7, 16, 33, 130):
        x = torch.randn(m, k, generator=generator)
        exact = x.double()
        for b in (bias, None):
            added = 0 if b is None else b.double()
            y = product(handle, x, weight, Format.FLOAT32, b)
            torch.testing.assert_close(
                y, (exact @ weight.double().T + added).float(), atol=1e-5, rtol=0
            )
            # From bf16 by bf16 on, what is multiplied is rounded, and sums are not.
            rounded = x.bfloat16().double() if isa in ROUNDING else exact
            y = product(handle, x, half, Format.BFLOAT16, b)
            torch.testing.assert_close(
                y, (rounded @ half.double().T + added).float(), atol=1e-5, rtol=0
            )
            steps = x.abs().amax(1, keepdim=True) / 127
            quantized = (x / steps).round().double() @ codes.double().T * scales * steps + added
            sums = codes.sum(1, dtype=torch.int32)
            y = product(handle, x, codes, Format.INT8, b, scales=scales, sums=sums)
            # A product that lies between two codes may be rounded either way: one code of one input.
            slack = float(steps.max() * scales.max() * 127)
            torch.testing.assert_close(y, quantized.float(), atol=slack, rtol=0)


@pytest.mark.parametrize("group", [16, 32, 64, 128, 256])
def test_sums_of_codes_of_four_bits(group: int) -> None:
    codes = torch.arange(256, dtype=torch.uint8).repeat(3, 2)  # every byte
    codes[1], codes[2] = 0x77, 0x88  # the largest sums and the least
    expected = unpack_rows(codes).unflatten(1, (-1, group)).sum(2)
    assert torch.equal(number_sums(codes, group), expected)


@pytest.mark.parametrize("offsets", [False, True], ids=["symmetric", "zero points"])
@pytest.mark.parametrize(("n", "k"), [(1, 128), (49, 384), (100, 512)])
def test_four_bits_equal_torch(
    engine: tuple[InstructionSet, int], n: int, k: int, offsets: bool
) -> None:
    """Groups of several sizes, rows and columns that no block of registers divides, signs of both kinds.

    Few rows are rounded to eight bits. For more the weights are unpacked, and rounded to bfloat16.
    """
    isa, handle = engine
    torch.manual_seed(n + k)
    bias = torch.randn(n)
    for group in (64, 128, k):
        codes, _ = quantize_int4(torch.randn(n, k))
        scales = torch.randn(n, k // group).half().float()
        zeros = torch.randint(-8, 9, scales.shape) * scales if offsets else None
        exact = unpack_rows(codes).double() * scales.repeat_interleave(group, 1)
        if zeros is not None:
            exact += zeros.repeat_interleave(group, 1)
        sums = scaled_sums(codes, scales)
        others = {"scales": scales, "offsets": zeros, "sums": sums}
        for m in (1, 3, 4, 5, 16, 24, 50, 130):
            x = torch.randn(m, k)
            tiles = isa == InstructionSet.AMX and n >= 32
            if m >= (8 if tiles else 24 if isa == InstructionSet.AVX512 else 1000):
                rounded = x.bfloat16().double() if tiles else x.double()
                weight, slack = exact.bfloat16().double(), 1e-3
            else:
                steps = x.abs().amax(1, keepdim=True) / 127
                rounded, weight = (x / steps).round().double() * steps, exact
                # One code of one input, which may be rounded either way; and what float32 loses of sums.
                slack = float(steps.max() * exact.abs().max()) + 1e-3
            for b in (bias, None):
                y = product(handle, x, codes, Format.INT4, b, group=group, **others)
                expected = rounded @ weight.T + (0 if b is None else b)
                torch.testing.assert_close(y, expected.float(), atol=slack, rtol=0)
            # The features of x come in another order.
            order = torch.randperm(k)
            places = {"order": torch.argsort(order).int(), **others}
            z = product(handle, x[:, order].contiguous(), codes, Format.INT4, group=group, **places)
            assert torch.equal(z, y)


NF4 = (-1.0, -0.6962, -0.5251, -0.3949, -0.2844, -0.1848, -0.0911, 0.0)
QUANTILES = (*NF4, 0.0796, 0.1609, 0.2461, 0.3379, 0.4407, 0.5626, 0.723, 1.0)


@pytest.mark.parametrize("offsets", [False, True], ids=["no offsets", "offsets"])
@pytest.mark.parametrize(("n", "k", "group"), [(1, 128, 32), (49, 384, 64), (100, 512, 128)])
@pytest.mark.parametrize("levels", [E2M1, QUANTILES, tuple(range(16))], ids=["FP4", "NF4", "whole"])
def test_levels_of_four_bits_equal_torch(
    engine: tuple[InstructionSet, int],
    levels: tuple[float, ...],
    n: int,
    k: int,
    group: int,
    offsets: bool,
) -> None:
    """Few rows multiply whole numbers: levels are rounded to 127ths of the largest, if they are not halves."""
    isa, handle = engine
    torch.manual_seed(n + k)
    found, scales = torch.randint(0, 16, (n, k)), torch.randn(n, k // group)
    added, bias = torch.randn(scales.shape) if offsets else None, torch.randn(n)
    codes, struct = pack_rows(found), levels_struct(levels)
    rounded = torch.tensor(list(struct.multiples)).double() * struct.unit
    if levels is not QUANTILES:
        assert rounded.tolist() == list(levels)
    sums = scaled_sums(codes, scales, struct.multiples) * struct.unit
    others = {"scales": scales, "offsets": added, "sums": sums}
    linear = {"form": Format.INT4, "group": group, "levels": ctypes.addressof(struct)}
    for m in (1, 3, 4, 6, 16, 24, 50):
        x = torch.randn(m, k)
        tiles = isa == InstructionSet.AMX and n >= 32
        steps = x.abs().amax(1, keepdim=True) / 127
        whole = m < (8 if tiles else 24 if isa == InstructionSet.AVX512 else 1000)
        weight = (rounded if whole else torch.tensor(levels).double())[found]
        weight = weight * scales.repeat_interleave(group, 1)
        if added is not None:
            weight += added.repeat_interleave(group, 1)
        slack = float(steps.max() * weight.abs().max()) + 2e-3 if whole else 2e-3
        if whole:
            left = (x / steps).round().double() * steps
        else:
            left, weight = (x.bfloat16() if tiles else x).double(), weight.bfloat16().double()
        y = product(handle, x, codes, bias=bias, **linear, **others)  # type: ignore[arg-type]
        torch.testing.assert_close(y, (left @ weight.T + bias).float(), atol=slack, rtol=0)


@pytest.mark.parametrize("form", [Format.GROUPED_INT8, Format.GROUPED_FP8])
@pytest.mark.parametrize(
    ("n", "k", "group"), [(1, 96, 16), (49, 384, 32), (33, 192, 96), (100, 512, 128)]
)
def test_bytes_in_groups_equal_torch(
    engine: tuple[InstructionSet, int], n: int, k: int, group: int, form: Format
) -> None:
    """With sums of codes, few rows are rounded to eight bits where registers hold whole groups; else weights are unpacked."""
    isa, handle = engine
    torch.manual_seed(n + k)
    dtype = torch.int8 if form == Format.GROUPED_INT8 else torch.float8_e4m3fn
    codes, bias = (torch.randn(n, k) * 40).to(dtype), torch.randn(n)
    scales, order = torch.rand(n, k // group) / 40, torch.randperm(k)
    offsets = torch.randn(scales.shape) / 4
    exact = (
        codes.double().unflatten(1, (-1, group)) * scales[..., None] + offsets[..., None]
    ).flatten(1)
    others = {"scales": scales, "offsets": offsets, "order": order.int()}
    rounds = form == Format.GROUPED_INT8 and group != 96
    for sums in (byte_sums(codes, scales), None) if rounds else (None,):
        for m in (1, 3, 5, 7, 16, 24, 50, 130):
            x = torch.randn(m, k)
            tiles = isa == InstructionSet.AMX and n >= 32
            from_rows = 8 if tiles else 24 if isa == InstructionSet.AVX512 else 1000
            if sums is not None and m < from_rows:
                steps = x.abs().amax(1, keepdim=True) / 127
                rounded, weight = (x / steps).round().double() * steps, exact
                slack = float(steps.max() * exact.abs().max()) + 1e-3
            else:
                halves = isa in ROUNDING
                rounded = x.bfloat16().double() if halves else x.double()
                weight, slack = exact.bfloat16().double(), 2e-2
            y = product(handle, x, codes, form, bias, group=group, sums=sums, **others)
            expected = rounded[:, order] @ weight.T + bias
            torch.testing.assert_close(y, expected.float(), atol=slack, rtol=0)
            if m <= 7:
                alone = [
                    product(handle, r[None], codes, form, bias, group=group, sums=sums, **others)
                    for r in x
                ]
                if sums is not None or not tiles:
                    assert torch.equal(torch.cat(alone), y)


def test_four_bits_are_near_and_zeros_stay_zero() -> None:
    torch.manual_seed(0)
    weight = torch.randn(300, 128)
    weight[5] = 0
    codes, scales = quantize_int4(weight)
    assert (codes.dtype, codes.shape, scales.shape) == (torch.uint8, (300, 64), (300, 2))
    restored = RowInt4(codes, scales).dense(torch.float32)
    assert not restored[5].any()
    # Half a step, a whole one where the largest of the other sign has no code of its own.
    steps = scales.abs().repeat_interleave(64, 1)
    assert torch.all((restored - weight).abs() <= steps * 1.0001)


def test_rows_do_not_depend_on_other_rows(engine: tuple[InstructionSet, int]) -> None:
    """In float32 they are equal bit by bit, however many are computed together."""
    _, handle = engine
    x, weight = torch.randn(67, 96), torch.randn(70, 96)
    together = product(handle, x, weight, Format.FLOAT32)
    for first, last in ((0, 1), (5, 8), (20, 66)):
        alone = product(handle, x[first:last].clone(), weight, Format.FLOAT32)
        assert torch.equal(alone, together[first:last])


def test_rows_in_an_order_do_not_depend_on_other_rows(engine: tuple[InstructionSet, int]) -> None:
    """In four bits, as many as are rounded to eight."""
    _, handle = engine
    x, (codes, scales), order = (
        torch.randn(7, 256),
        quantize_int4(torch.randn(70, 256)),
        torch.randperm(256),
    )
    others = {"scales": scales, "sums": scaled_sums(codes, scales), "order": order.int()}
    together = product(handle, x, codes, Format.INT4, group=64, **others)
    for first, last in ((0, 1), (2, 4), (1, 7)):
        alone = product(handle, x[first:last].clone(), codes, Format.INT4, group=64, **others)
        assert torch.equal(alone, together[first:last])
