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
    x, qweight, scales, zeros, g_idx, out, M, N, num_words, words_per_split,
    GROUP_SIZE: tl.constexpr, BITS: tl.constexpr, HAS_G_IDX: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_WORDS: tl.constexpr,
):  # fmt: skip
    """One program computes ``[BLOCK_M, BLOCK_N]`` of ``out`` over ``words_per_split`` of the ``num_words``.

    x ``[M, num_words · 32 / BITS]``, qweight int32 ``[num_words, N]``, scales and zeros
    ``[groups, N]``, out ``[splits, M, N]``. The codes at one place of all words of a
    tile are a matrix, whose inputs lie ``32 / BITS`` apart in ``x``: nothing is shuffled. Input
    ``i`` is of group ``i // GROUP_SIZE``, or ``g_idx[i]`` with HAS_G_IDX.
    """
    CODES_PER_WORD: tl.constexpr = 32 // BITS
    offs_m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_n = offs_n < N
    first_word = tl.program_id(2) * words_per_split
    end_word = tl.minimum(first_word + words_per_split, num_words)
    K = num_words * CODES_PER_WORD
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for word_start in range(first_word, end_word, BLOCK_WORDS):
        offs_word = word_start + tl.arange(0, BLOCK_WORDS)
        mask_word = offs_word < end_word
        mask = mask_word[:, None] & mask_n[None, :]
        packed = tl.load(qweight + offs_word[:, None] * N + offs_n[None, :], mask=mask, other=0)
        if not HAS_G_IDX:
            scale_offs = (offs_word * CODES_PER_WORD // GROUP_SIZE)[:, None] * N + offs_n[None, :]
            scale = tl.load(scales + scale_offs, mask=mask, other=0.0).to(tl.float32)
            zero = tl.load(zeros + scale_offs, mask=mask, other=0.0).to(tl.float32)
        for code_idx in tl.static_range(CODES_PER_WORD):
            offs_k = offs_word * CODES_PER_WORD + code_idx
            x_tile = tl.load(
                x + offs_m[:, None] * K + offs_k[None, :],
                mask=(offs_m[:, None] < M) & mask_word[None, :], other=0.0,
            )  # fmt: skip
            if HAS_G_IDX:
                scale_offs = (
                    tl.load(g_idx + offs_k, mask=mask_word, other=0)[:, None] * N + offs_n[None, :]
                )
                scale = tl.load(scales + scale_offs, mask=mask, other=0.0).to(tl.float32)
                zero = tl.load(zeros + scale_offs, mask=mask, other=0.0).to(tl.float32)
            code = (packed >> (code_idx * BITS)) & ((1 << BITS) - 1)
            w_tile = (code.to(tl.float32) - zero) * scale
            acc = tl.dot(x_tile, w_tile.to(x_tile.dtype), acc)
    out_ptrs = out + (tl.program_id(2) * M + offs_m[:, None]) * N + offs_n[None, :]
    tl.store(out_ptrs, acc.to(out.dtype.element_ty), mask=(offs_m[:, None] < M) & mask_n[None, :])


def gptq_gemm(
    x: Tensor,
    qweight: Tensor,
    scales: Tensor,
    zeros: Tensor,
    bits: int,
    group_size: int,
    g_idx: Tensor | None,
) -> Tensor:
    """``[num_rows, in] -> [num_rows, out]``; see ``packing.dequantize``.

    Without ``g_idx``, ``group_size`` is a multiple of the codes in a word.
    """
    x = x.contiguous()
    num_words, out_features = qweight.shape
    num_rows = len(x)
    n_tiles = triton.cdiv(out_features, COLUMNS)
    # Few columns leave multiprocessors idle, so programs then share the inputs of a column.
    num_splits = max(1, min(8, 512 // n_tiles, num_words // (4 * WORDS)))
    words_per_split = triton.cdiv(triton.cdiv(num_words, num_splits), WORDS) * WORDS
    num_splits = triton.cdiv(num_words, words_per_split)
    block_m = 16 if num_rows <= 16 else 32
    out_dtype = x.dtype if num_splits == 1 else torch.float32
    out = torch.empty((num_splits, num_rows, out_features), dtype=out_dtype, device=x.device)
    gptq_gemm_kernel[(n_tiles, triton.cdiv(num_rows, block_m), num_splits)](
        x, qweight, scales, zeros, scales if g_idx is None else g_idx, out,
        num_rows, out_features, num_words, words_per_split,
        GROUP_SIZE=group_size, BITS=bits, HAS_G_IDX=g_idx is not None,
        BLOCK_M=block_m, BLOCK_N=COLUMNS, BLOCK_WORDS=WORDS, num_warps=4, num_stages=3,
    )  # fmt: skip
    return out[0] if num_splits == 1 else out.sum(dim=0).to(x.dtype)


@triton.jit
def gptq_unpack_kernel(
    qweight, scales, zeros, g_idx, out, N, num_words,
    GROUP_SIZE: tl.constexpr, BITS: tl.constexpr, HAS_G_IDX: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_WORDS: tl.constexpr,
):  # fmt: skip
    """One program writes the inputs of ``BLOCK_WORDS`` words, ``BLOCK_N`` wide, of ``out``, the weight
    ``[num_words · 32 / BITS, N]``. The others are those of ``gptq_gemm_kernel``."""
    CODES_PER_WORD: tl.constexpr = 32 // BITS
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_word = tl.program_id(1) * BLOCK_WORDS + tl.arange(0, BLOCK_WORDS)
    mask_word = offs_word < num_words
    mask = mask_word[:, None] & (offs_n < N)[None, :]
    packed = tl.load(qweight + offs_word[:, None] * N + offs_n[None, :], mask=mask, other=0)
    if not HAS_G_IDX:
        scale_offs = (offs_word * CODES_PER_WORD // GROUP_SIZE)[:, None] * N + offs_n[None, :]
        scale = tl.load(scales + scale_offs, mask=mask, other=0.0).to(tl.float32)
        zero = tl.load(zeros + scale_offs, mask=mask, other=0.0).to(tl.float32)
    for code_idx in tl.static_range(CODES_PER_WORD):
        offs_k = offs_word * CODES_PER_WORD + code_idx
        if HAS_G_IDX:
            scale_offs = (
                tl.load(g_idx + offs_k, mask=mask_word, other=0)[:, None] * N + offs_n[None, :]
            )
            scale = tl.load(scales + scale_offs, mask=mask, other=0.0).to(tl.float32)
            zero = tl.load(zeros + scale_offs, mask=mask, other=0.0).to(tl.float32)
        code = (packed >> (code_idx * BITS)) & ((1 << BITS) - 1)
        value = (code.to(tl.float32) - zero) * scale
        out_ptrs = out + offs_k.to(tl.int64)[:, None] * N + offs_n[None, :]
        tl.store(out_ptrs, value.to(out.dtype.element_ty), mask=mask)


def gptq_unpack(
    qweight: Tensor,
    scales: Tensor,
    zeros: Tensor,
    bits: int,
    group_size: int,
    g_idx: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """``packing.dequantize`` in one kernel, within the limits of ``gptq_gemm``."""
    num_words, out_features = qweight.shape
    out = torch.empty((num_words * 32 // bits, out_features), dtype=dtype, device=qweight.device)
    grid = triton.cdiv(out_features, 2 * COLUMNS), triton.cdiv(num_words, 4)
    gptq_unpack_kernel[grid](
        qweight, scales, zeros, scales if g_idx is None else g_idx, out, out_features, num_words,
        GROUP_SIZE=group_size, BITS=bits, HAS_G_IDX=g_idx is not None, BLOCK_N=2 * COLUMNS, BLOCK_WORDS=4, num_warps=4,
    )  # fmt: skip
    return out
