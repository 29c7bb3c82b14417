"""Triton's kernels of packed weights, which read the layout of ``treadle_layers_kit.packed_layout``.

As in ``int4.kernel``, the weight is the left operand of the tensor cores, read from registers, where codes
become numbers, and products of a group are scaled in float32. The scales of the next chunk are on their way
while one is multiplied. Scales that no product with a number rounds are folded into the numbers: the tensor
cores then add up everything.
"""

# Kernels are compiled from their source: their arguments are pointers and constants without types.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from treadle_kernels_triton.int4.tiles import Tile, split_k
from treadle_kernels_triton.lookup import folded_power
from treadle_kernels_triton.packed.numbers import (
    constants_of,
    load_steps,
    numbers,
    scaled_numbers,
    table_of,
)
from treadle_layers_kit.packed_layout import E2M1, PLACES, Levels

__all__ = ("folds", "multiply", "packed_kernel")


@triton.jit
def _load_x(x, rows, offs_k, K, stride, mask_m, EVEN_K: tl.constexpr, WIDEN: tl.constexpr):
    mask = mask_m[None, :]
    if not EVEN_K:
        mask = mask & (offs_k < K)[:, None]
    tile = tl.load(x + rows[None, :] * stride + offs_k[:, None], mask=mask, other=0.0)
    return tile.to(tl.float32) if WIDEN else tile


@triton.jit
def _add_group(
    acc, part, ones, x, scale, offset, HAS_SCALES: tl.constexpr, HAS_OFFSETS: tl.constexpr
):
    """``acc`` and the product of one group, whose activations are ``x``.

    Tensor cores add these up for the offsets, in each row the same: threads would have to wait for each other.
    """
    if HAS_SCALES:
        part = part * scale[:, None]
    if HAS_OFFSETS:
        part += offset[:, None] * tl.dot(ones, x)
    return acc + part


