"""Kernels of GPTQ's own packing: ``x @ W`` for few rows of ``x``, where the weight is unpacked in
registers, and the unpacked weight for the vendor's product of many."""

# Kernels are compiled from their source: their arguments are pointers and constants without types.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ("gptq_gemm", "gptq_gemm_kernel", "gptq_unpack", "gptq_unpack_kernel")

COLUMNS = 64
WORDS = 16
"""Words of a tile in the direction of the inputs: the least depth of a product."""


@triton.jit
def gptq_gemm_kernel(
    x, qweight, scales, zeros, index, out, rows, columns, words, share,
    GROUP: tl.constexpr, BITS: tl.constexpr, GATHER: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """One program computes ``[ROWS, COLUMNS]`` of ``out`` over ``share`` of the ``words``.

    x ``[rows, words · 32 / BITS]``, qweight int32 ``[words, columns]``, scales and zeros
    ``[groups, columns]``, out ``[splits, rows, columns]``. The codes at one place of all words of a
    tile are a matrix, whose inputs lie ``32 / BITS`` apart in ``x``: nothing is shuffled. Input
    ``i`` is of group ``i // GROUP``, or ``index[i]`` with GATHER.
    """
    EACH: tl.constexpr = 32 // BITS
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < columns
    begin = tl.program_id(2) * share
    end = tl.minimum(begin + share, words)
    depth = words * EACH
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for first in range(begin, end, WORDS):
        word = first + tl.arange(0, WORDS)
        here = word < end
        mask = here[:, None] & inside[None, :]
        packed = tl.load(qweight + word[:, None] * columns + column[None, :], mask=mask, other=0)
        if not GATHER:
            home = (word * EACH // GROUP)[:, None] * columns + column[None, :]
            scale = tl.load(scales + home, mask=mask, other=0.0).to(tl.float32)
            zero = tl.load(zeros + home, mask=mask, other=0.0).to(tl.float32)
        for place in tl.static_range(EACH):
            at = word * EACH + place
            left = tl.load(
                x + row[:, None] * depth + at[None, :],
                mask=(row[:, None] < rows) & here[None, :], other=0.0,
            )  # fmt: skip
            if GATHER:
                home = tl.load(index + at, mask=here, other=0)[:, None] * columns + column[None, :]
                scale = tl.load(scales + home, mask=mask, other=0.0).to(tl.float32)
                zero = tl.load(zeros + home, mask=mask, other=0.0).to(tl.float32)
            code = (packed >> (place * BITS)) & ((1 << BITS) - 1)
            right = (code.to(tl.float32) - zero) * scale
            total = tl.dot(left, right.to(left.dtype), total)
    at = out + (tl.program_id(2) * rows + row[:, None]) * columns + column[None, :]
    tl.store(at, total.to(out.dtype.element_ty), mask=(row[:, None] < rows) & inside[None, :])


def gptq_gemm(
    x: Tensor,
    qweight: Tensor,
    scales: Tensor,
    zeros: Tensor,
    bits: int,
    group: int,
    index: Tensor | None,
) -> Tensor:
    """``[rows, in] -> [rows, out]``; see ``packing.dequantize``.

    Without ``index``, ``group`` is a multiple of the codes in a word.
    """
    x = x.contiguous()
    words, columns = qweight.shape
    rows = len(x)
    blocks = triton.cdiv(columns, COLUMNS)
    # Few columns leave multiprocessors idle, so programs then share the inputs of a column.
    splits = max(1, min(8, 512 // blocks, words // (4 * WORDS)))
    share = triton.cdiv(triton.cdiv(words, splits), WORDS) * WORDS
    splits = triton.cdiv(words, share)
    height = 16 if rows <= 16 else 32
    kind = x.dtype if splits == 1 else torch.float32
    out = torch.empty((splits, rows, columns), dtype=kind, device=x.device)
    gptq_gemm_kernel[(blocks, triton.cdiv(rows, height), splits)](
        x, qweight, scales, zeros, scales if index is None else index, out,
        rows, columns, words, share,
        GROUP=group, BITS=bits, GATHER=index is not None,
        ROWS=height, COLUMNS=COLUMNS, WORDS=WORDS, num_warps=4, num_stages=3,
    )  # fmt: skip
    return out[0] if splits == 1 else out.sum(dim=0).to(x.dtype)


@triton.jit
def gptq_unpack_kernel(
    qweight, scales, zeros, index, out, columns, words,
    GROUP: tl.constexpr, BITS: tl.constexpr, GATHER: tl.constexpr,
    COLUMNS: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """One program writes the inputs of ``WORDS`` words, ``COLUMNS`` wide, of ``out``, the weight
    ``[words · 32 / BITS, columns]``. The others are those of ``gptq_gemm_kernel``."""
    EACH: tl.constexpr = 32 // BITS
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    word = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    here = word < words
    mask = here[:, None] & (column < columns)[None, :]
    packed = tl.load(qweight + word[:, None] * columns + column[None, :], mask=mask, other=0)
    if not GATHER:
        home = (word * EACH // GROUP)[:, None] * columns + column[None, :]
        scale = tl.load(scales + home, mask=mask, other=0.0).to(tl.float32)
        zero = tl.load(zeros + home, mask=mask, other=0.0).to(tl.float32)
    for place in tl.static_range(EACH):
        at = word * EACH + place
        if GATHER:
            home = tl.load(index + at, mask=here, other=0)[:, None] * columns + column[None, :]
            scale = tl.load(scales + home, mask=mask, other=0.0).to(tl.float32)
            zero = tl.load(zeros + home, mask=mask, other=0.0).to(tl.float32)
        code = (packed >> (place * BITS)) & ((1 << BITS) - 1)
        value = (code.to(tl.float32) - zero) * scale
        target = out + at.to(tl.int64)[:, None] * columns + column[None, :]
        tl.store(target, value.to(out.dtype.element_ty), mask=mask)


def gptq_unpack(
    qweight: Tensor,
    scales: Tensor,
    zeros: Tensor,
    bits: int,
    group: int,
    index: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """``packing.dequantize`` in one kernel, within the limits of ``gptq_gemm``."""
    words, columns = qweight.shape
    out = torch.empty((words * 32 // bits, columns), dtype=dtype, device=qweight.device)
    grid = triton.cdiv(columns, 2 * COLUMNS), triton.cdiv(words, 4)
    gptq_unpack_kernel[grid](
        qweight, scales, zeros, scales if index is None else index, out, columns, words,
        GROUP=group, BITS=bits, GATHER=index is not None, COLUMNS=2 * COLUMNS, WORDS=4, num_warps=4,
    )  # fmt: skip
    return out
