"""The features of rows in the order in which each expert has them."""

# Kernels are compiled from their source: their arguments are pointers and constants without types.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from treadle_triton_kit.pdl import launch_dependents, wait_for_previous_kernel

__all__ = ("reorder_experts", "reorder_experts_kernel")

BLOCK = 1024
"""Places of one program."""


@triton.jit(do_not_specialize=("shared", "num_experts"))
def reorder_experts_kernel(
    x,  # [rows, K], rows stride elements apart; as many as choices, divided by shared
    topk_ids,  # int64 [choices]
    order,  # int32 [num_experts, P]
    out,  # [choices, P]
    K, P, stride, shared, num_experts,
    BLOCK: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Program (choice, block of places)."""
    launch_dependents(USE_PDL)
    choice = tl.program_id(0).to(tl.int64)
    offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    wait_for_previous_kernel(USE_PDL)
    expert = tl.load(topk_ids + choice)
    # While kernels are compiled ahead, choices are what lay in their memory.
    mask = (offs < P) & (expert >= 0) & (expert < num_experts)
    places = tl.load(order + expert * P + offs, mask=mask, other=K)
    value = tl.load(x + choice // shared * stride + places, mask=places < K, other=0.0)
    tl.store(out + choice * P + offs, value, mask=offs < P)


def reorder_experts(x: Tensor, topk_ids: Tensor, order: Tensor, *, use_pdl: bool = False) -> Tensor:
    """See ``treadle_layers_kit.kernel_ops``."""
    num_experts, num_places = order.shape
    choices = topk_ids.numel()
    x = x if x.stride(1) == 1 else x.contiguous()
    out = torch.empty((choices, num_places), dtype=x.dtype, device=x.device)
    if choices:
        reorder_experts_kernel[(choices, triton.cdiv(num_places, BLOCK))](
            x, topk_ids.contiguous(), order, out, x.shape[1], num_places, x.stride(0), choices // len(x), num_experts,
            BLOCK=BLOCK, USE_PDL=use_pdl, num_warps=4, launch_pdl=use_pdl,
        )  # fmt: skip
    return out