@triton.jit(do_not_specialize=("M", "num_chunks", "chunks_per_split", "num_splits"))
def packed_kernel(  # noqa: C901
    x,  # [M, K], rows stride elements apart
    codes,  # int16 [num_chunks, N, RUN], of each expert if EXPERTS
    levels,  # float32 [16], if there are four places and ASM is empty
    scales, offsets,  # [K / GROUP, N]
    factors,  # float32 [N]
    bias,  # [N]
    out,  # [M, N]
    partials,  # float32 [num_splits, M, N] if SPLIT_K
    tile_counters,  # int32, zeros; left as they were
    order,  # if EXPERTS: rows of out by their experts; those of x are as many divided by SHARED
    tiles,  # if EXPERTS: int32 [3, tiles]: expert (negative: none), first in order, and end
    M, N, K, num_chunks, chunks_per_split, num_splits, stride,
    GROUP: tl.constexpr, RUN: tl.constexpr, PLACES: tl.constexpr, FLOATS: tl.constexpr, ASM: tl.constexpr,
    HAS_SCALES: tl.constexpr, HAS_OFFSETS: tl.constexpr, HAS_FACTORS: tl.constexpr,
    HAS_BIAS: tl.constexpr, POWER: tl.constexpr, EXPERTS: tl.constexpr, SHARED: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, SPLIT_K: tl.constexpr, EVEN_K: tl.constexpr,
    WIDEN: tl.constexpr,
):  # fmt: skip
    """A program multiplies ``chunks_per_split`` chunks of inputs; the last one of a tile adds up the parts."""
    DTYPE: tl.constexpr = x.dtype.element_ty
    NUMBER: tl.constexpr = tl.float32 if WIDEN else DTYPE
    CHUNK: tl.constexpr = RUN * PLACES
    FOLD: tl.constexpr = POWER > 0  # scales, times POWER, into the numbers
    STEP_POWER: tl.constexpr = POWER if FOLD else 1.0
    STEP: tl.constexpr = NUMBER if FOLD else tl.float32
    FOUR: tl.constexpr = GROUP % CHUNK != 0  # groups of a chunk
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
        bias += expert.to(tl.int64) * N
    first_chunk = tl.program_id(2) * chunks_per_split
    end_chunk = tl.minimum(first_chunk + chunks_per_split, num_chunks)
    # Beyond the last input there is no group, and what is read there is multiplied by 0.
    last_group = num_groups - 1
    g0 = tl.minimum(first_chunk * CHUNK // GROUP, last_group)
    s0 = load_steps(scales, g0, offs_n, N, mask_n, HAS_SCALES, STEP, STEP_POWER)
    o0 = load_steps(offsets, g0, offs_n, N, mask_n, HAS_OFFSETS)
    if FOUR:
        g1 = tl.minimum((first_chunk * CHUNK + RUN) // GROUP, last_group)
        g2 = tl.minimum((first_chunk * CHUNK + 2 * RUN) // GROUP, last_group)
        g3 = tl.minimum((first_chunk * CHUNK + 3 * RUN) // GROUP, last_group)
        s1 = load_steps(scales, g1, offs_n, N, mask_n, HAS_SCALES, STEP, STEP_POWER)
        s2 = load_steps(scales, g2, offs_n, N, mask_n, HAS_SCALES, STEP, STEP_POWER)
        s3 = load_steps(scales, g3, offs_n, N, mask_n, HAS_SCALES, STEP, STEP_POWER)
        o1 = load_steps(offsets, g1, offs_n, N, mask_n, HAS_OFFSETS)
        o2 = load_steps(offsets, g2, offs_n, N, mask_n, HAS_OFFSETS)
        o3 = load_steps(offsets, g3, offs_n, N, mask_n, HAS_OFFSETS)
    acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    ones = tl.full((BLOCK_N, RUN), 1.0, NUMBER)
    for chunk in range(first_chunk, end_chunk):
        offs = (chunk * N + offs_n[:, None]).to(tl.int64) * RUN + offs_run[None, :]
        words = tl.load(codes + offs, mask=mask_n[:, None], other=0.0)
        offs_k = chunk * CHUNK + offs_run
        x0 = _load_x(x, x_rows, offs_k, K, stride, mask_m, EVEN_K, WIDEN)
        if not FOLD:
            w0, w1, w2, w3 = numbers(words, levels, NUMBER, ASM, PLACES, FLOATS)
        elif FOUR:
            w0, w1, w2, w3 = scaled_numbers(words, levels, s0, s1, s2, s3, NUMBER, ASM)
        else:
            w0, w1, w2, w3 = scaled_numbers(words, levels, s0, s0, s0, s0, NUMBER, ASM)
        next_k = tl.minimum(chunk + 1, end_chunk - 1) * CHUNK
        t0, p0 = s0, o0
        g0 = tl.minimum(next_k // GROUP, last_group)
        s0 = load_steps(scales, g0, offs_n, N, mask_n, HAS_SCALES, STEP, STEP_POWER)
        o0 = load_steps(offsets, g0, offs_n, N, mask_n, HAS_OFFSETS)
        x1 = _load_x(x, x_rows, offs_k + RUN, K, stride, mask_m, EVEN_K, WIDEN)
        if PLACES == 4:
            x2 = _load_x(x, x_rows, offs_k + 2 * RUN, K, stride, mask_m, EVEN_K, WIDEN)
            x3 = _load_x(x, x_rows, offs_k + 3 * RUN, K, stride, mask_m, EVEN_K, WIDEN)
        if FOLD:
            acc = tl.dot(w1, x1, tl.dot(w0, x0, acc))
            acc = tl.dot(w3, x3, tl.dot(w2, x2, acc))
            if FOUR:
                g1 = tl.minimum((next_k + RUN) // GROUP, last_group)
                g2 = tl.minimum((next_k + 2 * RUN) // GROUP, last_group)
                g3 = tl.minimum((next_k + 3 * RUN) // GROUP, last_group)
                s1 = load_steps(scales, g1, offs_n, N, mask_n, True, STEP, STEP_POWER)
                s2 = load_steps(scales, g2, offs_n, N, mask_n, True, STEP, STEP_POWER)
                s3 = load_steps(scales, g3, offs_n, N, mask_n, True, STEP, STEP_POWER)
        elif not FOUR or not (HAS_SCALES or HAS_OFFSETS):
            part = tl.dot(w0, x0) if HAS_SCALES or HAS_OFFSETS else tl.dot(w0, x0, acc)
            part = tl.dot(w1, x1, part)
            if PLACES == 4:
                part = tl.dot(w2, x2, part)
                part = tl.dot(w3, x3, part)
            if HAS_SCALES:
                part = part * t0[:, None]
            if HAS_OFFSETS:
                total = tl.dot(ones, x1, tl.dot(ones, x0))
                if PLACES == 4:
                    total = tl.dot(ones, x3, tl.dot(ones, x2, total))
                part += p0[:, None] * total
            acc = acc + part if HAS_SCALES or HAS_OFFSETS else part
        else:
            t1, p1 = s1, o1
            g1 = tl.minimum((next_k + RUN) // GROUP, last_group)
            s1 = load_steps(scales, g1, offs_n, N, mask_n, HAS_SCALES, STEP, STEP_POWER)
            o1 = load_steps(offsets, g1, offs_n, N, mask_n, HAS_OFFSETS)
            acc = _add_group(acc, tl.dot(w0, x0), ones, x0, t0, p0, HAS_SCALES, HAS_OFFSETS)
            acc = _add_group(acc, tl.dot(w1, x1), ones, x1, t1, p1, HAS_SCALES, HAS_OFFSETS)
            if PLACES == 4:
                t2, p2, t3, p3 = s2, o2, s3, o3
                g2 = tl.minimum((next_k + 2 * RUN) // GROUP, last_group)
                g3 = tl.minimum((next_k + 3 * RUN) // GROUP, last_group)
                s2 = load_steps(scales, g2, offs_n, N, mask_n, HAS_SCALES, STEP, STEP_POWER)
                s3 = load_steps(scales, g3, offs_n, N, mask_n, HAS_SCALES, STEP, STEP_POWER)
                o2 = load_steps(offsets, g2, offs_n, N, mask_n, HAS_OFFSETS)
                o3 = load_steps(offsets, g3, offs_n, N, mask_n, HAS_OFFSETS)
                acc = _add_group(acc, tl.dot(w2, x2), ones, x2, t2, p2, HAS_SCALES, HAS_OFFSETS)
                acc = _add_group(acc, tl.dot(w3, x3), ones, x3, t3, p3, HAS_SCALES, HAS_OFFSETS)
    if FOLD:
        acc *= POWER
    if HAS_FACTORS:
        acc *= tl.load(factors + offs_n, mask=mask_n, other=0.0)[:, None]
    mask = mask_n[:, None] & mask_m[None, :]
    out_offs = out_rows[None, :] * N + offs_n[:, None]
    shift = tl.zeros([BLOCK_N], tl.float32)
    if HAS_BIAS:
        shift += tl.load(bias + offs_n, mask=mask_n, other=0.0).to(tl.float32)
    if not SPLIT_K:
        tl.store(out + out_offs, (acc + shift[:, None]).to(DTYPE), mask=mask)
    else:
        partial_size = M.to(tl.int64) * N
        tl.store(partials + tl.program_id(2) * partial_size + out_offs, acc, mask=mask)
        tl.debug_barrier()  # all threads have stored before one says so
        counter = tile_counters + tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        if tl.atomic_add(counter, 1, sem="acq_rel") == num_splits - 1:
            tl.debug_barrier()
            y = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32) + shift[:, None]
            for split in range(num_splits):
                y += tl.load(
                    partials + split * partial_size + out_offs,
                    mask=mask,
                    other=0.0,
                    cache_modifier=".cg",
                )
            tl.store(out + out_offs, y.to(DTYPE), mask=mask)
            tl.store(counter, 0)


def folds(
    scales: Tensor | None, offsets: Tensor | None, levels: Levels, dtype: torch.dtype
) -> bool:
    """Whether numbers times scales are exact: exponents in bfloat16, and the numbers of MXFP4 and NVFP4 times FP8 in
    both types."""
    if scales is None or offsets is not None or levels != E2M1:
        return False
    is_power = scales.dtype is torch.uint8 and dtype is torch.bfloat16
    return is_power or scales.dtype is torch.float8_e4m3fn


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
    bias: Tensor | None = None,
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
        # No more tiles have rows than there are choices of experts.
        num_tiles = min(m_tiles, num_rows) * n_tiles
        num_splits, chunks_per_split = split_k(tile, num_tiles, num_chunks, num_sms)
    out = torch.empty((num_rows, out_features), dtype=x.dtype, device=x.device)
    partials = out
    if num_splits > 1:
        partials = torch.empty(
            (num_splits, num_rows, out_features), dtype=torch.float32, device=x.device
        )
    order, tiles, shared = grouping or (tile_counters, tile_counters, 1)
    fold = folds(scales, offsets, levels, x.dtype)
    power = (folded_power(x.dtype) if x.is_cuda else 1.0) if fold else 0.0
    constants = constants_of(codes, scales, offsets, factors, levels, group, x.dtype, fold)
    chunk = codes.shape[-1] * PLACES[isinstance(levels, str)]
    packed_kernel[(m_tiles, n_tiles, num_splits)](
        x, codes, table_of(levels, codes), *(x if t is None else t for t in (scales, offsets, factors, bias)),
        out, partials, tile_counters, order, tiles,
        num_rows, out_features, x.shape[1], num_chunks, chunks_per_split, num_splits, x.stride(0),
        **constants, HAS_BIAS=bias is not None, POWER=power, EXPERTS=grouping is not None, SHARED=shared, BLOCK_N=tile.block_n, BLOCK_M=tile.block_m,
        SPLIT_K=num_splits > 1, EVEN_K=x.shape[1] % chunk == 0, WIDEN=not x.is_cuda,
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    return out
