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

from treadle_kernels_triton.int4.tiles import Tile, shares
from treadle_layers_kit.int4_layout import CHUNK

__all__ = ("int4_kernel", "int4_unpack_kernel", "multiply", "unpack")


def _assembly(place: int, bias: str, add: str) -> tl.constexpr:
    """Two codes at ``place`` of two words become numbers in three instructions.

    The compiler would take them apart and convert each by itself.
    """
    shift = f"shr.b32 t, $1, {4 * place};" if place else "mov.b32 t, $1;"
    return tl.constexpr(
        f"{{ .reg .b32 t, one; {shift} lop3.b32 t, t, 0x000f000f, {bias}, 0xea; {add} }}"
    )


# bfloat16 has an instruction to add on Hopper only; Ampere multiplies by one and adds.
ADD_B = "mov.b32 one, 0x3f803f80; fma.rn.bf16x2 $0, t, one, $2;"
ADD_H = "add.rn.f16x2 $0, t, $2;"
B0, B1, B2, B3 = (_assembly(place, "0x43004300", ADD_B) for place in range(4))
H0, H1, H2, H3 = (_assembly(place, "0x64006400", ADD_H) for place in range(4))
# The weight times its scale, plus minus zero, which changes nothing.
SCALE_B = tl.constexpr("{ .reg .b32 z; mov.b32 z, 0x80008000; fma.rn.bf16x2 $0, $1, $2, z; }")
SCALE_H = tl.constexpr("mul.rn.f16x2 $0, $1, $2;")


@triton.jit
def _weights(words, step, PLACE: tl.constexpr, KIND: tl.constexpr, ASM: tl.constexpr):
    """``[N, 32]``: codes less zero points; in KIND, or in float32 for the interpreter."""
    lower = (step & 0xFFFF).to(tl.int16).to(KIND, bitcast=True)[:, None]
    if not ASM:
        bias: tl.constexpr = 128.0 if KIND.is_bf16() else 1024.0
        return ((words >> (4 * PLACE)) & 15).to(tl.float32) + (lower.to(tl.float32) + bias)
    if KIND.is_bf16():
        b: tl.constexpr = B0 if PLACE == 0 else B1 if PLACE == 1 else B2 if PLACE == 2 else B3
        return tl.inline_asm_elementwise(
            b, "=r,r,r", [words, lower], dtype=tl.bfloat16, is_pure=True, pack=2
        )
    else:
        h: tl.constexpr = H0 if PLACE == 0 else H1 if PLACE == 1 else H2 if PLACE == 2 else H3
        return tl.inline_asm_elementwise(
            h, "=r,r,r", [words, lower], dtype=tl.float16, is_pure=True, pack=2
        )


@triton.jit
def _scale(step):
    """float32 ``[N, 1]``."""
    return (step >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)[:, None]


@triton.jit
def _scaled(weights, scale, KIND: tl.constexpr, ASM: tl.constexpr):
    if not ASM:
        return weights * scale
    if KIND.is_bf16():
        return tl.inline_asm_elementwise(
            SCALE_B, "=r,r,r", [weights, scale.to(KIND)], dtype=tl.bfloat16, is_pure=True, pack=2
        )
    else:
        return tl.inline_asm_elementwise(
            SCALE_H, "=r,r,r", [weights, scale.to(KIND)], dtype=tl.float16, is_pure=True, pack=2
        )


@triton.jit
def _inputs(x, r, k, rows, depth, stride, EVEN: tl.constexpr, ASM: tl.constexpr):
    """``[32, R]`` of ``x`` transposed."""
    mask = (r < rows)[None, :]
    if not EVEN:
        mask = mask & (k < depth)[:, None]
    tile = tl.load(x + r[None, :] * stride + k[:, None], mask=mask, other=0.0)
    return tile if ASM else tile.to(tl.float32)


