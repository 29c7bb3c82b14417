"""Kernels around FP8 products: rounding activations, and products of few rows.

cuBLAS multiplies FP8 matrices with a scale for each row in tiles of 128 rows, however few there are. Here
the weight is the left side of the product and the activations, 16 to 128 columns wide, the right one,
and programs share the inputs of an output where there are too few outputs to fill the device.
"""

# Kernels are compiled from their source: their arguments are pointers and constants without types.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from treadle_fp8.rounding import FP8
from treadle_fp8.tiles import BLOCK, Tile
from treadle_triton_kit.pdl import launch_dependents, wait_for_previous_kernel

__all__ = (
    "finish_kernel",
    "multiply",
    "quantize_kernel",
    "quantize_per_block",
    "quantize_per_row",
    "scaled_mm_kernel",
)


@triton.jit
def quantize_kernel(
    x,  # [rows, SIZE], or [rows, 2 * SIZE] if GATED; rows stride elements apart
    given,  # float32 [1] if GIVEN: the scale of everything
    out,  # float8_e4m3fn [rows, SIZE]
    scales,  # float32 [pieces, room]
    stride,
    room,
    limit,  # what a row's largest number is cut off at, if LIMITED
    SIZE: tl.constexpr,
    EACH: tl.constexpr,  # numbers of a piece, which has a scale of its own
    PIECES: tl.constexpr,  # of a row, and
    WIDE: tl.constexpr,  # the powers of two that hold them
    GATED: tl.constexpr,
    GIVEN: tl.constexpr,
    LIMITED: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One program rounds one row."""
    launch_dependents(EARLY)
    row = tl.program_id(0).to(tl.int64)
    piece = tl.arange(0, PIECES)
    at = piece[:, None] * EACH + tl.arange(0, WIDE)[None, :]
    inside = (tl.arange(0, WIDE) < EACH)[None, :] & (at < SIZE)
    wait_for_previous_kernel(EARLY)
    value = tl.load(x + row * stride + at, mask=inside, other=0.0)
    if GATED:
        up = tl.load(x + row * stride + SIZE + at, mask=inside, other=0.0)
        wide = value.to(tl.float32)
        # Rounded where torch rounds.
        value = ((wide / (1.0 + tl.exp(-wide))).to(up.dtype) * up).to(up.dtype)
    value = value.to(tl.float32)
    if GIVEN:
        scale = tl.load(given) + tl.zeros([PIECES], tl.float32)
    else:
        largest = tl.max(tl.abs(value), axis=1)
        if LIMITED:
            largest = tl.minimum(largest, limit)
        scale = tl.maximum(tl.math.div_rn(largest, 448.0), 1e-12)
    # The cast makes NaN of what is too large on some devices, so it is cut off before.
    whole = value * tl.math.div_rn(1.0, scale)[:, None]
    whole = tl.minimum(tl.maximum(whole, -448.0), 448.0)
    tl.store(out + row * SIZE + at, whole.to(out.dtype.element_ty), mask=inside)
    tl.store(scales + piece * room + row, scale, mask=piece * EACH < SIZE)


@triton.jit
def scaled_mm_kernel(
    x,  # float8_e4m3fn [rows, depth]
    x_scale,  # float32 [rows], or [depth / 128, rows] with rows x_stride apart, if BLOCKS
    weight,  # float8_e4m3fn [width, depth]
    w_scale,  # float32 [width], or [width / 128, depth / 128] with rows w_stride apart
    bias,  # [width] if BIAS
    out,  # [rows, width], or float32 [splits, rows, width] if SPLIT
    rows,
    width,
    depth,
    share,  # inputs of one program, a multiple of DEEP
    x_stride,
    w_stride,
    WIDE: tl.constexpr,  # outputs of one program
    ROWS: tl.constexpr,
    DEEP: tl.constexpr,  # 128 if BLOCKS
    BLOCKS: tl.constexpr,
    SPLIT: tl.constexpr,
    BIAS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Program (block of outputs, share of the inputs, block of rows)."""
    launch_dependents(EARLY)
    n = tl.program_id(0) * WIDE + tl.arange(0, WIDE)
    m = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    k = tl.arange(0, DEEP)
    begin = tl.program_id(1) * share
    end = tl.minimum(begin + share, depth)
    inside, real = n < width, m < rows
    left_at = weight + n.to(tl.int64)[:, None] * depth + k[None, :]
    right_at = x + m[None, :] * depth + k[:, None]
    scale_at = w_scale + tl.program_id(0) * WIDE // 128 * w_stride
    wait_for_previous_kernel(EARLY)
    total = tl.zeros([WIDE, ROWS], tl.float32)
    gain = tl.zeros([ROWS], tl.float32)
    if BLOCKS:
        gain = tl.load(x_scale + begin // 128 * x_stride + m, mask=real, other=0.0)
        gain *= tl.load(scale_at + begin // 128)
    for start in range(begin, end, DEEP):
        left = tl.load(
            left_at + start, mask=inside[:, None] & (start + k < end)[None, :], other=0.0
        )
        right = tl.load(
            right_at + start, mask=real[None, :] & (start + k < end)[:, None], other=0.0
        )
        if BLOCKS:
            # The next scales are on their way while this tile is multiplied.
            own, after = gain, start // 128 + 1
            more = start + DEEP < end
            gain = tl.load(x_scale + after * x_stride + m, mask=real & more, other=0.0)
            gain *= tl.load(scale_at + after, mask=more, other=0.0)
            total += tl.dot(left, right) * own[None, :]
        else:
            # Hopper sums products in FP8 with few bits; every 128 of them are added in float32.
            total = tl.dot(left, right, total, max_num_imprecise_acc=128)
    kept = inside[:, None] & real[None, :]
    if SPLIT:
        part = (tl.program_id(1) * rows + m).to(tl.int64)
        tl.store(out + part[None, :] * width + n[:, None], total, mask=kept)
    else:
        if not BLOCKS:
            own = tl.load(x_scale + m, mask=real, other=0.0)
            total *= tl.load(w_scale + n, mask=inside, other=0.0)[:, None] * own[None, :]
        if BIAS:
            total += tl.load(bias + n, mask=inside, other=0.0).to(tl.float32)[:, None]
        at = out + m.to(tl.int64)[None, :] * width + n[:, None]
        tl.store(at, total.to(out.dtype.element_ty), mask=kept)


@triton.jit
def finish_kernel(
    parts,  # float32 [SPLITS, rows, width]
    x_scale,  # as in scaled_mm_kernel; not read if BLOCKS
    w_scale,
    bias,
    out,  # [rows, width]
    width,
    SPLITS: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCKS: tl.constexpr,
    BIAS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Program (block of outputs, row) adds what the programs of ``scaled_mm_kernel`` have found."""
    launch_dependents(EARLY)
    n = tl.program_id(0) * WIDE + tl.arange(0, WIDE)
    row, rows = tl.program_id(1).to(tl.int64), tl.num_programs(1)
    inside = n < width
    wait_for_previous_kernel(EARLY)
    total = tl.zeros([WIDE], tl.float32)
    for split in tl.static_range(SPLITS):
        total += tl.load(parts + (split * rows + row) * width + n, mask=inside, other=0.0)
    if not BLOCKS:
        total *= tl.load(w_scale + n, mask=inside, other=0.0) * tl.load(x_scale + row)
    if BIAS:
        total += tl.load(bias + n, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + n, total.to(out.dtype.element_ty), mask=inside)


def _round(
    x: Tensor,
    each: int | None,
    given: Tensor | None,
    limit: float | None,
    room: int,
    gated: bool,
    early: bool,
) -> tuple[Tensor, Tensor]:
    rows, size = len(x), x.shape[1] // (2 if gated else 1)
    each = each or size
    if x.stride(1) != 1:
        x = x.contiguous()
    out = torch.empty((room, size), dtype=FP8, device=x.device)
    scales = torch.empty((size // each, room), dtype=torch.float32, device=x.device)
    pieces, wide = (triton.next_power_of_2(n) for n in (size // each, each))
    quantize_kernel[(rows,)](
        x, scales if given is None else given, out, scales, x.stride(0), room, limit or 0.0,
        SIZE=size, EACH=each, PIECES=pieces, WIDE=wide, GATED=gated, GIVEN=given is not None,
        LIMITED=limit is not None, EARLY=early,
        num_warps=max(4, min(16, pieces * wide // 512)), launch_pdl=early,
    )  # fmt: skip
    return out, scales.t()


def quantize_per_row(
    x: Tensor,
    given: Tensor | None,
    limit: float | None,
    room: int,
    *,
    gated: bool = False,
    early: bool,
) -> tuple[Tensor, Tensor]:
    """As ``rounding.quantize_per_row``, but for ties: numbers are multiplied by the inverse of the scale."""
    return _round(x, None, given, limit, room, gated, early)


def quantize_per_block(
    x: Tensor, room: int, *, gated: bool = False, early: bool
) -> tuple[Tensor, Tensor]:
    """As ``rounding.quantize_per_block``."""
    return _round(x, BLOCK, None, None, room, gated, early)


def multiply(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    w_scale: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    tile: Tile,
    *,
    early: bool,
) -> Tensor:
    """``[rows, width]`` in ``dtype`` from ``x`` ``[rows, depth]`` and ``weight`` ``[width, depth]``.

    The scales are as from ``quantize_per_row`` with ``w_scale`` ``[width]``, or as from ``quantize_per_block`` with
    ``w_scale`` ``[width / 128, depth / 128]``.
    """
    rows, depth = x.shape
    width = len(weight)
    blocks = w_scale.dim() == 2
    share = triton.cdiv(triton.cdiv(depth, tile.splits), tile.deep) * tile.deep
    splits = triton.cdiv(depth, share)
    out = torch.empty((rows, width), dtype=dtype, device=x.device)
    parts = out
    if splits > 1:
        parts = torch.empty((splits, rows, width), dtype=torch.float32, device=x.device)
    grid = (triton.cdiv(width, tile.wide), splits, triton.cdiv(rows, tile.rows))
    added = out if bias is None else bias
    scaled_mm_kernel[grid](
        x, x_scale, weight, w_scale, added, parts, rows, width, depth, share,
        x_scale.stride(1), w_scale.stride(0),
        WIDE=tile.wide, ROWS=tile.rows, DEEP=tile.deep, BLOCKS=blocks, SPLIT=splits > 1,
        BIAS=bias is not None, EARLY=early, num_warps=tile.warps, num_stages=tile.stages,
        launch_pdl=early,
    )  # fmt: skip
    if splits > 1:
        finish_kernel[(triton.cdiv(width, 1024), rows)](
            parts, x_scale, w_scale, added, out, width, SPLITS=splits, WIDE=1024,
            BLOCKS=blocks, BIAS=bias is not None, EARLY=early, num_warps=4, launch_pdl=early,
        )  # fmt: skip
    return out
