"""Activations in FP8 and int8 by torch's operations: what ``kernels`` does in one pass, anywhere."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from treadle_fp8_kit.tiles import BLOCK
from treadle_layers_kit import ops

__all__ = (
    "FP8",
    "FP8_MAX",
    "INT8",
    "MIN_SCALE",
    "bounds",
    "quantize_per_block",
    "quantize_per_row",
    "scale_products",
)

FP8 = torch.float8_e4m3fn
INT8 = torch.int8
FP8_MAX = 448.0
"""The largest number of float8_e4m3fn."""
MIN_SCALE = 1e-12
"""The least scale: a row of zeros has one, too."""


def bounds(dtype: torch.dtype) -> tuple[float, float]:
    """Return the lowest and the largest number of ``INT8``, or of ``FP8``."""
    return (-128.0, 127.0) if dtype is INT8 else (-FP8_MAX, FP8_MAX)


def quantize_per_row(
    x: Tensor,
    static_scale: Tensor | None,
    max_abs: float | None,
    padded_rows: int,
    *,
    dtype: torch.dtype = FP8,
    gated: bool = False,
    has_zero: bool = False,
    use_pdl: bool = False,
) -> tuple[Tensor, Tensor]:
    """``x`` ``[rows, size]`` in ``dtype``, and the scale of each row: float32 ``[rows, 1]``.

    ``static_scale`` is a scalar that scales all of it; otherwise a row's largest number does, up to ``max_abs``.
    The results have ``padded_rows`` rows; what is in those beyond the given ones is arbitrary. ``gated``:
    ``ops.silu_and_mul`` of ``x`` ``[rows, 2 · size]`` is rounded. ``use_pdl`` is of no consequence here.

    ``has_zero``: int8 above a zero point, which a row's numbers have too, or ``static_scale`` ``[2]``. The scales are then
    ``[rows, 2]``, those of one column side by side: ``x`` is ``int8 · scale + shift``.
    """
    x = _pad_rows(ops.silu_and_mul(x) if gated else x, padded_rows)
    if has_zero:
        return _quantize_above_zero(x.float(), static_scale)
    if static_scale is not None:
        scales = static_scale.repeat(len(x), 1)  # for one row, an expanded scalar has strides of 0
        return _to(dtype, x, scales), scales
    amax = x.abs().amax(dim=1, keepdim=True).float()
    if max_abs is not None:
        amax = amax.clamp_max(max_abs)
    scales = (amax / bounds(dtype)[1]).clamp_min(MIN_SCALE)
    return _to(dtype, x, scales), scales


def quantize_per_block(
    x: Tensor, padded_rows: int, *, gated: bool = False, use_pdl: bool = False
) -> tuple[Tensor, Tensor]:
    """As ``quantize_per_row``, with a scale for each 128 numbers: float32 ``[rows, size / 128]``, those of
    one column side by side."""
    groups = _pad_rows(ops.silu_and_mul(x) if gated else x, padded_rows).unflatten(1, (-1, BLOCK))
    scales = (groups.abs().amax(dim=2).float() / FP8_MAX).clamp_min(MIN_SCALE)
    return _to(FP8, groups, scales[..., None]).flatten(1), scales.t().contiguous().t()


def scale_products(
    products: Tensor,
    x_scale: Tensor,
    w_scale: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    w_sum: Tensor | None,
) -> Tensor:
    """int32 products ``[rows, out]`` of int8 to what they are products of, in ``dtype``.

    ``x_scale`` is as from ``quantize_per_row``, which gives each row a shift if ``w_sum``, the sum of each output's
    weights, is given.
    """
    y = products.float() * x_scale[: len(products), :1]
    if w_sum is not None:
        y += x_scale[: len(products), 1:] * w_sum
    y *= w_scale
    return (y if bias is None else y + bias).to(dtype)


def _pad_rows(x: Tensor, padded_rows: int) -> Tensor:
    return x if padded_rows == len(x) else F.pad(x, (0, 0, 0, padded_rows - len(x)))


def _quantize_above_zero(x: Tensor, static: Tensor | None) -> tuple[Tensor, Tensor]:
    lowest, largest = bounds(INT8)
    if static is not None:
        scale, zero = static.repeat(len(x), 1).split(1, dim=1)
    else:
        low = x.amin(dim=1, keepdim=True).clamp_max(0)
        high = x.amax(dim=1, keepdim=True).clamp_min(0)
        scale = ((high - low) / (largest - lowest)).clamp_min(MIN_SCALE)
        zero = (lowest - low / scale).round()
    codes = (x / scale + zero).clamp(lowest, largest).round().to(INT8)
    return codes, torch.cat((scale, -zero * scale), dim=1).t().contiguous().t()


def _to(dtype: torch.dtype, x: Tensor, scale: Tensor) -> Tensor:
    # The cast makes NaN of what is too large, so it must be cut off before.
    numbers = (x.float() / scale).clamp(*bounds(dtype))
    return (numbers.round() if dtype is INT8 else numbers).to(dtype)
