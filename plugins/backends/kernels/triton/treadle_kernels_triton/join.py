"""What programs that shared the depth of a linear layer have found, added up."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from treadle_triton_kit.pdl import launch_dependents, wait_for_previous_kernel

__all__ = ("reduce_split_k", "reduce_split_k_kernel")


# Not specialized: one kernel for all numbers of rows.
@triton.jit(do_not_specialize=("size", "features", "biased"))
def reduce_split_k_kernel(
    parts,  # float32 [PARTS, size]
    bias,  # [features], if biased
    out,  # [size]
    size,
    features,  # of which size is a multiple
    biased,  # 0 or 1
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    """A program adds ``BLOCK`` numbers, always in the same order."""
    launch_dependents(EARLY)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    total = tl.load(bias + at % features, mask=inside & (biased > 0), other=0.0).to(tl.float32)
    wait_for_previous_kernel(EARLY)
    for part in tl.static_range(PARTS):
        total += tl.load(parts + part * size + at, mask=inside, other=0.0)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=inside)


def reduce_split_k(
    parts: Tensor, bias: Tensor | None, dtype: torch.dtype, *, early: bool = False
) -> Tensor:
    """``parts`` float32 ``[parts, rows, features]``, contiguous; ``[rows, features]`` of ``dtype``."""
    count, rows, features = parts.shape
    out = torch.empty((rows, features), dtype=dtype, device=parts.device)
    block = 1024
    reduce_split_k_kernel[(triton.cdiv(rows * features, block),)](
        parts, out if bias is None else bias, out, rows * features, features,
        int(bias is not None),
        PARTS=count, BLOCK=block, EARLY=early, num_warps=4, launch_pdl=early,
    )  # fmt: skip
    return out
