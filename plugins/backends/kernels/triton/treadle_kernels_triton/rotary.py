"""Head norms, rotary embedding and cache write of one step in a single kernel."""

from __future__ import annotations

from math import gcd

import torch
import triton
import triton.language as tl
from torch import Tensor

from treadle_triton_kit.pdl import launch_dependents, wait_for_previous_kernel

__all__ = ("rope_and_cache", "rope_and_cache_fp8", "rope_and_cache_kernel")


@triton.jit
def _rotate(
    source, cos, sin, at, gain_a, gain_b, eps,
    SIZE: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """Both halves of heads at ``source`` (pointers ``[heads, 1]``), normalised and turned."""
    HALF: tl.constexpr = SIZE // 2
    kind: tl.constexpr = cos.dtype.element_ty
    # All loads before the first use of any.
    x = tl.load(source + at[None, :]).to(tl.float32)
    y = tl.load(source + HALF + at[None, :]).to(tl.float32)
    cos_a = tl.load(cos + at).to(tl.float32)[None, :]
    cos_b = tl.load(cos + HALF + at).to(tl.float32)[None, :]
    sin_a = tl.load(sin + at).to(tl.float32)[None, :]
    sin_b = tl.load(sin + HALF + at).to(tl.float32)[None, :]
    if NORM:
        squares = tl.sum(x * x, axis=1) + tl.sum(y * y, axis=1)
        scale = tl.rsqrt(squares / SIZE + eps)[:, None]
        # Rounded as without the fusion.
        x = (x * scale * gain_a[None, :]).to(kind).to(tl.float32)
        y = (y * scale * gain_b[None, :]).to(kind).to(tl.float32)
    return (x * cos_a + y * sin_a).to(kind), (y * cos_b + x * sin_b).to(kind)


@triton.jit
def _cut_off(x, scale, LIMIT: tl.constexpr):
    """``x / scale`` within what fp8 holds: a plain cast turns what is too large into NaN."""
    return tl.minimum(tl.maximum(x.to(tl.float32) / scale, -LIMIT), LIMIT)


@triton.jit
def rope_and_cache_kernel(
    qkv,  # [tokens, (HEADS + 2 * KV_HEADS) * SIZE]
    cos,  # [tokens, SIZE]
    sin,  # [tokens, SIZE]; the first half is negative
    q_weight,  # [SIZE], unless not NORM
    k_weight,
    eps,
    offset,
    q_out,  # [tokens, HEADS * SIZE]
    cache,  # [2, slots, KV_HEADS * SIZE]
    slots,  # int64 [tokens]; negative: not stored
    half_cache,  # elements of keys, before the values
    k_scale,  # what keys are divided by, unless LIMIT is 0
    v_scale,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,  # heads of one program; divides HEADS and KV_HEADS
    NORM: tl.constexpr,
    EARLY: tl.constexpr,
    LIMIT: tl.constexpr = 0.0,  # the largest fp8 value, 0 if the cache is not fp8
):
    """A program serves ``BLOCK`` heads of one token: all queries, all keys or all values."""
    launch_dependents(EARLY)
    HALF: tl.constexpr = SIZE // 2
    token = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * BLOCK
    head = first + tl.arange(0, BLOCK)[:, None]
    at, whole = tl.arange(0, HALF), tl.arange(0, SIZE)[None, :]
    is_q, is_value = first < HEADS, first >= HEADS + KV_HEADS
    weight = k_weight
    if is_q:
        weight = q_weight
    gain_a, gain_b = tl.zeros([HALF], tl.float32), tl.zeros([HALF], tl.float32)
    if NORM:
        gain_a = tl.load(weight + at).to(tl.float32) + offset
        gain_b = tl.load(weight + HALF + at).to(tl.float32) + offset
    wait_for_previous_kernel(EARLY)
    source = qkv + token * ((HEADS + 2 * KV_HEADS) * SIZE) + head * SIZE
    slot = tl.load(slots + token)
    row = cache + slot * (KV_HEADS * SIZE)
    if is_value:
        values = row + tl.cast(half_cache, tl.int64) + (head - HEADS - KV_HEADS) * SIZE
        value = tl.load(source + whole)
        if LIMIT > 0:
            value = _cut_off(value, v_scale, LIMIT).to(cache.dtype.element_ty)
        tl.store(values + whole, value, mask=slot >= 0)
    else:
        a, b = _rotate(
            source, cos + token * SIZE, sin + token * SIZE, at, gain_a, gain_b, eps, SIZE, NORM
        )
        target = row + (head - HEADS) * SIZE + at[None, :]
        queries = q_out + token * (HEADS * SIZE) + head * SIZE + at[None, :]
        if LIMIT > 0:  # of another type than the queries
            if is_q:
                tl.store(queries, a)
                tl.store(queries + HALF, b)
            else:
                kind = cache.dtype.element_ty
                tl.store(target, _cut_off(a, k_scale, LIMIT).to(kind), mask=slot >= 0)
                tl.store(target + HALF, _cut_off(b, k_scale, LIMIT).to(kind), mask=slot >= 0)
        else:
            if is_q:
                target = queries
            tl.store(target, a, mask=is_q | (slot >= 0))
            tl.store(target + HALF, b, mask=is_q | (slot >= 0))


def _tile(heads: int, kv_heads: int) -> tuple[int, int]:
    """Heads and warps of a program. Smaller programs are no faster for one token, slower for many."""
    common = gcd(heads, kv_heads)
    block = min(8, common & -common)
    return block, max(1, block // 2)


def rope_and_cache(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    norms: tuple[Tensor, Tensor, float, float] | None,
    cache: Tensor,
    slots: Tensor,
    *,
    tile: tuple[int, int] | None = None,
    early: bool = False,
    scales: tuple[float, float] = (1.0, 1.0),
    limit: float = 0.0,
) -> Tensor:
    """The operation ``rope_and_cache`` of ``treadle_layers_kit.kernel_ops``; ``tile`` is for measurements,
    ``scales`` and ``limit`` (above 0) are ``rope_and_cache_fp8``'s."""
    tokens, size, kv_heads = qkv.shape[0], cos.shape[-1], cache.shape[2]
    heads = qkv.shape[1] // size - 2 * kv_heads
    q_weight, k_weight, eps, offset = norms or (qkv, qkv, 0.0, 0.0)
    q = torch.empty((tokens, heads, size), dtype=qkv.dtype, device=qkv.device)
    qkv = qkv.contiguous()
    block, warps = tile or _tile(heads, kv_heads)
    rope_and_cache_kernel[(tokens, (heads + 2 * kv_heads) // block)](
        qkv, cos, sin, q_weight, k_weight, eps, offset, q, cache, slots, cache.stride(0),
        *scales,
        HEADS=heads, KV_HEADS=kv_heads, SIZE=size, BLOCK=block,
        NORM=norms is not None, EARLY=early, LIMIT=limit, num_warps=warps, launch_pdl=early,
    )  # fmt: skip
    return q


def rope_and_cache_fp8(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    norms: tuple[Tensor, Tensor, float, float] | None,
    cache: Tensor,
    slots: Tensor,
    scales: tuple[float, float],
    *,
    early: bool = False,
) -> Tensor:
    """The operation ``rope_and_cache_fp8`` of ``treadle_layers_kit.kernel_ops``."""
    limit = torch.finfo(cache.dtype).max
    return rope_and_cache(
        qkv, cos, sin, norms, cache, slots, early=early, scales=scales, limit=limit
    )
