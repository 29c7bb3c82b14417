"""Packed weights as matrices, for the vendor's product."""

# Kernels are compiled from their source: their arguments are pointers and constants without types.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from treadle_kernels_triton.packed.numbers import constants_of, load_steps, numbers, table_of
from treadle_layers_kit.packed_layout import Levels

__all__ = ("packed_unpack_kernel", "unpack")


@triton.jit
def packed_unpack_kernel(
    codes, levels, scales, offsets, factors,  # as above, of one matrix
    out,  # [N, K]
    N, K,
    GROUP: tl.constexpr, RUN: tl.constexpr, PLACES: tl.constexpr, FLOATS: tl.constexpr, ASM: tl.constexpr,
    HAS_SCALES: tl.constexpr, HAS_OFFSETS: tl.constexpr, HAS_FACTORS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """A program writes one chunk of ``BLOCK_N`` outputs of ``out``, the weight."""
    DTYPE: tl.constexpr = out.dtype.element_ty
    chunk = tl.program_id(1)
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_run = tl.arange(0, RUN)
    mask_n = offs_n < N
    offs = (chunk * N + offs_n[:, None]).to(tl.int64) * RUN + offs_run[None, :]
    words = tl.load(codes + offs, mask=mask_n[:, None], other=0.0)
    NUMBER: tl.constexpr = DTYPE if ASM != "" else tl.float32
    w0, w1, w2, w3 = numbers(words, levels, NUMBER, ASM, PLACES, FLOATS)
    for place in tl.static_range(PLACES):
        w = w0 if place == 0 else w1 if place == 1 else w2 if place == 2 else w3
        offs_k = (chunk * PLACES + place) * RUN + offs_run
        group = tl.minimum((chunk * PLACES + place) * RUN // GROUP, tl.cdiv(K, GROUP) - 1)
        value = w.to(tl.float32)
        if HAS_SCALES:
            value *= load_steps(scales, group, offs_n, N, mask_n, HAS_SCALES)[:, None]
        if HAS_OFFSETS:
            value += load_steps(offsets, group, offs_n, N, mask_n, HAS_OFFSETS)[:, None]
        if HAS_FACTORS:
            value *= tl.load(factors + offs_n, mask=mask_n, other=0.0)[:, None]
        out_ptrs = out + offs_n.to(tl.int64)[:, None] * K + offs_k[None, :]
        tl.store(out_ptrs, value.to(DTYPE), mask=mask_n[:, None] & (offs_k < K)[None, :])


def unpack(
    codes: Tensor,
    scales: Tensor | None,
    offsets: Tensor | None,
    factors: Tensor | None,
    levels: Levels,
    in_features: int,
    group: int,
    dtype: torch.dtype,
) -> Tensor:
    """The weight ``[out, in]``."""
    num_chunks, out_features, _ = codes.shape
    out = torch.empty((out_features, in_features), dtype=dtype, device=codes.device)
    constants = constants_of(codes, scales, offsets, factors, levels, group, dtype)
    packed_unpack_kernel[(triton.cdiv(out_features, 64), num_chunks)](
        codes, table_of(levels, codes), *(out if t is None else t for t in (scales, offsets, factors)), out,
        out_features, in_features, **constants, BLOCK_N=64, num_warps=4,
    )  # fmt: skip
    return out
