"""Rows of several new tokens against their pages: prompts, chunks of prompts, drafts.

Tokens of all rows are packed. A program takes a tile of one row's queries for one kv head; the
query heads of the group are interleaved into the tile's rows (token-major), so that short chunks
fill a tile and keys are read once per group.
"""

from __future__ import annotations

import triton
import triton.language as tl

from treadle_attention_triton.softmax import accumulate, capped, for_products

__all__ = ("prefill_kernel",)


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
    v_scale,  # of the values of a cache in fp8; that of its keys is part of ``scale``
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
    NARROW: tl.constexpr,  # the cache is fp8
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
    m, d, n = tl.arange(0, M), tl.arange(0, WIDE), tl.arange(0, BLOCK)
    token = first + m // GROUP
    heads = head * GROUP + m % GROUP
    real = (token < count) & (m < TOKENS * GROUP)
    mask = real[:, None] & (d[None, :] < SIZE)
    at = (begin + token).to(tl.int64)
    query = tl.load(
        q + at[:, None] * q_stride + (heads * SIZE)[:, None] + d[None, :], mask=mask, other=0.0
    )
    query = for_products(query, NARROW)
    position = before + token
    acc = tl.zeros([M, WIDE], tl.float32)
    top = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    STRIDE: tl.constexpr = KV_HEADS * SIZE
    keys = cache + head * SIZE
    values = keys + tl.cast(half, tl.int64)
    own = table + row * table_stride
    units = (cap if CAPPED else scale) * 1.4426950408889634  # of exp2
    # Keys [lo, hi) are seen by some query of the tile, keys [open, full) by all of them.
    lo = 0
    open = 0
    hi = length
    full = length // BLOCK * BLOCK
    if CAUSAL:
        hi = tl.minimum(length, before + first + TOKENS)
        full = (before + first + 1) // BLOCK * BLOCK
    if WINDOW > 0:
        lo = tl.maximum(before + first - WINDOW + 1, 0) // BLOCK * BLOCK
        open = before + first + TOKENS - WINDOW
    inner = d[None, :] < SIZE
    within = n[:, None] * STRIDE + d[None, :]
    # A page's number is fetched one tile ahead: the loads of its keys cannot start without it.
    if BLOCK <= PAGE:
        page = tl.load(own + lo // PAGE, mask=lo < hi, other=0)
    else:
        page = tl.load(own + (lo + n) // PAGE, mask=lo + n < hi, other=0)
    # One loop, and a branch around the mask: a second loop would have to fill its pipeline anew.
    for start in range(lo, hi, BLOCK):
        if BLOCK <= PAGE:
            base = (page.to(tl.int64) * PAGE + start % PAGE) * STRIDE
            k_at, v_at = keys + base + within, values + base + within
            page = tl.load(own + (start + BLOCK) // PAGE, mask=start + BLOCK < hi, other=0)
        else:
            slot = page.to(tl.int64) * PAGE + (start + n) % PAGE
            offset = slot[:, None] * STRIDE + d[None, :]
            k_at, v_at = keys + offset, values + offset
            page = tl.load(own + (start + BLOCK + n) // PAGE, mask=start + BLOCK + n < hi, other=0)
        # Hidden keys may be anything; hidden values must be numbers, for 0 * NaN is NaN.
        stored = start + n < hi
        if WINDOW > 0:  # pages before the window may have been given back
            stored = stored & (start + n > before + first - WINDOW)
        stored = stored[:, None]
        k = tl.load(k_at) if SIZE == WIDE else tl.load(k_at, mask=inner, other=0.0)
        v = tl.load(v_at, mask=stored if SIZE == WIDE else stored & inner, other=0.0)
        scores = tl.dot(query, tl.trans(k.to(query.dtype)), input_precision=PRECISION)
        if CAPPED:
            scores = capped(scores, scale, cap)
        if (start >= full) | (start < open):
            key = start + n
            seen = (key < hi)[None, :]
            if CAUSAL:
                seen = seen & (key[None, :] <= position[:, None])
            if WINDOW > 0:
                seen = seen & (key[None, :] > position[:, None] - WINDOW)
            scores = tl.where(seen, scores, float("-inf"))
        acc, top, total = accumulate(acc, top, total, scores, v.to(query.dtype), units, PRECISION)
    acc = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    if NARROW:
        acc = acc * v_scale
    target = out + (at * (KV_HEADS * GROUP))[:, None] * SIZE + (heads * SIZE)[:, None] + d[None, :]
    tl.store(target, acc.to(out.dtype.element_ty), mask=mask)
