"""The gate of a gated feed-forward layer."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from treadle_triton_kit.pdl import launch_dependents, wait_for_previous_kernel

__all__ = ("clamped_swiglu", "clamped_swiglu_kernel", "gate", "silu_and_mul", "silu_and_mul_kernel")


@triton.jit
def gate(x, up):
    """``silu(x) · up`` for float32 ``x`` that holds values of ``up``'s type; in ``up``'s type."""
    # Rounded where torch rounds, so that both give the same bits.
    return ((x / (1.0 + tl.exp(-x))).to(up.dtype) * up).to(up.dtype)


@triton.jit
def silu_and_mul_kernel(
    x, out, INTERMEDIATE_SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr, USE_PDL: tl.constexpr
):
    """One program computes ``BLOCK_SIZE`` features of one row: x ``[rows, 2 * INTERMEDIATE_SIZE]``, out ``[rows, INTERMEDIATE_SIZE]``."""
    launch_dependents(USE_PDL)
    row = tl.program_id(0).to(tl.int64)
    offs = tl.program_id(1) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    mask = offs < INTERMEDIATE_SIZE
    x_row = x + row * (2 * INTERMEDIATE_SIZE)
    wait_for_previous_kernel(USE_PDL)
    x_gate = tl.load(x_row + offs, mask=mask, other=0.0).to(tl.float32)
    x_up = tl.load(x_row + INTERMEDIATE_SIZE + offs, mask=mask, other=0.0)
    tl.store(out + row * INTERMEDIATE_SIZE + offs, gate(x_gate, x_up), mask=mask)


def silu_and_mul(x: Tensor, *, use_pdl: bool = False) -> Tensor:
    """See ``treadle_layers_kit.ops.silu_and_mul``."""
    size = x.shape[-1] // 2
    x = x.contiguous()
    out = torch.empty((*x.shape[:-1], size), dtype=x.dtype, device=x.device)
    num_rows = x.numel() // (2 * size)
    block_size = min(2048, triton.next_power_of_2(size))
    silu_and_mul_kernel[(num_rows, triton.cdiv(size, block_size))](
        x, out, INTERMEDIATE_SIZE=size, BLOCK_SIZE=block_size, USE_PDL=use_pdl,
        num_warps=max(1, block_size // 512), launch_pdl=use_pdl,
    )  # fmt: skip
    return out


@triton.jit
def clamped_swiglu_kernel(
    x, out, alpha, limit,
    INTERMEDIATE_SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """As ``silu_and_mul_kernel``, of pairs of features, ``x [rows, INTERMEDIATE_SIZE, 2]``."""
    launch_dependents(USE_PDL)
    row = tl.program_id(0).to(tl.int64)
    offs = tl.program_id(1) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    mask = offs < INTERMEDIATE_SIZE
    pairs = 2 * offs[:, None] + tl.arange(0, 2)[None, :]
    wait_for_previous_kernel(USE_PDL)
    x_row = x + row * (2 * INTERMEDIATE_SIZE)
    x_gate, x_up = tl.split(tl.load(x_row + pairs, mask=mask[:, None], other=0.0).to(tl.float32))
    x_gate = tl.minimum(x_gate, limit, propagate_nan=tl.PropagateNan.ALL)
    x_up = tl.clamp(x_up, -limit, limit, propagate_nan=tl.PropagateNan.ALL)
    value = x_gate / (1.0 + tl.exp(-alpha * x_gate)) * (x_up + 1.0)
    tl.store(out + row * INTERMEDIATE_SIZE + offs, value.to(out.dtype.element_ty), mask=mask)


def clamped_swiglu(x: Tensor, alpha: float, limit: float, *, use_pdl: bool = False) -> Tensor:
    """See ``treadle_layers_kit.ops.clamped_swiglu``; rounded once, where torch rounds each operation."""
    size = x.shape[-1] // 2
    x = x.contiguous()
    out = torch.empty((*x.shape[:-1], size), dtype=x.dtype, device=x.device)
    num_rows = x.numel() // (2 * size)
    block_size = min(1024, triton.next_power_of_2(size))
    clamped_swiglu_kernel[(num_rows, triton.cdiv(size, block_size))](
        x, out, float(alpha), float(limit), INTERMEDIATE_SIZE=size, BLOCK_SIZE=block_size, USE_PDL=use_pdl,
        num_warps=max(1, block_size // 256), launch_pdl=use_pdl,
    )  # fmt: skip
    return out
