"""Storing the new tokens of a step into their pages."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ("write_kernel",)


@triton.jit
def write_kernel(
    k,  # [tokens, kv_heads, head_size], rows k_stride elements apart
    v,  # the same, rows v_stride apart
    cache,  # [2, slots, kv_heads * head_size]
    slots,  # int64 [tokens]; negative: not stored
    k_stride,
    v_stride,
    half,  # elements of keys, before the values
    k_scale,  # what keys are divided by in fp8
    v_scale,
    WIDTH: tl.constexpr,  # kv_heads * head_size
    BLOCK: tl.constexpr,  # the power of two that holds it
    LIMIT: tl.constexpr,  # the largest fp8 value, 0 if the cache is not fp8
):
    """One program stores the key and the value of one token."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    at = tl.arange(0, BLOCK)
    inside = (at < WIDTH) & (slot >= 0)
    key = tl.load(k + token * k_stride + at, mask=inside)
    value = tl.load(v + token * v_stride + at, mask=inside)
    if LIMIT > 0:  # a plain cast turns what is too large into NaN
        key = tl.minimum(tl.maximum(key.to(tl.float32) / k_scale, -LIMIT), LIMIT)
        value = tl.minimum(tl.maximum(value.to(tl.float32) / v_scale, -LIMIT), LIMIT)
    target = cache + slot * WIDTH + at
    tl.store(target, key.to(cache.dtype.element_ty), mask=inside)
    tl.store(target + tl.cast(half, tl.int64), value.to(cache.dtype.element_ty), mask=inside)
