"""The kernel that rounds activations to FP8 or int8, together with the gate of a feed-forward layer."""

# Kernels are compiled from their source: their arguments are pointers and constants without types.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from treadle_fp8_kit.quantize import FP8, bounds
from treadle_fp8_kit.tiles import BLOCK
from treadle_triton_kit.pdl import launch_dependents, wait_for_previous_kernel

__all__ = ("quantize_kernel", "quantize_per_block", "quantize_per_row")


@triton.jit
def _round_half_even(value):  # float32 between -2^22 and 2^22
    return (value + 12582912.0) - 12582912.0


@triton.jit(do_not_specialize=("padded_rows",))
def quantize_kernel(
    x,  # [rows, HIDDEN_SIZE], or [rows, 2 * HIDDEN_SIZE] if GATED; rows stride elements apart
    static_scale,  # float32 [1] if HAS_STATIC_SCALE: the scale of everything; if HAS_ZERO, and the zero point
    out,  # float8_e4m3fn or int8 [rows, HIDDEN_SIZE]
    scales,  # float32 [groups, padded_rows], or if HAS_ZERO [2, padded_rows]: scale, -zero * scale
    stride,
    padded_rows,
    max_abs,  # what a row's largest number is cut off at, if HAS_MAX_ABS
    HIDDEN_SIZE: tl.constexpr,
    GROUP_SIZE: tl.constexpr,  # numbers of a piece, which has a scale of its own; all if HAS_ZERO
    NUM_GROUPS_PADDED: tl.constexpr,  # of a row, and
    GROUP_SIZE_PADDED: tl.constexpr,  # the powers of two that hold them
    LOWEST: tl.constexpr,  # and
    LARGEST: tl.constexpr,  # number of out's type
    GATED: tl.constexpr,
    HAS_STATIC_SCALE: tl.constexpr,
    HAS_MAX_ABS: tl.constexpr,
    HAS_ZERO: tl.constexpr,
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
    elif HAS_ZERO:
        low = tl.minimum(tl.min(value, axis=1), 0.0)
        high = tl.maximum(tl.max(value, axis=1), 0.0)
        scale = tl.maximum(tl.math.div_rn(high - low, LARGEST - LOWEST), 1e-12)
    else:
        amax = tl.max(tl.abs(value), axis=1)
        if HAS_MAX_ABS:
            amax = tl.minimum(amax, max_abs)
        scale = tl.maximum(tl.math.div_rn(amax, LARGEST), 1e-12)
    quantized = value * tl.math.div_rn(1.0, scale)[:, None]
    if HAS_ZERO:
        if HAS_STATIC_SCALE:
            zero = tl.load(static_scale + 1) + tl.zeros([NUM_GROUPS_PADDED], tl.float32)
        else:
            zero = _round_half_even(LOWEST - tl.math.div_rn(low, scale))
        quantized += zero[:, None]
        tl.store(scales + padded_rows + row + offs_g, -zero * scale)
    # The cast makes NaN of what is too large on some devices, so it is cut off before.
    quantized = tl.minimum(tl.maximum(quantized, LOWEST), LARGEST)
    if out.dtype.element_ty == tl.int8:
        quantized = _round_half_even(quantized)
    tl.store(out + row * HIDDEN_SIZE + offs, quantized.to(out.dtype.element_ty), mask=mask)
    tl.store(scales + offs_g * padded_rows + row, scale, mask=offs_g * GROUP_SIZE < HIDDEN_SIZE)


def _quantize(
    x: Tensor,
    group_size: int | None,
    static_scale: Tensor | None,
    max_abs: float | None,
    padded_rows: int,
    dtype: torch.dtype,
    gated: bool,
    has_zero: bool,
    use_pdl: bool,
) -> tuple[Tensor, Tensor]:
    num_rows, hidden_size = len(x), x.shape[1] // (2 if gated else 1)
    group_size = group_size or hidden_size
    if x.stride(1) != 1:
        x = x.contiguous()
    out = torch.empty((padded_rows, hidden_size), dtype=dtype, device=x.device)
    num_scales = 2 if has_zero else hidden_size // group_size
    scales = torch.empty((num_scales, padded_rows), dtype=torch.float32, device=x.device)
    num_groups_padded, group_size_padded = (
        triton.next_power_of_2(n) for n in (hidden_size // group_size, group_size)
    )
    lowest, largest = bounds(dtype)
    quantize_kernel[(num_rows,)](
        x, scales if static_scale is None else static_scale, out, scales, x.stride(0), padded_rows, max_abs or 0.0,
        HIDDEN_SIZE=hidden_size, GROUP_SIZE=group_size, NUM_GROUPS_PADDED=num_groups_padded, GROUP_SIZE_PADDED=group_size_padded,
        LOWEST=lowest, LARGEST=largest, GATED=gated, HAS_STATIC_SCALE=static_scale is not None,
        HAS_MAX_ABS=max_abs is not None, HAS_ZERO=has_zero, USE_PDL=use_pdl,
        num_warps=max(4, min(16, num_groups_padded * group_size_padded // 512)), launch_pdl=use_pdl,
    )  # fmt: skip
    return out, scales.t()


def quantize_per_row(
    x: Tensor,
    static_scale: Tensor | None,
    max_abs: float | None,
    padded_rows: int,
    *,
    dtype: torch.dtype = FP8,
    gated: bool = False,
    has_zero: bool = False,
    use_pdl: bool,
) -> tuple[Tensor, Tensor]:
    """As ``quantize.quantize_per_row``, but for ties: numbers are multiplied by the inverse of the scale."""
    return _quantize(x, None, static_scale, max_abs, padded_rows, dtype, gated, has_zero, use_pdl)


def quantize_per_block(
    x: Tensor, padded_rows: int, *, gated: bool = False, use_pdl: bool
) -> tuple[Tensor, Tensor]:
    """As ``quantize.quantize_per_block``."""
    return _quantize(x, BLOCK, None, None, padded_rows, FP8, gated, False, use_pdl)
