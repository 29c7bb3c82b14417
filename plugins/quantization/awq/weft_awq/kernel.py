"""Kernels of AutoAWQ's own packing: ``x @ W`` for few rows of ``x``, where the weight is unpacked in
registers, and the unpacked weight for the vendor's product of many."""

# Kernels are compiled from their source: their arguments are pointers and constants without types.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ("awq_gemm", "awq_gemm_kernel", "awq_unpack", "awq_unpack_kernel")

COLUMNS = 128


@triton.jit
def weights_at(
    qweight, scales, zeros, first, columns,
    GROUP: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """float32 ``[DEPTH, COLUMNS]`` of the weight, from input ``first`` on; DEPTH divides GROUP."""
    word = tl.program_id(0) * (COLUMNS // 8) + tl.arange(0, COLUMNS // 8)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    shift = (((column % 8) >> 1) + (column & 1) * 4) * 4
    at = first + tl.arange(0, DEPTH)
    packed = tl.load(
        qweight + at[:, None] * (columns // 8) + word[None, :],
        mask=word[None, :] * 8 < columns, other=0,
    )  # fmt: skip
    packed = tl.interleave(packed, packed)
    packed = tl.interleave(packed, packed)
    packed = tl.interleave(packed, packed)
    code = (packed >> shift[None, :]) & 15
    home = (first // GROUP) * columns + column
    scale = tl.load(scales + home, mask=column < columns, other=0.0).to(tl.float32)
    zero = tl.load(zeros + home, mask=column < columns, other=0.0).to(tl.float32)
    return (code.to(tl.float32) - zero[None, :]) * scale[None, :]


@triton.jit
def awq_gemm_kernel(
    x, qweight, scales, zeros, out, rows, columns, depth, share,
    GROUP: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """One program computes ``[ROWS, COLUMNS]`` of ``out`` over ``share`` of the ``depth`` inputs.

    x ``[rows, depth]``, qweight int32 ``[depth, columns / 8]``, scales and zeros
    ``[depth / GROUP, columns]``, out ``[splits, rows, columns]``. DEPTH divides GROUP and share.
    """
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    begin = tl.program_id(2) * share
    end = tl.minimum(begin + share, depth)
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for first in range(begin, end, DEPTH):
        at = first + tl.arange(0, DEPTH)
        left = tl.load(x + row[:, None] * depth + at[None, :], mask=row[:, None] < rows, other=0.0)
        right = weights_at(qweight, scales, zeros, first, columns, GROUP, COLUMNS, DEPTH)
        total = tl.dot(left, right.to(left.dtype), total)
    at = out + (tl.program_id(2) * rows + row[:, None]) * columns + column[None, :]
    tl.store(
        at, total.to(out.dtype.element_ty), mask=(row[:, None] < rows) & (column[None, :] < columns)
    )


def awq_gemm(x: Tensor, qweight: Tensor, scales: Tensor, zeros: Tensor, group: int) -> Tensor:
    """``[rows, in] -> [rows, out]``; see ``packing.dequantize``. ``group`` is a multiple of 32."""
    x = x.contiguous()
    rows, depth = x.shape
    columns = qweight.shape[1] * 8
    step = 64 if group % 64 == 0 else 32
    blocks = triton.cdiv(columns, COLUMNS)
    # Few columns leave multiprocessors idle, so programs then share the inputs of a column.
    splits = max(1, min(8, 256 // blocks, depth // (4 * step)))
    share = triton.cdiv(triton.cdiv(depth, splits), step) * step
    splits = triton.cdiv(depth, share)
    height = 16 if rows <= 16 else 32
    kind = x.dtype if splits == 1 else torch.float32
    out = torch.empty((splits, rows, columns), dtype=kind, device=x.device)
    awq_gemm_kernel[(blocks, triton.cdiv(rows, height), splits)](
        x, qweight, scales, zeros, out, rows, columns, depth, share,
        GROUP=group, ROWS=height, COLUMNS=COLUMNS, DEPTH=step, num_warps=4, num_stages=4,
    )  # fmt: skip
    return out[0] if splits == 1 else out.sum(dim=0).to(x.dtype)


@triton.jit
def awq_unpack_kernel(
    qweight, scales, zeros, out, columns,
    GROUP: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """One program writes ``[DEPTH, COLUMNS]`` of ``out``, the weight ``[inputs, columns]``."""
    first = tl.program_id(1) * DEPTH
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    tile = weights_at(qweight, scales, zeros, first, columns, GROUP, COLUMNS, DEPTH)
    at = (first + tl.arange(0, DEPTH)).to(tl.int64)
    target = out + at[:, None] * columns + column[None, :]
    tl.store(target, tile.to(out.dtype.element_ty), mask=column[None, :] < columns)


def awq_unpack(
    qweight: Tensor, scales: Tensor, zeros: Tensor, group: int, dtype: torch.dtype
) -> Tensor:
    """``packing.dequantize`` in one kernel. ``group`` is a multiple of 32."""
    depth, columns = qweight.shape[0], qweight.shape[1] * 8
    out = torch.empty((depth, columns), dtype=dtype, device=qweight.device)
    awq_unpack_kernel[(triton.cdiv(columns, COLUMNS), depth // 32)](
        qweight, scales, zeros, out, columns, GROUP=group, COLUMNS=COLUMNS, DEPTH=32, num_warps=4
    )
    return out
