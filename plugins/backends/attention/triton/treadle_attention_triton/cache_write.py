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
    slot_mapping,  # int64 [tokens]; negative: not stored
    k_stride,
    v_stride,
    v_offset,  # elements of keys, before the values
    k_scale,  # what keys are divided by in fp8
    v_scale,
    KV_WIDTH: tl.constexpr,  # kv_heads * head_size
    BLOCK_SIZE: tl.constexpr,  # the power of two that holds it
    FP8_MAX: tl.constexpr,  # the largest fp8 value, 0 if the cache is not fp8
):
    """One program stores the key and the value of one token."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token)
    offs = tl.arange(0, BLOCK_SIZE)
    mask = (offs < KV_WIDTH) & (slot >= 0)
    key = tl.load(k + token * k_stride + offs, mask=mask)
    value = tl.load(v + token * v_stride + offs, mask=mask)
    if FP8_MAX > 0:  # a plain cast turns what is too large into NaN
        key = tl.minimum(tl.maximum(key.to(tl.float32) / k_scale, -FP8_MAX), FP8_MAX)
        value = tl.minimum(tl.maximum(value.to(tl.float32) / v_scale, -FP8_MAX), FP8_MAX)
    cache_ptrs = cache + slot * KV_WIDTH + offs
    tl.store(cache_ptrs, key.to(cache.dtype.element_ty), mask=mask)
    tl.store(cache_ptrs + tl.cast(v_offset, tl.int64), value.to(cache.dtype.element_ty), mask=mask)
