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
    x_ptrs, cos, sin, offs, weight1, weight2, eps,
    HEAD_DIM: tl.constexpr, HAS_NORM: tl.constexpr,
):  # fmt: skip
    """Both halves of heads at ``x_ptrs`` (pointers ``[heads, 1]``), normalised and turned."""
    HALF_DIM: tl.constexpr = HEAD_DIM // 2
    dtype: tl.constexpr = cos.dtype.element_ty
    # All loads before the first use of any.
    x1 = tl.load(x_ptrs + offs[None, :]).to(tl.float32)
    x2 = tl.load(x_ptrs + HALF_DIM + offs[None, :]).to(tl.float32)
    cos1 = tl.load(cos + offs).to(tl.float32)[None, :]
    cos2 = tl.load(cos + HALF_DIM + offs).to(tl.float32)[None, :]
    sin1 = tl.load(sin + offs).to(tl.float32)[None, :]
    sin2 = tl.load(sin + HALF_DIM + offs).to(tl.float32)[None, :]
    if HAS_NORM:
        sum_of_squares = tl.sum(x1 * x1, axis=1) + tl.sum(x2 * x2, axis=1)
        scale = tl.rsqrt(sum_of_squares / HEAD_DIM + eps)[:, None]
        # Rounded as without the fusion.
        x1 = (x1 * scale * weight1[None, :]).to(dtype).to(tl.float32)
        x2 = (x2 * scale * weight2[None, :]).to(dtype).to(tl.float32)
    return (x1 * cos1 + x2 * sin1).to(dtype), (x2 * cos2 + x1 * sin2).to(dtype)


@triton.jit
def _saturate_fp8(x, scale, FP8_MAX: tl.constexpr):
    """``x / scale`` within what fp8 holds: a plain cast turns what is too large into NaN."""
    return tl.minimum(tl.maximum(x.to(tl.float32) / scale, -FP8_MAX), FP8_MAX)


