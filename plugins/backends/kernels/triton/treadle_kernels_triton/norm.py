"""RMS normalisation of rows, with and without the residual addition before it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from treadle_kernels_triton.flatten import flatten_rows
from treadle_triton_kit.pdl import launch_dependents, wait_for_previous_kernel

__all__ = (
    "fused_add_partials_rms_norm",
    "fused_add_rms_norm",
    "norm_kernel",
    "rms_norm",
    "rms_normalize",
)


@triton.jit
def rms_normalize(x, gain, eps, HIDDEN_SIZE: tl.constexpr):
    """A row of HIDDEN_SIZE elements, float32 and zeros beyond, over its root mean square, times ``gain``."""
    return x * tl.rsqrt(tl.sum(x * x, axis=0) / HIDDEN_SIZE + eps) * gain


@triton.jit
def norm_kernel(
    x,  # [rows, HIDDEN_SIZE], rows x_stride elements apart; float32 [NUM_SPLITS, rows, HIDDEN_SIZE] unless NUM_SPLITS is 0
    residual,  # [rows, HIDDEN_SIZE]; replaced by x + residual. Not read unless HAS_RESIDUAL
    weight,  # [HIDDEN_SIZE]
    out,  # [rows, HIDDEN_SIZE]
    x_stride,
    eps,
    offset,
    HIDDEN_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,  # the power of two that holds HIDDEN_SIZE
    HAS_RESIDUAL: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """One program normalises one row; sums are in float32."""
    launch_dependents(USE_PDL)
    row = tl.program_id(0).to(tl.int64)
    offs = tl.arange(0, BLOCK_SIZE)
    mask = offs < HIDDEN_SIZE
    gain = tl.load(weight + offs, mask=mask, other=0.0).to(tl.float32) + offset
    wait_for_previous_kernel(USE_PDL)
    value = tl.load(x + row * x_stride + offs, mask=mask, other=0.0).to(tl.float32)
    if NUM_SPLITS > 0:
        split_stride = tl.cast(tl.num_programs(0), tl.int64) * HIDDEN_SIZE  # of a part
        for split in tl.static_range(1, NUM_SPLITS):  # so that all are on their way at once
            value += tl.load(
                x + split * split_stride + row * HIDDEN_SIZE + offs, mask=mask, other=0.0
            )
        # Rounded to what the linear layer would have given.
        value = value.to(out.dtype.element_ty).to(tl.float32)
    if HAS_RESIDUAL:
        residual_value = tl.load(residual + row * HIDDEN_SIZE + offs, mask=mask, other=0.0).to(
            tl.float32
        )
        # The sum is rounded to the model's dtype before it is used, as without the fusion.
        total = (value + residual_value).to(residual.dtype.element_ty)
        tl.store(residual + row * HIDDEN_SIZE + offs, total, mask=mask)
        value = total.to(tl.float32)
    value = rms_normalize(value, gain, eps, HIDDEN_SIZE)
    tl.store(out + row * HIDDEN_SIZE + offs, value.to(out.dtype.element_ty), mask=mask)


def _launch(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float, *,
    has_residual: bool, use_pdl: bool, num_splits: int = 0,
) -> Tensor:  # fmt: skip
    """``x`` and ``residual`` have two dimensions and dense rows; ``x`` three if there are ``num_splits``."""
    num_rows, hidden_size = residual.shape
    out = torch.empty((num_rows, hidden_size), dtype=residual.dtype, device=x.device)
    block_size = triton.next_power_of_2(hidden_size)
    norm_kernel[(num_rows,)](
        x, residual, weight, out, x.stride(-2), eps, offset,
        HIDDEN_SIZE=hidden_size, BLOCK_SIZE=block_size, HAS_RESIDUAL=has_residual, NUM_SPLITS=num_splits, USE_PDL=use_pdl,
        num_warps=min(16, max(1, block_size // 512)), launch_pdl=use_pdl,
    )  # fmt: skip
    return out


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, offset: float = 0.0, *, use_pdl: bool = False
) -> Tensor:
    """See ``treadle_layers_kit.ops.rms_norm``."""
    rows = flatten_rows(x)
    return _launch(rows, rows, weight, eps, offset, has_residual=False, use_pdl=use_pdl).view(
        x.shape
    )


def fused_add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    offset: float = 0.0,
    *,
    use_pdl: bool = False,
) -> tuple[Tensor, Tensor]:
    """See ``treadle_layers_kit.ops.fused_add_rms_norm``; overwrites ``residual``, which must be contiguous."""
    rows = residual.view(residual.numel() // residual.shape[-1], residual.shape[-1])
    y = _launch(flatten_rows(x), rows, weight, eps, offset, has_residual=True, use_pdl=use_pdl)
    return y.view(x.shape), residual


def fused_add_partials_rms_norm(
    partials: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    offset: float = 0.0,
    *,
    use_pdl: bool = False,
) -> tuple[Tensor, Tensor]:
    """The operation of ``treadle_layers_kit.kernel_ops``; overwrites ``residual``, which must be contiguous."""
    y = _launch(
        partials,
        residual,
        weight,
        eps,
        offset,
        has_residual=True,
        use_pdl=use_pdl,
        num_splits=len(partials),
    )
    return y, residual
