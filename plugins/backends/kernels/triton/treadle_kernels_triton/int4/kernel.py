"""Triton's kernels of four-bit weights, which read the layout of ``treadle_layers_kit.int4_layout``.

``multiply`` computes the transposed product, so that the weight is the left operand of the tensor
cores: that side is never padded, however few rows there are, and it is read from registers, where
the codes become numbers. Zero points and scales come along with the codes, some tiles ahead.
"""

# Kernels are compiled from their source: their arguments are pointers and constants without types.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from treadle_kernels_triton.int4.tiles import Tile, split_k
from treadle_layers_kit.int4_layout import CHUNK

__all__ = ("int4_kernel", "int4_unpack_kernel", "multiply", "unpack")


def _unpack_asm(nibble: int, bias: str, add: str) -> tl.constexpr:
    """Two codes at ``nibble`` of two words become numbers in three instructions.

    The compiler would take them apart and convert each by itself.
    """
    shift = f"shr.b32 t, $1, {4 * nibble};" if nibble else "mov.b32 t, $1;"
    return tl.constexpr(
        f"{{ .reg .b32 t, one; {shift} lop3.b32 t, t, 0x000f000f, {bias}, 0xea; {add} }}"
    )


# bfloat16 has an instruction to add on Hopper only; Ampere multiplies by one and adds.
ADD_BF16 = "mov.b32 one, 0x3f803f80; fma.rn.bf16x2 $0, t, one, $2;"
ADD_FP16 = "add.rn.f16x2 $0, t, $2;"
BF16_NIBBLE0, BF16_NIBBLE1, BF16_NIBBLE2, BF16_NIBBLE3 = (
    _unpack_asm(place, "0x43004300", ADD_BF16) for place in range(4)
)
FP16_NIBBLE0, FP16_NIBBLE1, FP16_NIBBLE2, FP16_NIBBLE3 = (
    _unpack_asm(place, "0x64006400", ADD_FP16) for place in range(4)
)
# The weight times its scale, plus minus zero, which changes nothing.
SCALE_BF16 = tl.constexpr("{ .reg .b32 z; mov.b32 z, 0x80008000; fma.rn.bf16x2 $0, $1, $2, z; }")
SCALE_FP16 = tl.constexpr("mul.rn.f16x2 $0, $1, $2;")


@triton.jit
def _unpack_weights(
    words, scale_zero, NIBBLE: tl.constexpr, DTYPE: tl.constexpr, USE_ASM: tl.constexpr
):
    """``[N, 32]``: codes less zero points; in DTYPE, or in float32 for the interpreter."""
    zero = (scale_zero & 0xFFFF).to(tl.int16).to(DTYPE, bitcast=True)[:, None]
    if not USE_ASM:
        bias: tl.constexpr = 128.0 if DTYPE.is_bf16() else 1024.0
        return ((words >> (4 * NIBBLE)) & 15).to(tl.float32) + (zero.to(tl.float32) + bias)
    if DTYPE.is_bf16():
        asm_bf16: tl.constexpr = (
            BF16_NIBBLE0
            if NIBBLE == 0
            else BF16_NIBBLE1
            if NIBBLE == 1
            else BF16_NIBBLE2
            if NIBBLE == 2
            else BF16_NIBBLE3
        )
        return tl.inline_asm_elementwise(
            asm_bf16, "=r,r,r", [words, zero], dtype=tl.bfloat16, is_pure=True, pack=2
        )
    else:
        asm_fp16: tl.constexpr = (
            FP16_NIBBLE0
            if NIBBLE == 0
            else FP16_NIBBLE1
            if NIBBLE == 1
            else FP16_NIBBLE2
            if NIBBLE == 2
            else FP16_NIBBLE3
        )
        return tl.inline_asm_elementwise(
            asm_fp16, "=r,r,r", [words, zero], dtype=tl.float16, is_pure=True, pack=2
        )


@triton.jit
def _unpack_scale(scale_zero):
    """float32 ``[N, 1]``."""
    return (scale_zero >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)[:, None]


@triton.jit
def _apply_scale(weights, scale, DTYPE: tl.constexpr, USE_ASM: tl.constexpr):
    if not USE_ASM:
        return weights * scale
    if DTYPE.is_bf16():
        return tl.inline_asm_elementwise(
            SCALE_BF16,
            "=r,r,r",
            [weights, scale.to(DTYPE)],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=2,
        )
    else:
        return tl.inline_asm_elementwise(
            SCALE_FP16, "=r,r,r", [weights, scale.to(DTYPE)], dtype=tl.float16, is_pure=True, pack=2
        )


@triton.jit
def _load_x(x, offs_m, offs_k, M, K, stride, EVEN_K: tl.constexpr, USE_ASM: tl.constexpr):
    """``[32, R]`` of ``x`` transposed."""
    mask = (offs_m < M)[None, :]
    if not EVEN_K:
        mask = mask & (offs_k < K)[:, None]
    tile = tl.load(x + offs_m[None, :] * stride + offs_k[:, None], mask=mask, other=0.0)
    return tile if USE_ASM else tile.to(tl.float32)


