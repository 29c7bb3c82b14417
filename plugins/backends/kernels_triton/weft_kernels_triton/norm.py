"""RMS normalisation of rows, with and without the residual addition before it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft_kernels_triton.overlap import await_results, start_next

__all__ = ("add_rms_norm", "norm_kernel", "normalised", "rms_norm")


@triton.jit
def normalised(value, gain, eps, SIZE: tl.constexpr):
    """A row of SIZE elements, float32 and zeros beyond, over its root mean square, times ``gain``."""
    return value * tl.rsqrt(tl.sum(value * value, axis=0) / SIZE + eps) * gain


@triton.jit
def norm_kernel(
    x,  # [rows, SIZE], rows x_stride elements apart
    residual,  # [rows, SIZE]; replaced by x + residual. Not read unless ADD
    weight,  # [SIZE]
    out,  # [rows, SIZE]
    x_stride,
    eps,
    offset,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,  # the power of two that holds SIZE
    ADD: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One program normalises one row; sums are in float32."""
    start_next(EARLY)
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < SIZE
    gain = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32) + offset
    await_results(EARLY)
    value = tl.load(x + row * x_stride + at, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        before = tl.load(residual + row * SIZE + at, mask=inside, other=0.0).to(tl.float32)
        # The sum is rounded to the model's dtype before it is used, as without the fusion.
        total = (value + before).to(residual.dtype.element_ty)
        tl.store(residual + row * SIZE + at, total, mask=inside)
        value = total.to(tl.float32)
    value = normalised(value, gain, eps, SIZE)
    tl.store(out + row * SIZE + at, value.to(out.dtype.element_ty), mask=inside)


def _launch(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float, add: bool,
    early: bool,
) -> Tensor:  # fmt: skip
    size = x.shape[-1]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows = x.reshape(-1, size) if x.dim() != 2 else x
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    block = triton.next_power_of_2(size)
    norm_kernel[(rows.shape[0],)](
        rows, residual, weight, out, rows.stride(0), eps, offset,
        SIZE=size, BLOCK=block, ADD=add, EARLY=early,
        num_warps=min(16, max(1, block // 512)), launch_pdl=early,
    )  # fmt: skip
    return out


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, offset: float = 0.0, *, early: bool = False
) -> Tensor:
    """See ``weft.layers.ops.rms_norm``."""
    return _launch(x, x, weight, eps, offset, False, early)


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    offset: float = 0.0,
    *,
    early: bool = False,
) -> tuple[Tensor, Tensor]:
    """See ``weft.layers.ops.add_rms_norm``; overwrites ``residual``, which must be contiguous."""
    return _launch(x, residual, weight, eps, offset, True, early), residual
