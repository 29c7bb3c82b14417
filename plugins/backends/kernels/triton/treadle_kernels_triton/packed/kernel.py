"""Triton's kernels of packed weights, which read the layout of ``treadle_layers_kit.packed_layout``.

As in ``int4.kernel``, the weight is the left operand of the tensor cores, read from registers, where codes
become numbers, and products of a group are scaled in float32. The scales of the next chunk are on their way
while one is multiplied.
"""

# Kernels are compiled from their source: their arguments are pointers and constants without types.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from treadle_kernels_triton.int4.tiles import Tile, split_k
from treadle_kernels_triton.packed.lookup import assembly
from treadle_layers_kit.packed_layout import FP8, PLACES, Levels

__all__ = ("multiply", "packed_kernel", "packed_unpack_kernel", "unpack")


@triton.jit
def _numbers(
    words,
    levels,
    DTYPE: tl.constexpr,
    ASM: tl.constexpr,
    PLACES: tl.constexpr,
    FLOATS: tl.constexpr,
):
    """Four tiles of numbers in DTYPE, one for each place of the words; of two places, each twice."""
    if ASM == "":
        if PLACES == 4:
            w0 = tl.load(levels + (words & 15)).to(DTYPE)
            w1 = tl.load(levels + ((words >> 4) & 15)).to(DTYPE)
            w2 = tl.load(levels + ((words >> 8) & 15)).to(DTYPE)
            w3 = tl.load(levels + ((words >> 12) & 15)).to(DTYPE)
            return w0, w1, w2, w3
        low, high = words.to(tl.int8), (words >> 8).to(tl.int8)
        if FLOATS:
            low, high = low.to(tl.float8e4nv, bitcast=True), high.to(tl.float8e4nv, bitcast=True)
        w0, w1 = low.to(tl.float32).to(DTYPE), high.to(tl.float32).to(DTYPE)
        return w0, w1, w0, w1
    elif PLACES == 4 and DTYPE.is_bf16():
        return tl.inline_asm_elementwise(
            ASM, "=r,=r,=r,=r,r", [words], dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True, pack=2,
        )  # fmt: skip
    elif PLACES == 4:
        return tl.inline_asm_elementwise(
            ASM, "=r,=r,=r,=r,r", [words], dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True, pack=2,
        )  # fmt: skip
    elif DTYPE.is_bf16():
        w0, w1 = tl.inline_asm_elementwise(
            ASM, "=r,=r,r", [words], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=2
        )
        return w0, w1, w0, w1
    else:
        w0, w1 = tl.inline_asm_elementwise(
            ASM, "=r,=r,r", [words], dtype=(tl.float16, tl.float16), is_pure=True, pack=2
        )
        return w0, w1, w0, w1


@triton.jit
def _steps(steps, group, offs_n, N, mask, HAS: tl.constexpr):
    """float32 ``[N]`` of one group; uint8 are exponents."""
    if not HAS:
        return tl.zeros([offs_n.shape[0]], tl.float32)
    value = tl.load(steps + group.to(tl.int64) * N + offs_n, mask=mask, other=0.0)
    if steps.dtype.element_ty == tl.uint8:
        return (value.to(tl.int32) << 23).to(tl.float32, bitcast=True)
    return value.to(tl.float32)


@triton.jit
def _load_x(x, rows, offs_k, K, stride, mask_m, EVEN_K: tl.constexpr, WIDEN: tl.constexpr):
    mask = mask_m[None, :]
    if not EVEN_K:
        mask = mask & (offs_k < K)[:, None]
    tile = tl.load(x + rows[None, :] * stride + offs_k[:, None], mask=mask, other=0.0)
    return tile.to(tl.float32) if WIDEN else tile


@triton.jit
def _add_group(acc, part, x, scale, offset, HAS_SCALES: tl.constexpr, HAS_OFFSETS: tl.constexpr):
    """``acc`` and the product of one group, whose activations are ``x`` or what adds up to their sum."""
    if HAS_SCALES:
        part = part * scale[:, None]
    if HAS_OFFSETS:
        part += offset[:, None] * tl.sum(x.to(tl.float32), 0)[None, :]
    return acc + part