@triton.jit(do_not_specialize=("rows", "chunks", "share", "splits"))
def int4_kernel(
    x,  # [rows, depth], rows stride elements apart
    codes,  # int16 [chunks, width, 32]
    steps,  # int32 [depth / GROUP, width]
    out,  # [rows, width]
    parts,  # float32 [splits, rows, width] if SPLIT
    tickets,  # int32, zeros; left as they were
    rows, width, depth, chunks, share, splits, stride,
    GROUP: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, SPLIT: tl.constexpr,
    FOLD: tl.constexpr, EVEN: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """A program multiplies ``share`` chunks of inputs; the last one of a tile adds up the parts."""
    KIND: tl.constexpr = x.dtype.element_ty
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    r = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    i = tl.arange(0, 32)
    inside = n < width
    begin = tl.program_id(2) * share
    end = tl.minimum(begin + share, chunks)
    total = tl.zeros((BLOCK_N, BLOCK_R), dtype=tl.float32)
    for chunk in range(begin, end):
        at = (chunk * width + n[:, None]).to(tl.int64) * 32 + i[None, :]
        words = tl.load(codes + at, mask=inside[:, None], other=0)
        k = chunk * 128 + i
        x0 = _inputs(x, r, k, rows, depth, stride, EVEN, ASM)
        x1 = _inputs(x, r, k + 32, rows, depth, stride, EVEN, ASM)
        x2 = _inputs(x, r, k + 64, rows, depth, stride, EVEN, ASM)
        x3 = _inputs(x, r, k + 96, rows, depth, stride, EVEN, ASM)
        if GROUP % 128 == 0:
            step = tl.load(steps + chunk * 128 // GROUP * width + n, mask=inside, other=0)
            scale = _scale(step)
            w0 = _weights(words, step, 0, KIND, ASM)
            w1 = _weights(words, step, 1, KIND, ASM)
            w2 = _weights(words, step, 2, KIND, ASM)
            w3 = _weights(words, step, 3, KIND, ASM)
            if FOLD:
                total = tl.dot(_scaled(w0, scale, KIND, ASM), x0, total)
                total = tl.dot(_scaled(w1, scale, KIND, ASM), x1, total)
                total = tl.dot(_scaled(w2, scale, KIND, ASM), x2, total)
                total = tl.dot(_scaled(w3, scale, KIND, ASM), x3, total)
            else:
                part = tl.dot(w0, x0)
                part = tl.dot(w1, x1, part)
                part = tl.dot(w2, x2, part)
                part = tl.dot(w3, x3, part)
                total += part * scale
        else:
            for place in tl.static_range(4):
                own = x0 if place == 0 else x1 if place == 1 else x2 if place == 2 else x3
                # Beyond the last input there is no group, and what is read there is multiplied by 0.
                group = tl.minimum(chunk * 128 + place * 32, depth - 1) // GROUP
                step = tl.load(steps + group * width + n, mask=inside, other=0)
                total += tl.dot(_weights(words, step, place, KIND, ASM), own) * _scale(step)
    keep = inside[:, None] & (r < rows)[None, :]
    spot = r[None, :] * width + n[:, None]
    if not SPLIT:
        tl.store(out + spot, total.to(KIND), mask=keep)
    else:
        size = rows.to(tl.int64) * width
        tl.store(parts + tl.program_id(2) * size + spot, total, mask=keep)
        tl.debug_barrier()  # all threads have stored before one says so
        ticket = tickets + tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        if tl.atomic_add(ticket, 1, sem="acq_rel") == splits - 1:
            tl.debug_barrier()
            y = tl.zeros((BLOCK_N, BLOCK_R), dtype=tl.float32)
            for part in range(splits):
                y += tl.load(parts + part * size + spot, mask=keep, other=0.0, cache_modifier=".cg")
            tl.store(out + spot, y.to(KIND), mask=keep)
            tl.store(ticket, 0)


def multiply(
    x: Tensor,
    codes: Tensor,
    steps: Tensor,
    group: int,
    tile: Tile,
    tickets: Tensor,
    processors: int,
) -> Tensor:
    """``[rows, in] -> [rows, out]``; the elements of a row of ``x`` lie side by side."""
    rows, depth = x.shape
    chunks, width, _ = codes.shape
    down, across = triton.cdiv(rows, tile.rows), triton.cdiv(width, tile.outputs)
    splits, share = 1, chunks
    if down * across <= len(tickets):
        splits, share = shares(tile, down * across, chunks, processors)
    out = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    parts = out
    if splits > 1:
        parts = torch.empty((splits, rows, width), dtype=torch.float32, device=x.device)
    int4_kernel[(down, across, splits)](
        x, codes, steps, out, parts, tickets,
        rows, width, depth, chunks, share, splits, x.stride(0),
        GROUP=group, BLOCK_N=tile.outputs, BLOCK_R=tile.rows, SPLIT=splits > 1, FOLD=tile.fold,
        EVEN=depth % CHUNK == 0, ASM=x.is_cuda, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out


@triton.jit
def int4_unpack_kernel(
    codes, steps, out, width, depth,
    GROUP: tl.constexpr, BLOCK_N: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """A program writes one chunk of ``BLOCK_N`` outputs of ``out``, the weight ``[width, depth]``."""
    KIND: tl.constexpr = out.dtype.element_ty
    chunk = tl.program_id(1)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    i = tl.arange(0, 32)
    inside = n < width
    at = (chunk * width + n[:, None]).to(tl.int64) * 32 + i[None, :]
    words = tl.load(codes + at, mask=inside[:, None], other=0)
    for place in tl.static_range(4):
        k = chunk * 128 + place * 32 + i
        group = tl.minimum(chunk * 128 + place * 32, depth - 1) // GROUP
        step = tl.load(steps + group * width + n, mask=inside, other=0)
        weight = _weights(words, step, place, KIND, ASM).to(tl.float32) * _scale(step)
        target = out + n.to(tl.int64)[:, None] * depth + k[None, :]
        tl.store(target, weight.to(KIND), mask=inside[:, None] & (k < depth)[None, :])


def unpack(codes: Tensor, steps: Tensor, inputs: int, group: int, dtype: torch.dtype) -> Tensor:
    """The weight ``[out, in]``."""
    chunks, width, _ = codes.shape
    out = torch.empty((width, inputs), dtype=dtype, device=codes.device)
    int4_unpack_kernel[(triton.cdiv(width, 64), chunks)](
        codes, steps, out, width, inputs,
        GROUP=group, BLOCK_N=64, ASM=codes.is_cuda, num_warps=4,
    )  # fmt: skip
    return out
