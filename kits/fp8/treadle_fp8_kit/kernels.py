"""Kernels around products in FP8 and int8: rounding activations, products of few rows and, in int8, of many.

cuBLAS multiplies FP8 matrices with a scale for each row in tiles of 128 rows, however few there are. Here
the weight is the left side of the product and the activations, 16 to 256 columns wide, the right one (but the other way round
for 64 rows and more with scales by block), and programs share the inputs of an output where there are too few outputs to fill the device.

The same kernel multiplies the rows that chose an expert by the expert's weight, for all experts at once.
"""

# Kernels are compiled from their source: their arguments are pointers and constants without types.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from treadle_fp8_kit.quantize import INT8
from treadle_fp8_kit.quantize_kernel import quantize_per_block, quantize_per_row
from treadle_fp8_kit.tiles import Tile
from treadle_triton_kit.expert_tiles import plan
from treadle_triton_kit.launch import shared_bytes
from treadle_triton_kit.pdl import launch_dependents, wait_for_previous_kernel

__all__ = (
    "multiply",
    "plan",
    "quantize_per_block",
    "quantize_per_row",
    "scaled_mm_kernel",
    "shared_bytes",
    "split_k_reduce_kernel",
)


@triton.jit
def _block_of(num_n, GROUP_M: tl.constexpr):
    """Return the block of outputs and that of rows: ``GROUP_M`` blocks of rows take turns, so that theirs stay in L2."""
    pid_n, pid_m = tl.program_id(0), tl.program_id(2)
    if GROUP_M > 1:
        first_m = pid_n // (GROUP_M * num_n) * GROUP_M
        group_m = tl.minimum(tl.num_programs(0) // num_n - first_m, GROUP_M)
        place = pid_n % (GROUP_M * num_n)
        pid_n, pid_m = place // group_m, first_m + place % group_m
    return pid_n, pid_m


@triton.jit(do_not_specialize=("M", "x_stride", "shared"))
def scaled_mm_kernel(
    x,  # float8_e4m3fn or int8 [M, K]
    x_scale,  # float32 [M], with HAS_ZERO [2, M], or if BLOCK_SCALES [K / 128, M]; rows x_stride apart
    weight,  # [N, K], of the type of x
    w_scale,  # float32 [N], or [N / 128, K / 128] with rows w_stride apart
    w_sum,  # float32 [N] if HAS_ZERO: of each output's weights
    bias,  # [N] if HAS_BIAS
    out,  # [M, N], or float32 or int32 [splits, M, N] if SPLIT_K
    order,  # if EXPERTS: int32, rows of out by their experts; those of x are as many divided by shared
    tiles,  # if EXPERTS: int32 [3, tiles]: expert (negative: none), first in order, and end
    shared,
    M,
    N,
    K,
    k_per_split,  # inputs of one program, a multiple of BLOCK_K
    x_stride,
    w_stride,
    expert_stride,  # of w_scale, if EXPERTS
    BLOCK_N: tl.constexpr,  # outputs of one program
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,  # 128 if BLOCK_SCALES
    GROUP_M: tl.constexpr,  # blocks of rows that take turns; 1: each has a grid of its own
    BLOCK_SCALES: tl.constexpr,
    SPLIT_K: tl.constexpr,
    HAS_ZERO: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    EXPERTS: tl.constexpr,  # weight, w_scale and w_sum have one more dimension; without SPLIT_K and HAS_BIAS
    USE_PDL: tl.constexpr,
):
    """Program (block of outputs, share of the inputs, block of rows)."""
    launch_dependents(USE_PDL)
    INT8: tl.constexpr = weight.dtype.element_ty == tl.int8
    # A thread has sums of 2 rows of the left side, but of many columns of the right one, each with a scale to load.
    ROWS_LEFT: tl.constexpr = BLOCK_SCALES and BLOCK_M >= 64
    pid_n, pid_m = _block_of(tl.cdiv(N, BLOCK_N), GROUP_M)
    offs_n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_k = tl.arange(0, BLOCK_K)
    k_begin = tl.program_id(1) * k_per_split
    k_end = tl.minimum(k_begin + k_per_split, K)
    mask_n, mask_m = offs_n < N, offs_m < M
    rows = offs_m  # of x
    if EXPERTS:
        wait_for_previous_kernel(USE_PDL)
        num_tiles = tl.num_programs(0) * tl.num_programs(2) // tl.cdiv(N, BLOCK_N)
        expert = tl.load(tiles + pid_m).to(tl.int64)
        if expert < 0:
            return
        places = tl.load(tiles + num_tiles + pid_m) + tl.arange(0, BLOCK_M)
        mask_m = places < tl.load(tiles + 2 * num_tiles + pid_m)
        offs_m = tl.load(order + places, mask=mask_m, other=0)
        rows = offs_m // shared
        weight += expert * N * K
        w_scale += expert * expert_stride
        w_sum += expert * N
    w_ptrs = weight + offs_n.to(tl.int64)[:, None] * K + offs_k[None, :]
    x_ptrs = x + rows.to(tl.int64)[None, :] * K + offs_k[:, None]
    w_scale_ptrs = w_scale + pid_n * BLOCK_N // 128 * w_stride
    if not EXPERTS:
        wait_for_previous_kernel(USE_PDL)
    LEFT: tl.constexpr = BLOCK_M if ROWS_LEFT else BLOCK_N
    RIGHT: tl.constexpr = BLOCK_N if ROWS_LEFT else BLOCK_M
    acc = tl.zeros([LEFT, RIGHT], tl.int32 if INT8 else tl.float32)
    next_scale = tl.zeros([BLOCK_M], tl.float32)
    if BLOCK_SCALES:
        next_scale = tl.load(x_scale + k_begin // 128 * x_stride + rows, mask=mask_m, other=0.0)
        next_scale *= tl.load(w_scale_ptrs + k_begin // 128)
    for k_start in range(k_begin, k_end, BLOCK_K):
        w_tile = tl.load(
            w_ptrs + k_start, mask=mask_n[:, None] & (k_start + offs_k < k_end)[None, :], other=0.0
        )
        x_tile = tl.load(
            x_ptrs + k_start, mask=mask_m[None, :] & (k_start + offs_k < k_end)[:, None], other=0.0
        )
        if INT8:
            acc = tl.dot(w_tile, x_tile, acc, out_dtype=tl.int32)
        elif BLOCK_SCALES:
            # The next scales are on their way while this tile is multiplied.
            row_scale, next_block = next_scale, k_start // 128 + 1
            has_next = k_start + BLOCK_K < k_end
            next_scale = tl.load(
                x_scale + next_block * x_stride + rows, mask=mask_m & has_next, other=0.0
            )
            next_scale *= tl.load(w_scale_ptrs + next_block, mask=has_next, other=0.0)
            part = tl.dot(x_tile.T, w_tile.T) if ROWS_LEFT else tl.dot(w_tile, x_tile)
            acc += part * (row_scale[:, None] if ROWS_LEFT else row_scale[None, :])
        else:
            # Hopper sums products in FP8 with few bits; every 128 of them are added in float32.
            acc = tl.dot(w_tile, x_tile, acc, max_num_imprecise_acc=128)
    mask = mask_n[:, None] & mask_m[None, :]
    acc = acc.T if ROWS_LEFT else acc
    if SPLIT_K:
        partial_row = (tl.program_id(1) * M + offs_m).to(tl.int64)
        tl.store(out + partial_row[None, :] * N + offs_n[:, None], acc, mask=mask)
    else:
        y = acc.to(tl.float32)
        if not BLOCK_SCALES:
            y *= tl.load(x_scale + rows, mask=mask_m, other=0.0)[None, :]
            if HAS_ZERO:
                shift = tl.load(x_scale + x_stride + rows, mask=mask_m, other=0.0)
                y += tl.load(w_sum + offs_n, mask=mask_n, other=0.0)[:, None] * shift[None, :]
            y *= tl.load(w_scale + offs_n, mask=mask_n, other=0.0)[:, None]
        if HAS_BIAS:
            y += tl.load(bias + offs_n, mask=mask_n, other=0.0).to(tl.float32)[:, None]
        out_ptrs = out + offs_m.to(tl.int64)[None, :] * N + offs_n[:, None]
        tl.store(out_ptrs, y.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=("x_stride",))
def split_k_reduce_kernel(
    partials,  # float32 or int32 [NUM_SPLITS, M, N]
    x_scale,  # as in scaled_mm_kernel; not read if BLOCK_SCALES
    w_scale,
    w_sum,
    bias,
    out,  # [M, N]
    N,
    x_stride,
    NUM_SPLITS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_SCALES: tl.constexpr,
    HAS_ZERO: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """Program (row, block of outputs) adds what the programs of ``scaled_mm_kernel`` have found."""
    launch_dependents(USE_PDL)
    offs_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    row, M = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    mask = offs_n < N
    wait_for_previous_kernel(USE_PDL)
    acc = tl.zeros([BLOCK_N], partials.dtype.element_ty)
    for split in tl.static_range(NUM_SPLITS):
        acc += tl.load(partials + (split * M + row) * N + offs_n, mask=mask, other=0)
    y = acc.to(tl.float32)
    if not BLOCK_SCALES:
        y *= tl.load(x_scale + row)
        if HAS_ZERO:
            y += tl.load(w_sum + offs_n, mask=mask, other=0.0) * tl.load(x_scale + x_stride + row)
        y *= tl.load(w_scale + offs_n, mask=mask, other=0.0)
    if HAS_BIAS:
        y += tl.load(bias + offs_n, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * N + offs_n, y.to(out.dtype.element_ty), mask=mask)


def multiply(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    w_scale: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    tile: Tile,
    *,
    w_sum: Tensor | None = None,
    grouping: tuple[Tensor, Tensor] | None = None,
    use_pdl: bool,
) -> Tensor:
    """``[num_rows, out_features]`` in ``dtype`` from ``x`` ``[num_rows, in_features]`` and ``weight`` ``[out_features, in_features]``.

    The scales are as from ``quantize_per_row`` with ``w_scale`` ``[out_features]``, or as from ``quantize_per_block`` with
    ``w_scale`` ``[out_features / 128, in_features / 128]``. ``w_sum`` float32 ``[out_features]``: activations have zero points.

    ``grouping``: what ``expert_tiles.plan`` returns for ``tile.block_m``. ``weight`` and what belongs to it then begin with a
    dimension of experts, the result has a row for each choice, and ``x`` a row for each choice or for each token.
    """
    out_features, in_features = weight.shape[-2:]
    num_rows = len(x) if grouping is None else len(grouping[0])
    num_m = triton.cdiv(num_rows, tile.block_m) if grouping is None else grouping[1].shape[1]
    k_per_split = (
        triton.cdiv(triton.cdiv(in_features, tile.num_splits), tile.block_k) * tile.block_k
    )
    num_splits = triton.cdiv(in_features, k_per_split)
    has_block_scales = w_scale.dim() == (2 if grouping is None else 3)
    out = torch.empty((num_rows, out_features), dtype=dtype, device=x.device)
    partials = out
    if num_splits > 1:
        sums = torch.int32 if weight.dtype is INT8 else torch.float32
        partials = torch.empty((num_splits, num_rows, out_features), dtype=sums, device=x.device)
    num_n = triton.cdiv(out_features, tile.block_n)
    grid = (num_n, num_splits, num_m) if tile.group_m == 1 else (num_n * num_m, num_splits, 1)
    order, tiles = grouping or (x_scale, x_scale)
    scaled_mm_kernel[grid](
        x, x_scale, weight, w_scale, w_scale if w_sum is None else w_sum, out if bias is None else bias, partials,
        order, tiles, num_rows // len(x), num_rows, out_features, in_features, k_per_split,
        x_scale.stride(1), w_scale.stride(-2 if has_block_scales else -1), w_scale.stride(0),
        BLOCK_N=tile.block_n, BLOCK_M=tile.block_m, BLOCK_K=tile.block_k, GROUP_M=tile.group_m,
        BLOCK_SCALES=has_block_scales, SPLIT_K=num_splits > 1, HAS_ZERO=w_sum is not None, HAS_BIAS=bias is not None,
        EXPERTS=grouping is not None, USE_PDL=use_pdl, num_warps=tile.num_warps, num_stages=tile.num_stages, launch_pdl=use_pdl,
    )  # fmt: skip
    if num_splits > 1:
        split_k_reduce_kernel[(num_rows, triton.cdiv(out_features, 1024))](
            partials, x_scale, w_scale, w_scale if w_sum is None else w_sum, out if bias is None else bias, out, out_features,
            x_scale.stride(1), NUM_SPLITS=num_splits, BLOCK_N=1024, BLOCK_SCALES=has_block_scales,
            HAS_ZERO=w_sum is not None, HAS_BIAS=bias is not None, USE_PDL=use_pdl, num_warps=4, launch_pdl=use_pdl,
        )  # fmt: skip
    return out
