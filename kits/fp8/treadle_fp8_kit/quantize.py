"""Activations in FP8 by torch's operations: what ``kernels`` does in one pass, anywhere."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from treadle_fp8_kit.tiles import BLOCK
from treadle_layers_kit import ops

__all__ = ("FP8", "FP8_MAX", "MIN_SCALE", "quantize_per_block", "quantize_per_row")

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
"""The largest number of float8_e4m3fn."""
MIN_SCALE = 1e-12
"""The least scale: a row of zeros has one, too."""


def quantize_per_row(
    x: Tensor,
    static_scale: Tensor | None,
    max_abs: float | None,
    padded_rows: int,
    *,
    gated: bool = False,
    use_pdl: bool = False,
) -> tuple[Tensor, Tensor]:
    """``x`` ``[rows, size]`` in FP8, and the scale of each row: float32 ``[rows, 1]``.

    ``static_scale`` is a scalar that scales all of it; otherwise a row's largest number does, up to ``max_abs``.
    The results have ``padded_rows`` rows; what is in those beyond the given ones is arbitrary. ``gated``:
    ``ops.silu_and_mul`` of ``x`` ``[rows, 2 · size]`` is rounded. ``use_pdl`` is of no consequence here.
    """
    x = _pad_rows(ops.silu_and_mul(x) if gated else x, padded_rows)
    if static_scale is not None:
        scales = static_scale.repeat(len(x), 1)  # for one row, an expanded scalar has strides of 0
        return _to_fp8(x, scales), scales
    amax = x.abs().amax(dim=1, keepdim=True).float()
    if max_abs is not None:
        amax = amax.clamp_max(max_abs)
    scales = (amax / FP8_MAX).clamp_min(MIN_SCALE)
    return _to_fp8(x, scales), scales


def quantize_per_block(
    x: Tensor, padded_rows: int, *, gated: bool = False, use_pdl: bool = False
) -> tuple[Tensor, Tensor]:
    """As ``quantize_per_row``, with a scale for each 128 numbers: float32 ``[rows, size / 128]``, those of
    one column side by side."""
    groups = _pad_rows(ops.silu_and_mul(x) if gated else x, padded_rows).unflatten(1, (-1, BLOCK))
    scales = (groups.abs().amax(dim=2).float() / FP8_MAX).clamp_min(MIN_SCALE)
    return _to_fp8(groups, scales[..., None]).flatten(1), scales.t().contiguous().t()


def _pad_rows(x: Tensor, padded_rows: int) -> Tensor:
    return x if padded_rows == len(x) else F.pad(x, (0, 0, 0, padded_rows - len(x)))


def _to_fp8(x: Tensor, scale: Tensor) -> Tensor:
    # The cast makes NaN of what is too large, so it must be cut off before.
    return (x.float() / scale).clamp(-FP8_MAX, FP8_MAX).to(FP8)
