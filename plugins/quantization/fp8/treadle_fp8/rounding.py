"""Activations in FP8 by torch's operations: what ``kernels`` does in one pass, anywhere."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from treadle_fp8.tiles import BLOCK
from treadle_layers_kit import ops

__all__ = ("FP8", "LARGEST", "LEAST", "quantize_per_block", "quantize_per_row")

FP8 = torch.float8_e4m3fn
LARGEST = 448.0
"""The largest number of float8_e4m3fn."""
LEAST = 1e-12
"""The least scale: a row of zeros has one, too."""


def quantize_per_row(
    x: Tensor,
    given: Tensor | None,
    limit: float | None,
    room: int,
    *,
    gated: bool = False,
    early: bool = False,
) -> tuple[Tensor, Tensor]:
    """``x`` ``[rows, size]`` in FP8, and the scale of each row: float32 ``[rows, 1]``.

    ``given`` is a scalar that scales all of it; otherwise a row's largest number does, up to ``limit``.
    The results have ``room`` rows; what is in those beyond the given ones is arbitrary. ``gated``:
    ``ops.silu_and_mul`` of ``x`` ``[rows, 2 · size]`` is rounded. ``early`` is of no consequence here.
    """
    x = _padded(ops.silu_and_mul(x) if gated else x, room)
    if given is not None:
        own = given.repeat(len(x), 1)  # for one row, an expanded scalar has strides of 0
        return _rounded(x, own), own
    largest = x.abs().amax(dim=1, keepdim=True).float()
    if limit is not None:
        largest = largest.clamp_max(limit)
    own = (largest / LARGEST).clamp_min(LEAST)
    return _rounded(x, own), own


def quantize_per_block(
    x: Tensor, room: int, *, gated: bool = False, early: bool = False
) -> tuple[Tensor, Tensor]:
    """As ``quantize_per_row``, with a scale for each 128 numbers: float32 ``[rows, size / 128]``, those of
    one column side by side."""
    pieces = _padded(ops.silu_and_mul(x) if gated else x, room).unflatten(1, (-1, BLOCK))
    own = (pieces.abs().amax(dim=2).float() / LARGEST).clamp_min(LEAST)
    return _rounded(pieces, own[..., None]).flatten(1), own.t().contiguous().t()


def _padded(x: Tensor, room: int) -> Tensor:
    return x if room == len(x) else F.pad(x, (0, 0, 0, room - len(x)))


def _rounded(x: Tensor, scale: Tensor) -> Tensor:
    # The cast makes NaN of what is too large, so it must be cut off before.
    return (x.float() / scale).clamp(-LARGEST, LARGEST).to(FP8)
