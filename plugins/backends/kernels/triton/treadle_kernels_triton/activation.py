"""The gate of a gated feed-forward layer."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from treadle_triton_kit.pdl import launch_dependents, wait_for_previous_kernel

__all__ = ("gate", "silu_and_mul", "silu_and_mul_kernel")


@triton.jit
def gate(x, up):
    """``silu(x) · up`` for float32 ``x`` that holds values of ``up``'s type; in ``up``'s type."""
    # Rounded where torch rounds, so that both give the same bits.
    return ((x / (1.0 + tl.exp(-x))).to(up.dtype) * up).to(up.dtype)


@triton.jit
def silu_and_mul_kernel(x, out, SIZE: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    """One program computes ``BLOCK`` features of one row: x ``[rows, 2 * SIZE]``, out ``[rows, SIZE]``."""
    launch_dependents(EARLY)
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < SIZE
    start = x + row * (2 * SIZE)
    wait_for_previous_kernel(EARLY)
    gated = tl.load(start + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(start + SIZE + at, mask=inside, other=0.0)
    tl.store(out + row * SIZE + at, gate(gated, up), mask=inside)


def silu_and_mul(x: Tensor, *, early: bool = False) -> Tensor:
    """See ``treadle_layers_kit.ops.silu_and_mul``."""
    size = x.shape[-1] // 2
    x = x.contiguous()
    out = torch.empty((*x.shape[:-1], size), dtype=x.dtype, device=x.device)
    rows = x.numel() // (2 * size)
    block = min(2048, triton.next_power_of_2(size))
    silu_and_mul_kernel[(rows, triton.cdiv(size, block))](
        x, out, SIZE=size, BLOCK=block, EARLY=early,
        num_warps=max(1, block // 512), launch_pdl=early,
    )  # fmt: skip
    return out
