"""The kernels of packed weights: Triton's interpreter against the plain product, their code, and a CUDA device.

Triton reads TRITON_INTERPRET when a kernel is defined, so kernels run in processes of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import islice
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from quantized_formats.packed import cases
from quantized_formats.ptx import execute
from torch import nn

from treadle_layers_kit.int4 import PackedInt4
from treadle_layers_kit.packed_experts import PackedExperts, as_packed, packed_experts
from treadle_layers_kit.packed_layout import (
    E2M1,
    FP8,
    INT8,
    pack_words,
    packed_linear,
    run_of,
    unpack,
)

pytest.importorskip("triton")

NUM_CASES = sum(1 for _ in cases("cpu", 2, 128))
CARD = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
EQUAL = """
    import torch
    from quantized_formats.packed import cases
    from treadle_kernels_triton.packed import kernel
    from treadle_kernels_triton.packed.self_check import check_kernels
    from treadle_kernels_triton.packed.tiles import tile_of
    from treadle_kernels_triton.packed.unpack import unpack as unpacked
    from treadle_layers_kit.packed_layout import unpack

    counters = torch.zeros(64, dtype=torch.int32)
    # Of every kind of steps one kind of codes: in the interpreter a kernel takes long.
    for index, (weight, group) in enumerate((given := list(cases("cpu", 24, 192)))[::3] + given[4:5]):
        dtype = (torch.bfloat16, torch.float16)[index % 2]
        limit = 8e-3 if index % 2 == 0 else 1e-3
        dense = unpack(*weight, 192, group)
        found = unpacked(*weight, 192, group, dtype).float()
        assert (found - dense).norm() < limit * dense.norm(), (index, "unpacked")
        x = torch.randn(3, 2, 192).to(dtype)[:, 1]  # rows are not side by side
        y = kernel.multiply(x, *weight, group, tile_of(3), counters, index % 3 * 4 + 1).float()
        want = x.float() @ dense.t()
        assert y.shape == want.shape and (y - want).norm() < limit * want.norm(), (index, y, want)
        assert not counters.any()
    from treadle_kernels_triton.packed.experts import PackedExperts
    from treadle_layers_kit.packed_experts import packed_experts

    weights = [c for c in cases("cpu", 24, 192) if c[1] == 64][1:2]
    for weight, group in weights:
        # Experts differ in their factors alone; one is chosen by nobody.
        stacked = [None if t is None else torch.stack([t] * 4) for t in weight[:4]]
        stacked[3] = torch.arange(1, 5).float()[:, None].repeat(1, 24)
        for tokens in 1, 9:
            ids = torch.rand(tokens, 3).topk(2).indices
            for x in torch.randn(tokens, 192), torch.randn(2 * tokens, 192):
                for bias in None, torch.randn(4, 24):
                    half = None if bias is None else bias.half()
                    y = PackedExperts(torch.float16)(x.half(), ids, *stacked, weight[4], 192, group, half)
                    want = packed_experts(x, ids, *stacked, weight[4], 192, group, bias)
                    assert y.shape == (2 * tokens, 24) and (y - want).norm() < 1e-3 * want.norm()
    from treadle_kernels_triton.packed.reorder import reorder_experts
    from treadle_layers_kit import packed_order

    order = torch.stack([torch.randperm(1100) for _ in range(4)]).int()  # beyond one block, and the inputs
    for tokens, rows in (1, 1), (9, 9), (9, 18):
        ids, x = torch.rand(tokens, 4).topk(2).indices, torch.randn(rows, 2, 1090).half()[:, 1]
        assert torch.equal(reorder_experts(x, ids, order), packed_order.reorder_experts(x, ids, order))
    assert reorder_experts(x[:0], ids[:0], order).shape == (0, 1100)
    from treadle_kernels_triton.packed import self_check

    cpu, self_check.OUT_FEATURES, self_check.IN_FEATURES = torch.device("cpu"), 32, 64
    assert check_kernels(8, torch.bfloat16, cpu)
    multiply = kernel.multiply
    kernel.multiply = lambda *given, **named: 1.1 * multiply(*given, **named)
    assert not check_kernels(4, torch.bfloat16, cpu), "results that are wrong are noticed"
