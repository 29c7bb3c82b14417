"""Head norms, rotary embedding and cache write of one step in a single kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ("rotary_write", "rotary_write_kernel")


@triton.jit
def _normed(half_a, half_b, weight, at, HALF: tl.constexpr, eps, offset):
    """Both halves of heads ``[heads, HALF]``, normalised over the whole head."""
    squares = tl.sum(half_a * half_a, axis=1) + tl.sum(half_b * half_b, axis=1)
    scale = tl.rsqrt(squares / (2 * HALF) + eps)[:, None]
    gain_a = tl.load(weight + at).to(tl.float32) + offset
    gain_b = tl.load(weight + HALF + at).to(tl.float32) + offset
    return half_a * scale * gain_a[None, :], half_b * scale * gain_b[None, :]


@triton.jit
def rotary_write_kernel(
    qkv,  # [tokens, (HEADS + 2 * KV_HEADS) * SIZE]
    cos,  # [tokens, SIZE]
    sin,  # [tokens, SIZE]; the first half is negative
    q_weight,  # [SIZE], unless not NORM
    k_weight,
    eps,
    offset,
    q_out,  # [tokens, HEADS * SIZE]
    cache,  # [2, slots, KV_HEADS * SIZE]
    slots,  # int64 [tokens]
    half_cache,  # elements of keys, before the values
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,  # heads of one program
    NORM: tl.constexpr,
):
    """A program serves ``BLOCK`` heads of one token; queries, keys and values in turn."""
    HALF: tl.constexpr = SIZE // 2
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = tl.arange(0, HALF)
    inside = (head < HEADS + 2 * KV_HEADS)[:, None]
    start = qkv + token * ((HEADS + 2 * KV_HEADS) * SIZE)
    source = start + head[:, None] * SIZE + at[None, :]
    a = tl.load(source, mask=inside, other=0.0)
    b = tl.load(source + HALF, mask=inside, other=0.0)
    is_q = (head < HEADS)[:, None]
    is_k = (head >= HEADS)[:, None] & (head < HEADS + KV_HEADS)[:, None]
    x, y = a.to(tl.float32), b.to(tl.float32)
    if NORM:
        q_a, q_b = _normed(x, y, q_weight, at, HALF, eps, offset)
        k_a, k_b = _normed(x, y, k_weight, at, HALF, eps, offset)
        x = tl.where(is_q, q_a, k_a).to(qkv.dtype.element_ty).to(tl.float32)
        y = tl.where(is_q, q_b, k_b).to(qkv.dtype.element_ty).to(tl.float32)
    cos_a = tl.load(cos + token * SIZE + at).to(tl.float32)[None, :]
    cos_b = tl.load(cos + token * SIZE + HALF + at).to(tl.float32)[None, :]
    sin_a = tl.load(sin + token * SIZE + at).to(tl.float32)[None, :]
    sin_b = tl.load(sin + token * SIZE + HALF + at).to(tl.float32)[None, :]
    turned_a = (x * cos_a + y * sin_a).to(qkv.dtype.element_ty)
    turned_b = (y * cos_b + x * sin_b).to(qkv.dtype.element_ty)
    target = q_out + token * (HEADS * SIZE) + head[:, None] * SIZE + at[None, :]
    tl.store(target, turned_a, mask=is_q)
    tl.store(target + HALF, turned_b, mask=is_q)
    slot = tl.load(slots + token)
    row = cache + slot * (KV_HEADS * SIZE)
    stored = slot >= 0
    key = row + (head - HEADS)[:, None] * SIZE + at[None, :]
    tl.store(key, turned_a, mask=is_k & stored)
    tl.store(key + HALF, turned_b, mask=is_k & stored)
    is_v = (head >= HEADS + KV_HEADS)[:, None] & inside & stored
    value = row + tl.cast(half_cache, tl.int64) + (head - HEADS - KV_HEADS)[:, None] * SIZE
    tl.store(value + at[None, :], a, mask=is_v)
    tl.store(value + HALF + at[None, :], b, mask=is_v)


def rotary_write(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    norms: tuple[Tensor, Tensor, float, float] | None,
    cache: Tensor,
    slots: Tensor,
) -> Tensor:
    """The operation ``rotary_write`` of ``weft.layers.kernels``."""
    tokens, size, kv_heads = qkv.shape[0], cos.shape[-1], cache.shape[2]
    heads = qkv.shape[1] // size - 2 * kv_heads
    q_weight, k_weight, eps, offset = norms or (qkv, qkv, 0.0, 0.0)
    q = torch.empty((tokens, heads, size), dtype=qkv.dtype, device=qkv.device)
    qkv = qkv.contiguous()
    # Few tokens: many small programs. Many tokens: fewer, with the angles loaded once for more.
    block = 2 if tokens <= 64 else 8
    grid = (tokens, triton.cdiv(heads + 2 * kv_heads, block))
    rotary_write_kernel[grid](
        qkv, cos, sin, q_weight, k_weight, eps, offset, q, cache, slots, cache.stride(0),
        HEADS=heads, KV_HEADS=kv_heads, SIZE=size, BLOCK=block, NORM=norms is not None,
        num_warps=1 if block == 2 else 4,
    )  # fmt: skip
    return q
