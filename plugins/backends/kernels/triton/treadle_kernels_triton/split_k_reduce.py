"""What programs that shared the depth of a linear layer have found, added up."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from treadle_triton_kit.pdl import launch_dependents, wait_for_previous_kernel

__all__ = ("reduce_split_k", "reduce_split_k_kernel")


# Not specialized: one kernel for all numbers of rows.
@triton.jit(do_not_specialize=("size", "features", "has_bias"))
def reduce_split_k_kernel(
    partials,  # float32 [NUM_SPLITS, size]
    bias,  # [features], if biased
    out,  # [size]
    size,
    features,  # of which size is a multiple
    has_bias,  # 0 or 1
    NUM_SPLITS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """A program adds ``BLOCK_SIZE`` numbers, always in the same order."""
    launch_dependents(USE_PDL)
    offs = tl.program_id(0) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    mask = offs < size
    acc = tl.load(bias + offs % features, mask=mask & (has_bias > 0), other=0.0).to(tl.float32)
    wait_for_previous_kernel(USE_PDL)
    for split in tl.static_range(NUM_SPLITS):
        acc += tl.load(partials + split * size + offs, mask=mask, other=0.0)
    tl.store(out + offs, acc.to(out.dtype.element_ty), mask=mask)


def reduce_split_k(
    partials: Tensor, bias: Tensor | None, dtype: torch.dtype, *, use_pdl: bool = False
) -> Tensor:
    """``partials`` float32 ``[num_splits, rows, features]``, contiguous; ``[rows, features]`` of ``dtype``."""
    num_splits, rows, features = partials.shape
    out = torch.empty((rows, features), dtype=dtype, device=partials.device)
    block_size = 1024
    reduce_split_k_kernel[(triton.cdiv(rows * features, block_size),)](
        partials, out if bias is None else bias, out, rows * features, features,
        int(bias is not None),
        NUM_SPLITS=num_splits, BLOCK_SIZE=block_size, USE_PDL=use_pdl, num_warps=4, launch_pdl=use_pdl,
    )  # fmt: skip
    return out