@triton.jit(do_not_specialize=("M", "num_chunks", "chunks_per_split", "num_splits"))
def int4_kernel(
    x,  # [M, K], rows stride elements apart
    codes,  # int16 [num_chunks, N, 32]
    scales_and_zeros,  # int32 [K / GROUP_SIZE, N]
    out,  # [M, N]
    partials,  # float32 [num_splits, M, N] if SPLIT_K
    tile_counters,  # int32, zeros; left as they were
    M, N, K, num_chunks, chunks_per_split, num_splits, stride,
    GROUP_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, SPLIT_K: tl.constexpr,
    FOLD_SCALES: tl.constexpr, EVEN_K: tl.constexpr, USE_ASM: tl.constexpr,
):  # fmt: skip
    """A program multiplies ``chunks_per_split`` chunks of inputs; the last one of a tile adds up the parts."""
    DTYPE: tl.constexpr = x.dtype.element_ty
    offs_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_word = tl.arange(0, 32)
    mask_n = offs_n < N
    first_chunk = tl.program_id(2) * chunks_per_split
    end_chunk = tl.minimum(first_chunk + chunks_per_split, num_chunks)
    acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    for chunk in range(first_chunk, end_chunk):
        offs = (chunk * N + offs_n[:, None]).to(tl.int64) * 32 + offs_word[None, :]
        words = tl.load(codes + offs, mask=mask_n[:, None], other=0)
        offs_k = chunk * 128 + offs_word
        x0 = _load_x(x, offs_m, offs_k, M, K, stride, EVEN_K, USE_ASM)
        x1 = _load_x(x, offs_m, offs_k + 32, M, K, stride, EVEN_K, USE_ASM)
        x2 = _load_x(x, offs_m, offs_k + 64, M, K, stride, EVEN_K, USE_ASM)
        x3 = _load_x(x, offs_m, offs_k + 96, M, K, stride, EVEN_K, USE_ASM)
        if GROUP_SIZE % 128 == 0:
            scale_zero = tl.load(
                scales_and_zeros + chunk * 128 // GROUP_SIZE * N + offs_n, mask=mask_n, other=0
            )
            scale = _unpack_scale(scale_zero)
            w0 = _unpack_weights(words, scale_zero, 0, DTYPE, USE_ASM)
            w1 = _unpack_weights(words, scale_zero, 1, DTYPE, USE_ASM)
            w2 = _unpack_weights(words, scale_zero, 2, DTYPE, USE_ASM)
            w3 = _unpack_weights(words, scale_zero, 3, DTYPE, USE_ASM)
            if FOLD_SCALES:
                acc = tl.dot(_apply_scale(w0, scale, DTYPE, USE_ASM), x0, acc)
                acc = tl.dot(_apply_scale(w1, scale, DTYPE, USE_ASM), x1, acc)
                acc = tl.dot(_apply_scale(w2, scale, DTYPE, USE_ASM), x2, acc)
                acc = tl.dot(_apply_scale(w3, scale, DTYPE, USE_ASM), x3, acc)
            else:
                group_acc = tl.dot(w0, x0)
                group_acc = tl.dot(w1, x1, group_acc)
                group_acc = tl.dot(w2, x2, group_acc)
                group_acc = tl.dot(w3, x3, group_acc)
                acc += group_acc * scale
        else:
            for nibble in tl.static_range(4):
                x_part = x0 if nibble == 0 else x1 if nibble == 1 else x2 if nibble == 2 else x3
                # Beyond the last input there is no group, and what is read there is multiplied by 0.
                group_idx = tl.minimum(chunk * 128 + nibble * 32, K - 1) // GROUP_SIZE
                scale_zero = tl.load(
                    scales_and_zeros + group_idx * N + offs_n, mask=mask_n, other=0
                )
                acc += tl.dot(
                    _unpack_weights(words, scale_zero, nibble, DTYPE, USE_ASM), x_part
                ) * _unpack_scale(scale_zero)
    mask = mask_n[:, None] & (offs_m < M)[None, :]
    out_offs = offs_m[None, :] * N + offs_n[:, None]
    if not SPLIT_K:
        tl.store(out + out_offs, acc.to(DTYPE), mask=mask)
    else:
        partial_size = M.to(tl.int64) * N
        tl.store(partials + tl.program_id(2) * partial_size + out_offs, acc, mask=mask)
        tl.debug_barrier()  # all threads have stored before one says so
        counter = tile_counters + tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        if tl.atomic_add(counter, 1, sem="acq_rel") == num_splits - 1:
            tl.debug_barrier()
            y = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
            for split in range(num_splits):
                y += tl.load(
                    partials + split * partial_size + out_offs,
                    mask=mask,
                    other=0.0,
                    cache_modifier=".cg",
                )
            tl.store(out + out_offs, y.to(DTYPE), mask=mask)
            tl.store(counter, 0)