@triton.jit
def rope_and_cache_kernel(
    qkv,  # [tokens, (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM]
    cos,  # [tokens, HEAD_DIM]
    sin,  # [tokens, HEAD_DIM]; the first half is negative
    q_weight,  # [HEAD_DIM], unless not HAS_NORM
    k_weight,
    eps,
    offset,
    q_out,  # [tokens, NUM_HEADS * HEAD_DIM]
    cache,  # [2, slots, NUM_KV_HEADS * HEAD_DIM]
    slot_mapping,  # int64 [tokens]; negative: not stored
    v_offset,  # elements of keys, before the values
    k_scale,  # what keys are divided by, unless FP8_MAX is 0
    v_scale,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_H: tl.constexpr,  # heads of one program; divides NUM_HEADS and NUM_KV_HEADS
    HAS_NORM: tl.constexpr,
    USE_PDL: tl.constexpr,
    FP8_MAX: tl.constexpr = 0.0,  # the largest fp8 value, 0 if the cache is not fp8
):
    """A program serves ``BLOCK_H`` heads of one token: all queries, all keys or all values."""
    launch_dependents(USE_PDL)
    HALF_DIM: tl.constexpr = HEAD_DIM // 2
    token = tl.program_id(0).to(tl.int64)
    first_head = tl.program_id(1) * BLOCK_H
    head = first_head + tl.arange(0, BLOCK_H)[:, None]
    offs_half, offs_d = tl.arange(0, HALF_DIM), tl.arange(0, HEAD_DIM)[None, :]
    is_q, is_v = first_head < NUM_HEADS, first_head >= NUM_HEADS + NUM_KV_HEADS
    weight = k_weight
    if is_q:
        weight = q_weight
    weight1, weight2 = tl.zeros([HALF_DIM], tl.float32), tl.zeros([HALF_DIM], tl.float32)
    if HAS_NORM:
        weight1 = tl.load(weight + offs_half).to(tl.float32) + offset
        weight2 = tl.load(weight + HALF_DIM + offs_half).to(tl.float32) + offset
    wait_for_previous_kernel(USE_PDL)
    x_ptrs = qkv + token * ((NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM) + head * HEAD_DIM
    slot = tl.load(slot_mapping + token)
    slot_ptr = cache + slot * (NUM_KV_HEADS * HEAD_DIM)
    if is_v:
        v_ptrs = (
            slot_ptr + tl.cast(v_offset, tl.int64) + (head - NUM_HEADS - NUM_KV_HEADS) * HEAD_DIM
        )
        value = tl.load(x_ptrs + offs_d)
        if FP8_MAX > 0:
            value = _saturate_fp8(value, v_scale, FP8_MAX).to(cache.dtype.element_ty)
        tl.store(v_ptrs + offs_d, value, mask=slot >= 0)
    else:
        x1, x2 = _rotate(
            x_ptrs,
            cos + token * HEAD_DIM,
            sin + token * HEAD_DIM,
            offs_half,
            weight1,
            weight2,
            eps,
            HEAD_DIM,
            HAS_NORM,
        )
        k_ptrs = slot_ptr + (head - NUM_HEADS) * HEAD_DIM + offs_half[None, :]
        q_ptrs = q_out + token * (NUM_HEADS * HEAD_DIM) + head * HEAD_DIM + offs_half[None, :]
        if FP8_MAX > 0:  # of another type than the queries
            if is_q:
                tl.store(q_ptrs, x1)
                tl.store(q_ptrs + HALF_DIM, x2)
            else:
                dtype = cache.dtype.element_ty
                tl.store(k_ptrs, _saturate_fp8(x1, k_scale, FP8_MAX).to(dtype), mask=slot >= 0)
                tl.store(
                    k_ptrs + HALF_DIM, _saturate_fp8(x2, k_scale, FP8_MAX).to(dtype), mask=slot >= 0
                )
        else:
            if is_q:
                k_ptrs = q_ptrs
            tl.store(k_ptrs, x1, mask=is_q | (slot >= 0))
            tl.store(k_ptrs + HALF_DIM, x2, mask=is_q | (slot >= 0))


def _choose_tile(num_heads: int, num_kv_heads: int) -> tuple[int, int]:
    """Heads and warps of a program. Smaller programs are no faster for one token, slower for many."""
    common = gcd(num_heads, num_kv_heads)
    block_h = min(8, common & -common)
    return block_h, max(1, block_h // 2)


def rope_and_cache(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    norms: tuple[Tensor, Tensor, float, float] | None,
    cache: Tensor,
    slots: Tensor,
    *,
    tile: tuple[int, int] | None = None,
    use_pdl: bool = False,
    scales: tuple[float, float] = (1.0, 1.0),
    limit: float = 0.0,
) -> Tensor:
    """The operation ``rope_and_cache`` of ``treadle_layers_kit.kernel_ops``; ``tile`` is for measurements,
    ``scales`` and ``limit`` (above 0) are ``rope_and_cache_fp8``'s."""
    num_tokens, head_dim, num_kv_heads = qkv.shape[0], cos.shape[-1], cache.shape[2]
    num_heads = qkv.shape[1] // head_dim - 2 * num_kv_heads
    q_weight, k_weight, eps, offset = norms or (qkv, qkv, 0.0, 0.0)
    q = torch.empty((num_tokens, num_heads, head_dim), dtype=qkv.dtype, device=qkv.device)
    qkv = qkv.contiguous()
    block_h, num_warps = tile or _choose_tile(num_heads, num_kv_heads)
    rope_and_cache_kernel[(num_tokens, (num_heads + 2 * num_kv_heads) // block_h)](
        qkv, cos, sin, q_weight, k_weight, eps, offset, q, cache, slots, cache.stride(0),
        *scales,
        NUM_HEADS=num_heads, NUM_KV_HEADS=num_kv_heads, HEAD_DIM=head_dim, BLOCK_H=block_h,
        HAS_NORM=norms is not None, USE_PDL=use_pdl, FP8_MAX=limit, num_warps=num_warps, launch_pdl=use_pdl,
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
    use_pdl: bool = False,
) -> Tensor:
    """The operation ``rope_and_cache_fp8`` of ``treadle_layers_kit.kernel_ops``."""
    limit = torch.finfo(cache.dtype).max
    return rope_and_cache(
        qkv, cos, sin, norms, cache, slots, use_pdl=use_pdl, scales=scales, limit=limit
    )