@triton.jit(do_not_specialize=("M", "num_chunks", "chunks_per_split", "num_splits"))
def packed_kernel(  # noqa: C901
    x,  # [M, K], rows stride elements apart
    codes,  # int16 [num_chunks, N, RUN], of each expert if EXPERTS
    levels,  # float32 [16], if there are four places and ASM is empty
    scales, offsets,  # [K / GROUP, N]
    factors,  # float32 [N]
    out,  # [M, N]
    partials,  # float32 [num_splits, M, N] if SPLIT_K
    tile_counters,  # int32, zeros; left as they were
    order,  # if EXPERTS: rows of out by their experts; those of x are as many divided by SHARED
    tiles,  # if EXPERTS: int32 [3, tiles]: expert (negative: none), first in order, and end
    M, N, K, num_chunks, chunks_per_split, num_splits, stride,
    GROUP: tl.constexpr, RUN: tl.constexpr, PLACES: tl.constexpr, FLOATS: tl.constexpr, ASM: tl.constexpr,
    HAS_SCALES: tl.constexpr, HAS_OFFSETS: tl.constexpr, HAS_FACTORS: tl.constexpr,
    EXPERTS: tl.constexpr, SHARED: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, SPLIT_K: tl.constexpr, EVEN_K: tl.constexpr,
    WIDEN: tl.constexpr,
):  # fmt: skip
    """A program multiplies ``chunks_per_split`` chunks of inputs; the last one of a tile adds up the parts."""
    DTYPE: tl.constexpr = x.dtype.element_ty
    NUMBER: tl.constexpr = tl.float32 if WIDEN else DTYPE
    CHUNK: tl.constexpr = RUN * PLACES
    offs_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_run = tl.arange(0, RUN)
    mask_n = offs_n < N
    num_groups = tl.cdiv(K, GROUP)
    x_rows, mask_m = offs_m.to(tl.int64), offs_m < M
    out_rows = x_rows
    if EXPERTS:
        num_tiles = tl.num_programs(0)
        expert = tl.load(tiles + tl.program_id(0))
        if expert < 0:
            return
        first = tl.load(tiles + num_tiles + tl.program_id(0))
        end = tl.load(tiles + 2 * num_tiles + tl.program_id(0))
        places = first + tl.arange(0, BLOCK_M)
        mask_m = places < end
        out_rows = tl.load(order + places, mask=mask_m, other=0).to(tl.int64)
        x_rows = out_rows // SHARED
        codes += expert.to(tl.int64) * num_chunks * N * RUN
        scales += expert.to(tl.int64) * num_groups * N
        offsets += expert.to(tl.int64) * num_groups * N
        factors += expert.to(tl.int64) * N
    first_chunk = tl.program_id(2) * chunks_per_split
    end_chunk = tl.minimum(first_chunk + chunks_per_split, num_chunks)
    # Beyond the last input there is no group, and what is read there is multiplied by 0.
    last_group = num_groups - 1
    g0 = tl.minimum(first_chunk * CHUNK // GROUP, last_group)
    s0 = _steps(scales, g0, offs_n, N, mask_n, HAS_SCALES)
    o0 = _steps(offsets, g0, offs_n, N, mask_n, HAS_OFFSETS)
    if GROUP % CHUNK != 0:
        g1 = tl.minimum((first_chunk * CHUNK + RUN) // GROUP, last_group)
        g2 = tl.minimum((first_chunk * CHUNK + 2 * RUN) // GROUP, last_group)
        g3 = tl.minimum((first_chunk * CHUNK + 3 * RUN) // GROUP, last_group)
        s1 = _steps(scales, g1, offs_n, N, mask_n, HAS_SCALES)
        s2 = _steps(scales, g2, offs_n, N, mask_n, HAS_SCALES)
        s3 = _steps(scales, g3, offs_n, N, mask_n, HAS_SCALES)
        o1 = _steps(offsets, g1, offs_n, N, mask_n, HAS_OFFSETS)
        o2 = _steps(offsets, g2, offs_n, N, mask_n, HAS_OFFSETS)
        o3 = _steps(offsets, g3, offs_n, N, mask_n, HAS_OFFSETS)
    acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    for chunk in range(first_chunk, end_chunk):
        offs = (chunk * N + offs_n[:, None]).to(tl.int64) * RUN + offs_run[None, :]
        words = tl.load(codes + offs, mask=mask_n[:, None], other=0.0)
        offs_k = chunk * CHUNK + offs_run
        x0 = _load_x(x, x_rows, offs_k, K, stride, mask_m, EVEN_K, WIDEN)
        w0, w1, w2, w3 = _numbers(words, levels, NUMBER, ASM, PLACES, FLOATS)
        next_k = tl.minimum(chunk + 1, end_chunk - 1) * CHUNK
        t0, p0 = s0, o0
        g0 = tl.minimum(next_k // GROUP, last_group)
        s0 = _steps(scales, g0, offs_n, N, mask_n, HAS_SCALES)
        o0 = _steps(offsets, g0, offs_n, N, mask_n, HAS_OFFSETS)
        x1 = _load_x(x, x_rows, offs_k + RUN, K, stride, mask_m, EVEN_K, WIDEN)
        if PLACES == 4:
            x2 = _load_x(x, x_rows, offs_k + 2 * RUN, K, stride, mask_m, EVEN_K, WIDEN)
            x3 = _load_x(x, x_rows, offs_k + 3 * RUN, K, stride, mask_m, EVEN_K, WIDEN)
        if GROUP % CHUNK == 0 or not (HAS_SCALES or HAS_OFFSETS):
            part = tl.dot(w0, x0) if HAS_SCALES or HAS_OFFSETS else tl.dot(w0, x0, acc)
            part = tl.dot(w1, x1, part)
            if PLACES == 4:
                part = tl.dot(w2, x2, part)
                part = tl.dot(w3, x3, part)
            if HAS_OFFSETS:
                total = x0.to(tl.float32) + x1.to(tl.float32)
                if PLACES == 4:
                    total += x2.to(tl.float32) + x3.to(tl.float32)
                acc = _add_group(acc, part, total, t0, p0, HAS_SCALES, True)
            else:
                acc = _add_group(acc, part, x0, t0, p0, True, False) if HAS_SCALES else part
        else:
            t1, p1 = s1, o1
            g1 = tl.minimum((next_k + RUN) // GROUP, last_group)
            s1 = _steps(scales, g1, offs_n, N, mask_n, HAS_SCALES)
            o1 = _steps(offsets, g1, offs_n, N, mask_n, HAS_OFFSETS)
            acc = _add_group(acc, tl.dot(w0, x0), x0, t0, p0, HAS_SCALES, HAS_OFFSETS)
            acc = _add_group(acc, tl.dot(w1, x1), x1, t1, p1, HAS_SCALES, HAS_OFFSETS)
            if PLACES == 4:
                t2, p2, t3, p3 = s2, o2, s3, o3
                g2 = tl.minimum((next_k + 2 * RUN) // GROUP, last_group)
                g3 = tl.minimum((next_k + 3 * RUN) // GROUP, last_group)
                s2 = _steps(scales, g2, offs_n, N, mask_n, HAS_SCALES)
                s3 = _steps(scales, g3, offs_n, N, mask_n, HAS_SCALES)
                o2 = _steps(offsets, g2, offs_n, N, mask_n, HAS_OFFSETS)
                o3 = _steps(offsets, g3, offs_n, N, mask_n, HAS_OFFSETS)
                acc = _add_group(acc, tl.dot(w2, x2), x2, t2, p2, HAS_SCALES, HAS_OFFSETS)
                acc = _add_group(acc, tl.dot(w3, x3), x3, t3, p3, HAS_SCALES, HAS_OFFSETS)
    if HAS_FACTORS:
        acc *= tl.load(factors + offs_n, mask=mask_n, other=0.0)[:, None]
    mask = mask_n[:, None] & mask_m[None, :]
    out_offs = out_rows[None, :] * N + offs_n[:, None]
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
    w0, w1, w2, w3 = _numbers(words, levels, NUMBER, ASM, PLACES, FLOATS)
    for place in tl.static_range(PLACES):
        w = w0 if place == 0 else w1 if place == 1 else w2 if place == 2 else w3
        offs_k = (chunk * PLACES + place) * RUN + offs_run
        group = tl.minimum((chunk * PLACES + place) * RUN // GROUP, tl.cdiv(K, GROUP) - 1)
        value = w.to(tl.float32)
        if HAS_SCALES:
            value *= _steps(scales, group, offs_n, N, mask_n, HAS_SCALES)[:, None]
        if HAS_OFFSETS:
            value += _steps(offsets, group, offs_n, N, mask_n, HAS_OFFSETS)[:, None]
        if HAS_FACTORS:
            value *= tl.load(factors + offs_n, mask=mask_n, other=0.0)[:, None]
        out_ptrs = out + offs_n.to(tl.int64)[:, None] * K + offs_k[None, :]
        tl.store(out_ptrs, value.to(DTYPE), mask=mask_n[:, None] & (offs_k < K)[None, :])


def _constants(
    codes: Tensor,
    scales: Tensor | None,
    offsets: Tensor | None,
    factors: Tensor | None,
    levels: Levels,
    group: int,
    dtype: torch.dtype,
) -> dict[str, object]:
    return {
        "GROUP": group,
        "RUN": codes.shape[-1],
        "PLACES": PLACES[isinstance(levels, str)],
        "FLOATS": levels == FP8,
        "ASM": assembly(levels, dtype) if codes.is_cuda else "",
        "HAS_SCALES": scales is not None,
        "HAS_OFFSETS": offsets is not None,
        "HAS_FACTORS": factors is not None,
    }


def _table(levels: Levels, codes: Tensor) -> Tensor:
    """Where the kernel reads no levels, any tensor."""
    return codes if isinstance(levels, str) or codes.is_cuda else torch.tensor(levels)


def multiply(
    x: Tensor,
    codes: Tensor,
    scales: Tensor | None,
    offsets: Tensor | None,
    factors: Tensor | None,
    levels: Levels,
    group: int,
    tile: Tile,
    tile_counters: Tensor,
    num_sms: int,
    *,
    grouping: tuple[Tensor, Tensor, int] | None = None,
) -> Tensor:
    """``[num_rows, in] -> [num_rows, out]``; the elements of a row of ``x`` lie side by side.

    ``grouping``: ``order``, ``tiles`` and ``SHARED`` of the kernel, for matrices of several experts; the result
    has a row for each of ``order``.
    """
    num_chunks, out_features, _ = codes.shape[-3:]
    num_rows = len(x) if grouping is None else len(grouping[0])
    m_tiles = triton.cdiv(num_rows, tile.block_m) if grouping is None else grouping[1].shape[1]
    n_tiles = triton.cdiv(out_features, tile.block_n)
    num_splits, chunks_per_split = 1, num_chunks
    if m_tiles * n_tiles <= len(tile_counters):
        num_splits, chunks_per_split = split_k(tile, m_tiles * n_tiles, num_chunks, num_sms)
    out = torch.empty((num_rows, out_features), dtype=x.dtype, device=x.device)
    partials = out
    if num_splits > 1:
        partials = torch.empty(
            (num_splits, num_rows, out_features), dtype=torch.float32, device=x.device
        )
    order, tiles, shared = grouping or (tile_counters, tile_counters, 1)
    constants = _constants(codes, scales, offsets, factors, levels, group, x.dtype)
    chunk = codes.shape[-1] * PLACES[isinstance(levels, str)]
    packed_kernel[(m_tiles, n_tiles, num_splits)](
        x, codes, _table(levels, codes), *(x if t is None else t for t in (scales, offsets, factors)),
        out, partials, tile_counters, order, tiles,
        num_rows, out_features, x.shape[1], num_chunks, chunks_per_split, num_splits, x.stride(0),
        **constants, EXPERTS=grouping is not None, SHARED=shared, BLOCK_N=tile.block_n, BLOCK_M=tile.block_m,
        SPLIT_K=num_splits > 1, EVEN_K=x.shape[1] % chunk == 0, WIDEN=not x.is_cuda,
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    return out


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
    constants = _constants(codes, scales, offsets, factors, levels, group, dtype)
    packed_unpack_kernel[(triton.cdiv(out_features, 64), num_chunks)](
        codes, _table(levels, codes), *(out if t is None else t for t in (scales, offsets, factors)), out,
        out_features, in_features, **constants, BLOCK_N=64, num_warps=4,
    )  # fmt: skip
    return out
