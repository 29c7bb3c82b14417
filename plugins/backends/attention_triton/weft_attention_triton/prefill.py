"""Rows of several new tokens against their pages: prompts, chunks of prompts, drafts.

Tokens of all rows are packed. A program takes a tile of one row's queries for one kv head; the
query heads of the group are interleaved into the tile's rows (token-major), so that short chunks
fill a tile and keys are read once per group.
"""

from __future__ import annotations

import triton
import triton.language as tl

from weft_attention_triton.softmax import accumulate, capped

__all__ = ("prefill_kernel",)


@triton.jit
def _attend(
    acc,
    top,
    total,
    query,
    keys,
    values,
    own,
    position,  # [M] of each query in its sequence
    lo,
    hi,
    length,
    scale,
    cap,
    STRIDE: tl.constexpr,
    SIZE: tl.constexpr,
    WIDE: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    WINDOW: tl.constexpr,
    CAUSAL: tl.constexpr,
    MASKED: tl.constexpr,
    CAPPED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Attend over keys ``[lo, hi)``; unless MASKED, every query sees all of them."""
    d, n = tl.arange(0, WIDE), tl.arange(0, BLOCK)
    within = n[:, None] * STRIDE + d[None, :]
    units = (cap if CAPPED else scale) * 1.4426950408889634  # of exp2
    if BLOCK <= PAGE:
        page = tl.load(own + lo // PAGE, mask=lo < hi, other=0)
    else:
        page = tl.load(own + (lo + n) // PAGE, mask=lo + n < hi, other=0)
    for start in range(lo, hi, BLOCK):
        if BLOCK <= PAGE:
            base = (page.to(tl.int64) * PAGE + start % PAGE) * STRIDE
            k_at, v_at = keys + base + within, values + base + within
            page = tl.load(own + (start + BLOCK) // PAGE, mask=start + BLOCK < hi, other=0)
        else:
            slot = page.to(tl.int64) * PAGE + (start + n) % PAGE
            at = slot[:, None] * STRIDE + d[None, :]
            k_at, v_at = keys + at, values + at
            page = tl.load(own + (start + BLOCK + n) // PAGE, mask=start + BLOCK + n < hi, other=0)
        inner = d[None, :] < SIZE
        k = tl.load(k_at) if SIZE == WIDE else tl.load(k_at, mask=inner, other=0.0)
        if MASKED:
            # 0 * NaN is NaN: a value past the end must be a number.
            v = tl.load(v_at, mask=(start + n < hi)[:, None] & (d[None, :] < SIZE), other=0.0)
        elif SIZE == WIDE:
            v = tl.load(v_at)
        else:
            v = tl.load(v_at, mask=inner, other=0.0)
        scores = tl.dot(query, tl.trans(k.to(query.dtype)), input_precision=PRECISION)
        if CAPPED:
            scores = capped(scores, scale, cap)
        if MASKED:
            key = start + n
            seen = (key < length)[None, :]
            if CAUSAL:
                seen = seen & (key[None, :] <= position[:, None])
            if WINDOW > 0:
                seen = seen & (key[None, :] > position[:, None] - WINDOW)
            scores = tl.where(seen, scores, float("-inf"))
        acc, top, total = accumulate(acc, top, total, scores, v.to(query.dtype), units, PRECISION)
    return acc, top, total


@triton.jit
def prefill_kernel(
    q,  # [tokens, heads, SIZE], rows q_stride elements apart
    cache,  # [2, pages, PAGE, KV_HEADS, SIZE]
    out,  # [tokens, heads, SIZE]
    table,  # int32 [rows, pages], rows table_stride apart
    lengths,  # int32 [rows]
    starts,  # int32 [rows + 1]: first token of each row
    tiles,  # int32 [tiles, 2]: row, first query of the tile in the row
    q_stride,
    table_stride,
    half,
    scale,
    cap,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    SIZE: tl.constexpr,
    WIDE: tl.constexpr,
    PAGE: tl.constexpr,
    M: tl.constexpr,  # rows of a tile: M // GROUP tokens
    BLOCK: tl.constexpr,  # keys of a tile
    WINDOW: tl.constexpr,
    CAUSAL: tl.constexpr,
    CAPPED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Program (kv head, tile)."""
    head, tile = tl.program_id(0), tl.program_id(1)
    row = tl.load(tiles + 2 * tile).to(tl.int64)
    first = tl.load(tiles + 2 * tile + 1)
    begin = tl.load(starts + row)
    count = tl.load(starts + row + 1) - begin
    length = tl.load(lengths + row)
    before = length - count  # tokens that were in the cache already
    TOKENS: tl.constexpr = M // GROUP
    m, d = tl.arange(0, M), tl.arange(0, WIDE)
    token = first + m // GROUP
    heads = head * GROUP + m % GROUP
    real = (token < count) & (m < TOKENS * GROUP)
    mask = real[:, None] & (d[None, :] < SIZE)
    at = (begin + token).to(tl.int64)
    query = tl.load(
        q + at[:, None] * q_stride + (heads * SIZE)[:, None] + d[None, :], mask=mask, other=0.0
    )
    position = before + token
    acc = tl.zeros([M, WIDE], tl.float32)
    top = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    STRIDE: tl.constexpr = KV_HEADS * SIZE
    keys = cache + head * SIZE
    values = keys + tl.cast(half, tl.int64)
    own = table + row * table_stride
    lo = 0
    hi = length
    if CAUSAL:
        hi = tl.minimum(length, before + first + TOKENS)
    if WINDOW > 0:
        lo = tl.maximum(before + first - WINDOW + 1, 0) // BLOCK * BLOCK
        full = lo
    elif CAUSAL:  # what the tile's first query sees, all of it see
        full = (before + first + 1) // BLOCK * BLOCK
    else:
        full = length // BLOCK * BLOCK
    if WINDOW == 0:
        acc, top, total = _attend(
            acc, top, total, query, keys, values, own, position, lo, full, length, scale, cap,
            STRIDE, SIZE, WIDE, PAGE, BLOCK, WINDOW, CAUSAL, False, CAPPED, PRECISION,
        )  # fmt: skip
    acc, top, total = _attend(
        acc, top, total, query, keys, values, own, position, full, hi, length, scale, cap,
        STRIDE, SIZE, WIDE, PAGE, BLOCK, WINDOW, CAUSAL, True, CAPPED, PRECISION,
    )  # fmt: skip
    acc = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    target = out + (at * (KV_HEADS * GROUP))[:, None] * SIZE + (heads * SIZE)[:, None] + d[None, :]
    tl.store(target, acc.to(out.dtype.element_ty), mask=mask)
