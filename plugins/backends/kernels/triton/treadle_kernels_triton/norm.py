"""RMS normalisation of rows, with and without the residual addition before it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from treadle_kernels_triton.rows import flat
from treadle_triton_kit.pdl import launch_dependents, wait_for_previous_kernel

__all__ = (
    "fused_add_partials_rms_norm",
    "fused_add_rms_norm",
    "norm_kernel",
    "normalised",
    "rms_norm",
)


@triton.jit
def normalised(value, gain, eps, SIZE: tl.constexpr):
    """A row of SIZE elements, float32 and zeros beyond, over its root mean square, times ``gain``."""
    return value * tl.rsqrt(tl.sum(value * value, axis=0) / SIZE + eps) * gain


@triton.jit
def norm_kernel(
    x,  # [rows, SIZE], rows x_stride elements apart; float32 [PARTS, rows, SIZE] unless PARTS is 0
    residual,  # [rows, SIZE]; replaced by x + residual. Not read unless ADD
    weight,  # [SIZE]
    out,  # [rows, SIZE]
    x_stride,
    eps,
    offset,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,  # the power of two that holds SIZE
    ADD: tl.constexpr,
    PARTS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One program normalises one row; sums are in float32."""
    launch_dependents(EARLY)
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < SIZE
    gain = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32) + offset
    wait_for_previous_kernel(EARLY)
    value = tl.load(x + row * x_stride + at, mask=inside, other=0.0).to(tl.float32)
    if PARTS > 0:
        size = tl.cast(tl.num_programs(0), tl.int64) * SIZE  # of a part
        for part in tl.static_range(1, PARTS):  # so that all are on their way at once
            value += tl.load(x + part * size + row * SIZE + at, mask=inside, other=0.0)
        # Rounded to what the linear layer would have given.
        value = value.to(out.dtype.element_ty).to(tl.float32)
    if ADD:
        before = tl.load(residual + row * SIZE + at, mask=inside, other=0.0).to(tl.float32)
        # The sum is rounded to the model's dtype before it is used, as without the fusion.
        total = (value + before).to(residual.dtype.element_ty)
        tl.store(residual + row * SIZE + at, total, mask=inside)
        value = total.to(tl.float32)
    value = normalised(value, gain, eps, SIZE)
    tl.store(out + row * SIZE + at, value.to(out.dtype.element_ty), mask=inside)


def _launch(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float, *,
    add: bool, early: bool, parts: int = 0,
) -> Tensor:  # fmt: skip
    """``x`` and ``residual`` have two dimensions and dense rows; ``x`` three if there are ``parts``."""
    rows, size = residual.shape
    out = torch.empty((rows, size), dtype=residual.dtype, device=x.device)
    block = triton.next_power_of_2(size)
    norm_kernel[(rows,)](
        x, residual, weight, out, x.stride(-2), eps, offset,
        SIZE=size, BLOCK=block, ADD=add, PARTS=parts, EARLY=early,
        num_warps=min(16, max(1, block // 512)), launch_pdl=early,
    )  # fmt: skip
    return out


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, offset: float = 0.0, *, early: bool = False
) -> Tensor:
    """See ``treadle_layers_kit.ops.rms_norm``."""
    rows = flat(x)
    return _launch(rows, rows, weight, eps, offset, add=False, early=early).view(x.shape)


def fused_add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    offset: float = 0.0,
    *,
    early: bool = False,
) -> tuple[Tensor, Tensor]:
    """See ``treadle_layers_kit.ops.fused_add_rms_norm``; overwrites ``residual``, which must be contiguous."""
    rows = residual.view(residual.numel() // residual.shape[-1], residual.shape[-1])
    y = _launch(flat(x), rows, weight, eps, offset, add=True, early=early)
    return y.view(x.shape), residual


def fused_add_partials_rms_norm(
    parts: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    offset: float = 0.0,
    *,
    early: bool = False,
) -> tuple[Tensor, Tensor]:
    """The operation of ``treadle_layers_kit.kernel_ops``; overwrites ``residual``, which must be contiguous."""
    y = _launch(parts, residual, weight, eps, offset, add=True, early=early, parts=len(parts))
    return y, residual