"""


def test_interpreted_kernels_equal_the_plain_product(in_process: Callable[..., None]) -> None:
    in_process(EQUAL, interpret=True)


@pytest.mark.parametrize("levels", [E2M1, INT8, FP8])
def test_packed_words_are_the_codes_again(levels: tuple[float, ...] | str) -> None:
    codes = torch.arange(256, dtype=torch.uint8).repeat(3, 1)
    codes = codes % 120 if isinstance(levels, str) else codes % 16
    words = pack_words(codes, levels, 16)
    found = unpack(words, None, None, None, levels, 256, 256)
    if isinstance(levels, str):
        assert torch.equal(found, codes.view(getattr(torch, levels)).float())
    else:
        assert torch.equal(found, torch.tensor(levels)[codes.int()])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_levels_that_count_up_need_no_table(dtype: torch.dtype) -> None:
    """What the assembly makes of all words."""
    from treadle_kernels_triton.lookup import assembly

    words = torch.arange(1 << 16)
    for first in (0.0, -2.0, -8.0, -16.0):
        levels = tuple(first + code for code in range(16))
        code = assembly(levels, dtype)
        assert "prmt" not in code
        places = execute(code, [words.to(torch.int16).view(torch.int32)])
        for place, numbers in enumerate(places):
            expected = torch.tensor(levels)[words >> 4 * place & 15]
            assert torch.equal(numbers.view(dtype).float(), expected)
    for levels in E2M1, tuple(first / 2 for first in range(16)):
        assert "prmt" in assembly(levels, dtype)


def test_runs_lie_in_groups() -> None:
    assert [run_of(E2M1, n) for n in (8, 16, 32, 96, 128)] == [None, 16, 32, 32, 32]
    assert [run_of(INT8, n) for n in (24, 16, 32, 64, 128)] == [None, 16, 32, 64, 64]


def test_experts_of_both_layouts_are_stacked() -> None:
    codes = torch.randint(16, (3, 256, 40))
    scales, zeros = torch.rand(3, 2, 40).half(), torch.randint(17, (3, 2, 40))

    def expert(index: int, dtype: torch.dtype, zero: int = 0) -> nn.Module:
        linear = nn.Module()
        packed = PackedInt4.pack(
            lambda begin, end: codes[index, :, begin:end],
            scales[index], zeros[index] * zero, 256, 128, dtype,
        )  # fmt: skip
        linear.add_module("int4", packed)
        return linear

    for dtype in torch.bfloat16, torch.float16:
        stacked = PackedExperts.stack((as_packed(expert(i, dtype, 1), dtype) for i in range(3)), 3)
        assert stacked is not None
        x, ids = torch.randn(4, 256), torch.tensor([[0, 2], [1, 0], [2, 1], [0, 1]])
        y = stacked(x, ids).unflatten(0, (4, 2))
        for token, chosen in enumerate(ids.tolist()):
            for place, index in enumerate(chosen):
                steps = (t[index].float().repeat_interleave(128, 0) for t in (zeros, scales))
                zero, scale = steps
                want = x[token] @ ((codes[index] - zero) * scale)
                assert torch.allclose(y[token, place], want, atol=1e-3, rtol=1e-3)
    assert as_packed(nn.Linear(2, 2), torch.float16) is None
    other = PackedExperts.stack([as_packed(expert(0, torch.float16), torch.float16), None], 2)
    assert other is None, "one is not packed"


def test_tiles_fit_their_rows() -> None:
    from treadle_kernels_triton.packed.tiles import (
        choose_experts_tile,
        choose_packed_tile,
        max_rows,
    )

    assert max_rows(INT8, has_offsets=False, has_scales=True) == 64
    assert choose_packed_tile(65, INT8, has_offsets=False, has_scales=True) is None
    for levels, has_offsets, last in ((E2M1, False, 128), (E2M1, True, 64), (FP8, False, 256)):
        assert max_rows(levels, has_offsets=has_offsets) == last
        for folds in {False, levels == E2M1 and not has_offsets}:
            last = 256 if folds else last
            rows = range(last + 2)
            tiles = [
                choose_packed_tile(n, levels, has_offsets=has_offsets, folds=folds) for n in rows
            ]
            assert tiles[0] is None and tiles[-1] is None
            for n, tile in enumerate(tiles[1:-1], 1):
                assert tile is not None and (n <= tile.block_m or n > 64)
    for choices in 4, 128, 1024, 4096, 32768:
        for folds in True, False:
            tile = choose_experts_tile(choices, 32, folds=folds)
            assert tile.block_m == 128 or choices <= 32 * tile.block_m


@pytest.mark.gpu
@pytest.mark.skipif(CARD is None or CARD < (8, 9), reason="needs a CUDA device that knows FP8")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("index", range(NUM_CASES))
def test_kernels_equal_the_plain_product(index: int, dtype: torch.dtype) -> None:
    from treadle_kernels_triton.packed.linear import PackedLinear

    limit = 8e-3 if dtype is torch.bfloat16 else 1e-3
    weight, group = next(islice(cases("cuda", 328, 1280), index, None))
    op = PackedLinear(dtype)
    dense = unpack(*weight, 1280, group)
    for rows in (1, 12, 30, 50, 100, 261):
        x = torch.randn(rows, 1280, device="cuda").to(dtype)
        want = F.linear(x.float(), dense)
        y = op(x, *weight, 1280, group)
        error = float((y.float() - want).norm() / want.norm())
        assert error < limit, (rows, weight[4], group, error)
    assert torch.equal(op(x, *weight, 1280, group), y), "every run has the same numbers"
    other = packed_linear(x.float(), *weight, 1280, group)
    assert torch.allclose(op(x.float(), *weight, 1280, group), other)


def test_offsets_without_scales_are_not_hoppers(monkeypatch: pytest.MonkeyPatch) -> None:
    from treadle_kernels_triton.packed import linear

    calls: list[str] = []

    def multiply(name: str, *arguments: Any) -> torch.Tensor:
        calls.append(name)
        return torch.zeros(20, 64)

    monkeypatch.setattr(linear.packed_product, "multiply", partial(multiply, "hopper"))
    monkeypatch.setattr(linear.kernel, "multiply", partial(multiply, "triton"))
    op = linear.PackedLinear(torch.bfloat16, use_hopper=True)
    codes, steps = torch.zeros(1, 64, 32, dtype=torch.int16), torch.zeros(1, 64).half()
    for scales, offsets in (steps, None), (steps, steps), (None, None), (None, steps):
        op(torch.zeros(20, 128).bfloat16(), codes, scales, offsets, None, E2M1, 128, 128)
    assert calls == ["hopper", "hopper", "hopper", "triton"]


@pytest.mark.gpu
@pytest.mark.skipif(CARD is None or CARD < (8, 0), reason="needs a CUDA device")
def test_kernels_reorder_experts() -> None:
    from treadle_kernels_triton.packed.reorder import reorder_experts

    from treadle_layers_kit import packed_order

    order = torch.stack([torch.randperm(2064) for _ in range(9)]).int().cuda()
    for tokens in (1, 40, 700):
        ids = torch.rand(tokens, 9, device="cuda").topk(3).indices
        for x in torch.randn(tokens, 2048), torch.randn(3 * tokens, 2048):
            x = x.cuda().bfloat16()
            want = packed_order.reorder_experts(x, ids, order)
            assert torch.equal(reorder_experts(x, ids, order, use_pdl=CARD >= (9, 0)), want)


@pytest.mark.gpu
@pytest.mark.skipif(CARD is None or CARD < (8, 9), reason="needs a CUDA device that knows FP8")
@pytest.mark.parametrize("index", range(NUM_CASES))
def test_kernels_of_experts_equal_the_plain_product(index: int) -> None:
    from treadle_kernels_triton.packed.experts import PackedExperts as Operation

    weight, group = next(islice(cases("cuda", 328, 640), index, None))
    stacked: list[Any] = [None if t is None else torch.stack([t] * 9) for t in weight[:4]]
    stacked[3] = torch.arange(1, 10, device="cuda").float()[:, None].repeat(1, 328)
    op = Operation(torch.bfloat16)
    for tokens in (1, 40, 700):
        ids = torch.rand(tokens, 8, device="cuda").topk(3).indices
        for x in torch.randn(tokens, 640), torch.randn(3 * tokens, 640):
            x = x.cuda().bfloat16()
            arguments: tuple[Any, ...] = (ids, *stacked, weight[4], 640, group)
            y = op(x, *arguments).float()
            want = packed_experts(x.float(), *arguments)
            error = float((y - want).norm() / want.norm())
            assert error < 8e-3, (tokens, len(x), weight[4], group, error)
