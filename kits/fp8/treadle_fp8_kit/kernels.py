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

from treadle_fp8_kit.quantize import FP8
from treadle_fp8_kit.tiles import BLOCK, Tile
from treadle_triton_kit.pdl import launch_dependents, wait_for_previous_kernel

__all__ = (
    "multiply",
    "quantize_kernel",
    "quantize_per_block",
    "quantize_per_row",
    "scaled_mm_kernel",
    "split_k_reduce_kernel",
)


@triton.jit
def quantize_kernel(
    x,  # [rows, HIDDEN_SIZE], or [rows, 2 * HIDDEN_SIZE] if GATED; rows stride elements apart
    static_scale,  # float32 [1] if HAS_STATIC_SCALE: the scale of everything
    out,  # float8_e4m3fn [rows, HIDDEN_SIZE]
    scales,  # float32 [groups, padded_rows]
    stride,
    padded_rows,
    max_abs,  # what a row's largest number is cut off at, if HAS_MAX_ABS
    HIDDEN_SIZE: tl.constexpr,
    GROUP_SIZE: tl.constexpr,  # numbers of a piece, which has a scale of its own
    NUM_GROUPS_PADDED: tl.constexpr,  # of a row, and
    GROUP_SIZE_PADDED: tl.constexpr,  # the powers of two that hold them
    GATED: tl.constexpr,
    HAS_STATIC_SCALE: tl.constexpr,
    HAS_MAX_ABS: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """One program rounds one row."""
    launch_dependents(USE_PDL)
    row = tl.program_id(0).to(tl.int64)
    offs_g = tl.arange(0, NUM_GROUPS_PADDED)
    offs = offs_g[:, None] * GROUP_SIZE + tl.arange(0, GROUP_SIZE_PADDED)[None, :]
    mask = (tl.arange(0, GROUP_SIZE_PADDED) < GROUP_SIZE)[None, :] & (offs < HIDDEN_SIZE)
    wait_for_previous_kernel(USE_PDL)
    value = tl.load(x + row * stride + offs, mask=mask, other=0.0)
    if GATED:
        up = tl.load(x + row * stride + HIDDEN_SIZE + offs, mask=mask, other=0.0)
        gate = value.to(tl.float32)
        # Rounded where torch rounds.
        value = ((gate / (1.0 + tl.exp(-gate))).to(up.dtype) * up).to(up.dtype)
    value = value.to(tl.float32)
    if HAS_STATIC_SCALE:
        scale = tl.load(static_scale) + tl.zeros([NUM_GROUPS_PADDED], tl.float32)
    else:
        amax = tl.max(tl.abs(value), axis=1)
        if HAS_MAX_ABS:
            amax = tl.minimum(amax, max_abs)
        scale = tl.maximum(tl.math.div_rn(amax, 448.0), 1e-12)
    # The cast makes NaN of what is too large on some devices, so it is cut off before.
    quantized = value * tl.math.div_rn(1.0, scale)[:, None]
    quantized = tl.minimum(tl.maximum(quantized, -448.0), 448.0)
    tl.store(out + row * HIDDEN_SIZE + offs, quantized.to(out.dtype.element_ty), mask=mask)
    tl.store(scales + offs_g * padded_rows + row, scale, mask=offs_g * GROUP_SIZE < HIDDEN_SIZE)


@triton.jit
def scaled_mm_kernel(
    x,  # float8_e4m3fn [M, K]
    x_scale,  # float32 [M], or [K / 128, M] with rows x_stride apart, if BLOCK_SCALES
    weight,  # float8_e4m3fn [N, K]
    w_scale,  # float32 [N], or [N / 128, K / 128] with rows w_stride apart
    bias,  # [N] if HAS_BIAS
    out,  # [M, N], or float32 [splits, M, N] if SPLIT_K
    M,
    N,
    K,
    k_per_split,  # inputs of one program, a multiple of BLOCK_K
    x_stride,
    w_stride,
    BLOCK_N: tl.constexpr,  # outputs of one program
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,  # 128 if BLOCK_SCALES
    BLOCK_SCALES: tl.constexpr,
    SPLIT_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """Program (block of outputs, share of the inputs, block of rows)."""
    launch_dependents(USE_PDL)
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_m = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_k = tl.arange(0, BLOCK_K)
    k_begin = tl.program_id(1) * k_per_split
    k_end = tl.minimum(k_begin + k_per_split, K)
    mask_n, mask_m = offs_n < N, offs_m < M
    w_ptrs = weight + offs_n.to(tl.int64)[:, None] * K + offs_k[None, :]
    x_ptrs = x + offs_m[None, :] * K + offs_k[:, None]
    w_scale_ptrs = w_scale + tl.program_id(0) * BLOCK_N // 128 * w_stride
    wait_for_previous_kernel(USE_PDL)
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    next_scale = tl.zeros([BLOCK_M], tl.float32)
    if BLOCK_SCALES:
        next_scale = tl.load(x_scale + k_begin // 128 * x_stride + offs_m, mask=mask_m, other=0.0)
        next_scale *= tl.load(w_scale_ptrs + k_begin // 128)
    for k_start in range(k_begin, k_end, BLOCK_K):
        w_tile = tl.load(
            w_ptrs + k_start, mask=mask_n[:, None] & (k_start + offs_k < k_end)[None, :], other=0.0
        )
        x_tile = tl.load(
            x_ptrs + k_start, mask=mask_m[None, :] & (k_start + offs_k < k_end)[:, None], other=0.0
        )
        if BLOCK_SCALES:
            # The next scales are on their way while this tile is multiplied.
            row_scale, next_block = next_scale, k_start // 128 + 1
            has_next = k_start + BLOCK_K < k_end
            next_scale = tl.load(
                x_scale + next_block * x_stride + offs_m, mask=mask_m & has_next, other=0.0
            )
            next_scale *= tl.load(w_scale_ptrs + next_block, mask=has_next, other=0.0)
            acc += tl.dot(w_tile, x_tile) * row_scale[None, :]
        else:
            # Hopper sums products in FP8 with few bits; every 128 of them are added in float32.
            acc = tl.dot(w_tile, x_tile, acc, max_num_imprecise_acc=128)
    mask = mask_n[:, None] & mask_m[None, :]
    if SPLIT_K:
        partial_row = (tl.program_id(1) * M + offs_m).to(tl.int64)
        tl.store(out + partial_row[None, :] * N + offs_n[:, None], acc, mask=mask)
    else:
        if not BLOCK_SCALES:
            row_scale = tl.load(x_scale + offs_m, mask=mask_m, other=0.0)
            acc *= tl.load(w_scale + offs_n, mask=mask_n, other=0.0)[:, None] * row_scale[None, :]
        if HAS_BIAS:
            acc += tl.load(bias + offs_n, mask=mask_n, other=0.0).to(tl.float32)[:, None]
        out_ptrs = out + offs_m.to(tl.int64)[None, :] * N + offs_n[:, None]
        tl.store(out_ptrs, acc.to(out.dtype.element_ty), mask=mask)


@triton.jit
def split_k_reduce_kernel(
    partials,  # float32 [NUM_SPLITS, M, N]
    x_scale,  # as in scaled_mm_kernel; not read if BLOCK_SCALES
    w_scale,
    bias,
    out,  # [M, N]
    N,
    NUM_SPLITS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_SCALES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """Program (block of outputs, row) adds what the programs of ``scaled_mm_kernel`` have found."""
    launch_dependents(USE_PDL)
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row, M = tl.program_id(1).to(tl.int64), tl.num_programs(1)
    mask = offs_n < N
    wait_for_previous_kernel(USE_PDL)
    acc = tl.zeros([BLOCK_N], tl.float32)
    for split in tl.static_range(NUM_SPLITS):
        acc += tl.load(partials + (split * M + row) * N + offs_n, mask=mask, other=0.0)
    if not BLOCK_SCALES:
        acc *= tl.load(w_scale + offs_n, mask=mask, other=0.0) * tl.load(x_scale + row)
    if HAS_BIAS:
        acc += tl.load(bias + offs_n, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * N + offs_n, acc.to(out.dtype.element_ty), mask=mask)


def _quantize(
    x: Tensor,
    group_size: int | None,
    static_scale: Tensor | None,
    max_abs: float | None,
    padded_rows: int,
    gated: bool,
    use_pdl: bool,
) -> tuple[Tensor, Tensor]:
    num_rows, hidden_size = len(x), x.shape[1] // (2 if gated else 1)
    group_size = group_size or hidden_size
    if x.stride(1) != 1:
        x = x.contiguous()
    out = torch.empty((padded_rows, hidden_size), dtype=FP8, device=x.device)
    scales = torch.empty(
        (hidden_size // group_size, padded_rows), dtype=torch.float32, device=x.device
    )
    num_groups_padded, group_size_padded = (
        triton.next_power_of_2(n) for n in (hidden_size // group_size, group_size)
    )
    quantize_kernel[(num_rows,)](
        x, scales if static_scale is None else static_scale, out, scales, x.stride(0), padded_rows, max_abs or 0.0,
        HIDDEN_SIZE=hidden_size, GROUP_SIZE=group_size, NUM_GROUPS_PADDED=num_groups_padded, GROUP_SIZE_PADDED=group_size_padded, GATED=gated, HAS_STATIC_SCALE=static_scale is not None,
        HAS_MAX_ABS=max_abs is not None, USE_PDL=use_pdl,
        num_warps=max(4, min(16, num_groups_padded * group_size_padded // 512)), launch_pdl=use_pdl,
    )  # fmt: skip
    return out, scales.t()


def quantize_per_row(
    x: Tensor,
    static_scale: Tensor | None,
    max_abs: float | None,
    padded_rows: int,
    *,
    gated: bool = False,
    use_pdl: bool,
) -> tuple[Tensor, Tensor]:
    """As ``quantize.quantize_per_row``, but for ties: numbers are multiplied by the inverse of the scale."""
    return _quantize(x, None, static_scale, max_abs, padded_rows, gated, use_pdl)


def quantize_per_block(
    x: Tensor, padded_rows: int, *, gated: bool = False, use_pdl: bool
) -> tuple[Tensor, Tensor]:
    """As ``quantize.quantize_per_block``."""
    return _quantize(x, BLOCK, None, None, padded_rows, gated, use_pdl)


def multiply(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    w_scale: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    tile: Tile,
    *,
    use_pdl: bool,
) -> Tensor:
    """``[num_rows, out_features]`` in ``dtype`` from ``x`` ``[num_rows, in_features]`` and ``weight`` ``[out_features, in_features]``.

    The scales are as from ``quantize_per_row`` with ``w_scale`` ``[out_features]``, or as from ``quantize_per_block`` with
    ``w_scale`` ``[out_features / 128, in_features / 128]``.
    """
    num_rows, in_features = x.shape
    out_features = len(weight)
    has_block_scales = w_scale.dim() == 2
    k_per_split = (
        triton.cdiv(triton.cdiv(in_features, tile.num_splits), tile.block_k) * tile.block_k
    )
    num_splits = triton.cdiv(in_features, k_per_split)
    out = torch.empty((num_rows, out_features), dtype=dtype, device=x.device)
    partials = out
    if num_splits > 1:
        partials = torch.empty(
            (num_splits, num_rows, out_features), dtype=torch.float32, device=x.device
        )
    grid = (
        triton.cdiv(out_features, tile.block_n),
        num_splits,
        triton.cdiv(num_rows, tile.block_m),
    )
    bias_or_out = out if bias is None else bias
    scaled_mm_kernel[grid](
        x, x_scale, weight, w_scale, bias_or_out, partials, num_rows, out_features, in_features, k_per_split,
        x_scale.stride(1), w_scale.stride(0),
        BLOCK_N=tile.block_n, BLOCK_M=tile.block_m, BLOCK_K=tile.block_k, BLOCK_SCALES=has_block_scales, SPLIT_K=num_splits > 1,
        HAS_BIAS=bias is not None, USE_PDL=use_pdl, num_warps=tile.num_warps, num_stages=tile.num_stages,
        launch_pdl=use_pdl,
    )  # fmt: skip
    if num_splits > 1:
        split_k_reduce_kernel[(triton.cdiv(out_features, 1024), num_rows)](
            partials, x_scale, w_scale, bias_or_out, out, out_features, NUM_SPLITS=num_splits, BLOCK_N=1024,
            BLOCK_SCALES=has_block_scales, HAS_BIAS=bias is not None, USE_PDL=use_pdl, num_warps=4, launch_pdl=use_pdl,
        )  # fmt: skip
    return out