def multiply(
    x: Tensor,
    codes: Tensor,
    scales_and_zeros: Tensor,
    group_size: int,
    tile: Tile,
    tile_counters: Tensor,
    num_sms: int,
) -> Tensor:
    """``[num_rows, in] -> [num_rows, out]``; the elements of a row of ``x`` lie side by side."""
    num_rows, in_features = x.shape
    num_chunks, out_features, _ = codes.shape
    m_tiles, n_tiles = triton.cdiv(num_rows, tile.block_m), triton.cdiv(out_features, tile.block_n)
    num_splits, chunks_per_split = 1, num_chunks
    if m_tiles * n_tiles <= len(tile_counters):
        num_splits, chunks_per_split = split_k(tile, m_tiles * n_tiles, num_chunks, num_sms)
    out = torch.empty((num_rows, out_features), dtype=x.dtype, device=x.device)
    partials = out
    if num_splits > 1:
        partials = torch.empty(
            (num_splits, num_rows, out_features), dtype=torch.float32, device=x.device
        )
    int4_kernel[(m_tiles, n_tiles, num_splits)](
        x, codes, scales_and_zeros, out, partials, tile_counters,
        num_rows, out_features, in_features, num_chunks, chunks_per_split, num_splits, x.stride(0),
        GROUP_SIZE=group_size, BLOCK_N=tile.block_n, BLOCK_M=tile.block_m, SPLIT_K=num_splits > 1, FOLD_SCALES=tile.fold_scales,
        EVEN_K=in_features % CHUNK == 0, USE_ASM=x.is_cuda, num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    return out


@triton.jit
def _unpack_nibble(
    words, steps, mask_n, chunk, N, K, NIBBLE: tl.constexpr,
    GROUP_SIZE: tl.constexpr, DTYPE: tl.constexpr, USE_ASM: tl.constexpr,
):  # fmt: skip
    """The weights ``[BLOCK_N, 32]`` at a place of ``words``."""
    group_idx = tl.minimum(chunk * 128 + NIBBLE * 32, K - 1) // GROUP_SIZE
    scale_zero = tl.load(steps + group_idx * N, mask=mask_n, other=0)
    weight = _unpack_weights(words, scale_zero, NIBBLE, DTYPE, USE_ASM).to(tl.float32)
    return (weight * _unpack_scale(scale_zero)).to(DTYPE)


@triton.jit
def int4_unpack_kernel(
    codes, scales_and_zeros, out, N, K,
    GROUP_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, USE_ASM: tl.constexpr,
):  # fmt: skip
    """A program writes one chunk of ``BLOCK_N`` outputs of ``out``, the weight ``[N, K]``."""
    DTYPE: tl.constexpr = out.dtype.element_ty
    chunk = tl.program_id(1)
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_word = tl.arange(0, 32)
    mask_n = offs_n < N
    offs = (chunk * N + offs_n[:, None]).to(tl.int64) * 32 + offs_word[None, :]
    words = tl.load(codes + offs, mask=mask_n[:, None], other=0)
    steps = scales_and_zeros + offs_n
    w0 = _unpack_nibble(words, steps, mask_n, chunk, N, K, 0, GROUP_SIZE, DTYPE, USE_ASM)
    w1 = _unpack_nibble(words, steps, mask_n, chunk, N, K, 1, GROUP_SIZE, DTYPE, USE_ASM)
    w2 = _unpack_nibble(words, steps, mask_n, chunk, N, K, 2, GROUP_SIZE, DTYPE, USE_ASM)
    w3 = _unpack_nibble(words, steps, mask_n, chunk, N, K, 3, GROUP_SIZE, DTYPE, USE_ASM)
    # 256 bytes of a row together: four stores of 64 took an eighth longer.
    weight = tl.permute(tl.join(tl.join(w0, w1), tl.join(w2, w3)), (0, 3, 2, 1))
    offs_k = chunk * 128 + tl.arange(0, 128)
    out_ptrs = out + offs_n.to(tl.int64)[:, None] * K + offs_k[None, :]
    mask = mask_n[:, None] & (offs_k < K)[None, :]
    tl.store(out_ptrs, tl.reshape(weight, (BLOCK_N, 128)), mask=mask)


def unpack(
    codes: Tensor, scales_and_zeros: Tensor, in_features: int, group_size: int, dtype: torch.dtype
) -> Tensor:
    """The weight ``[out, in]``."""
    num_chunks, out_features, _ = codes.shape
    out = torch.empty((out_features, in_features), dtype=dtype, device=codes.device)
    int4_unpack_kernel[(triton.cdiv(out_features, 64), num_chunks)](
        codes, scales_and_zeros, out, out_features, in_features,
        GROUP_SIZE=group_size, BLOCK_N=64, USE_ASM=codes.is_cuda, num_warps=4,
    )  # fmt: skip
    return out
