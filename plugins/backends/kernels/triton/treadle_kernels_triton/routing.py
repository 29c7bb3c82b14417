"""Which experts each token gets, and the sum of what they make of it."""

# Kernels are compiled from their source: their arguments are pointers and constants without types.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from treadle_kernels_triton.flatten import flatten_rows
from treadle_triton_kit.pdl import launch_dependents, wait_for_previous_kernel

__all__ = (
    "combine_experts",
    "combine_experts_kernel",
    "topk_softmax",
    "topk_softmax_kernel",
)


@triton.jit
def topk_softmax_kernel(
    logits,  # [rows, EXPERTS], rows stride elements apart
    weights, ids,  # float32 and int64 [rows, K]
    stride,
    EXPERTS: tl.constexpr, K: tl.constexpr,
    PADDED_EXPERTS: tl.constexpr, PADDED_K: tl.constexpr,  # powers of two that hold them
    NORMALIZE: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """A program takes the largest expert of one row K times."""
    launch_dependents(USE_PDL)
    row = tl.program_id(0).to(tl.int64)
    offs = tl.arange(0, PADDED_EXPERTS)
    offs_k = tl.arange(0, PADDED_K)
    wait_for_previous_kernel(USE_PDL)
    left = tl.load(logits + row * stride + offs, mask=offs < EXPERTS, other=float("-inf")).to(
        tl.float32
    )
    top = tl.max(left, 0)
    total = tl.sum(tl.exp(left - top), 0)
    found = tl.full([PADDED_K], float("-inf"), tl.float32)
    chosen = tl.zeros([PADDED_K], tl.int32)
    for place in tl.static_range(K):
        value, expert = tl.max(left, 0, return_indices=True)
        found = tl.where(offs_k == place, value, found)
        # A row of NaN chooses anything, which must be an expert all the same.
        chosen = tl.where(offs_k == place, tl.minimum(expert, EXPERTS - 1), chosen)
        left = tl.where(offs == expert, float("-inf"), left)
    shares = tl.exp(found - top)
    shares /= tl.sum(shares, 0) if NORMALIZE else total
    mask = offs_k < K
    tl.store(weights + row * K + offs_k, shares, mask=mask)
    tl.store(ids + row * K + offs_k, chosen.to(tl.int64), mask=mask)


def topk_softmax(
    logits: Tensor, k: int, normalize: bool, *, use_pdl: bool = False
) -> tuple[Tensor, Tensor]:
    """See ``treadle_layers_kit.ops.topk_softmax``; of equal experts the first is chosen."""
    logits = flatten_rows(logits)
    num_rows, num_experts = logits.shape
    weights = torch.empty((num_rows, k), dtype=torch.float32, device=logits.device)
    ids = torch.empty((num_rows, k), dtype=torch.int64, device=logits.device)
    if num_rows:
        topk_softmax_kernel[(num_rows,)](
            logits, weights, ids, logits.stride(0), EXPERTS=num_experts, K=k,
            PADDED_EXPERTS=triton.next_power_of_2(num_experts), PADDED_K=triton.next_power_of_2(k),
            NORMALIZE=bool(normalize), USE_PDL=use_pdl, num_warps=1, launch_pdl=use_pdl,
        )  # fmt: skip
    return weights, ids


@triton.jit
def combine_experts_kernel(
    y,  # [rows, K, SIZE]
    weights,  # float32 [rows, K]
    out,  # [rows, SIZE]
    SIZE: tl.constexpr, K: tl.constexpr, BLOCK_SIZE: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """A program adds up BLOCK_SIZE features of one row."""
    launch_dependents(USE_PDL)
    row = tl.program_id(0).to(tl.int64)
    offs = tl.program_id(1) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    mask = offs < SIZE
    wait_for_previous_kernel(USE_PDL)
    total = tl.zeros([BLOCK_SIZE], tl.float32)
    for place in tl.static_range(K):
        share = tl.load(weights + row * K + place)
        value = tl.load(y + (row * K + place) * SIZE + offs, mask=mask, other=0.0)
        total += share * value.to(tl.float32)
    tl.store(out + row * SIZE + offs, total.to(out.dtype.element_ty), mask=mask)


def combine_experts(y: Tensor, weights: Tensor, *, use_pdl: bool = False) -> Tensor:
    """See ``treadle_layers_kit.ops.combine_experts``."""
    num_rows, k, size = y.shape
    out = torch.empty((num_rows, size), dtype=y.dtype, device=y.device)
    block_size = min(1024, triton.next_power_of_2(size))
    if num_rows:
        combine_experts_kernel[(num_rows, triton.cdiv(size, block_size))](
            y.contiguous(), weights.contiguous(), out, SIZE=size, K=k, BLOCK_SIZE=block_size,
            USE_PDL=use_pdl, num_warps=max(1, block_size // 256), launch_pdl=use_pdl,
        )  # fmt: skip
    return out
