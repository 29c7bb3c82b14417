"""Rows of one or few new tokens against their pages, the keys split over programs.

The split is FlashDecoding's (Dao et al., 2023): each program attends over a share of a row's keys,
and a second kernel joins the shares by their log-sum-exp. (Letting the last program to finish join
them was measured: no faster for groups of 2, 20 % slower for groups of 4, for it joins one head after
the other.) The query heads of a group, and the tokens of a draft, are the rows of one product, so
that keys and values are read once for all of them.

With ``EARLY`` (programmatic dependent launch) a kernel starts while the one before it still runs, reads
what the step's plan has fixed, and waits before it reads what that one may have written.
"""

from __future__ import annotations

import triton
import triton.language as tl

from treadle_attention_triton.softmax import accumulate, capped, for_products
from treadle_triton_kit.pdl import launch_dependents, wait_for_previous_kernel

__all__ = ("combine_kernel", "decode_kernel")


@triton.jit
def split_range(first, length, split, BLOCK: tl.constexpr, SPLITS: tl.constexpr):
    """Keys ``[lo, hi)`` of a split of ``[first, length)``, and how many splits have any.

    Decided on the device from the true length, so that a captured graph adapts: a row of fewer
    tiles than splits uses as many splits as it has tiles.
    """
    tiles = tl.cdiv(length - first, BLOCK)
    each = tl.maximum(tl.cdiv(tiles, SPLITS), 1)
    lo = first + split * each * BLOCK
    hi = tl.minimum(lo + each * BLOCK, length)
    return lo, hi, tl.maximum(tl.cdiv(tiles, each), 1)


@triton.jit
def row_range(
    lengths, starts, chosen, item,
    QUERIES: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """The row of an item, its first token, its tokens, its length, and the oldest key it sees."""
    if QUERIES == 1:
        row, begin, count = item, item, 1
    else:
        row = tl.load(chosen + item).to(tl.int64)
        begin = tl.load(starts + row).to(tl.int64)
        count = tl.load(starts + row + 1) - begin.to(tl.int32)
    length = tl.load(lengths + row)
    oldest = 0
    if WINDOW > 0:
        oldest = tl.maximum(length - count + 1 - WINDOW, 0)
    return row, begin, count, length, oldest


@triton.jit
def decode_kernel(
    q,  # [tokens, heads, SIZE], rows q_stride elements apart
    cache,  # [2, pages, PAGE, KV_HEADS, SIZE]
    out,  # [tokens, heads, SIZE]
    parts,  # float32 [items, QUERIES, heads, SPLITS, SIZE]: shares, each normalised
    weights,  # float32 [items, QUERIES, heads, SPLITS]: their log2-sum-exp2
    table,  # int32 [rows, pages], rows table_stride apart
    lengths,  # int32 [rows]; 0: the row is padding
    starts,  # int32 [rows + 1]: first token of each row
    chosen,  # int32 [items]: the rows to attend for; item = row = token if QUERIES is 1
    q_stride,
    table_stride,
    half,
    scale,
    cap,
    v_scale,  # of the values of a cache in fp8; that of its keys is part of ``scale``
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    QUERIES: tl.constexpr,  # the most new tokens of a row
    ROWS: tl.constexpr,  # QUERIES * GROUP, padded to what a product takes
    SIZE: tl.constexpr,
    WIDE: tl.constexpr,  # SIZE, padded to a power of two
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    WINDOW: tl.constexpr,
    CAUSAL: tl.constexpr,
    CAPPED: tl.constexpr,
    NARROW: tl.constexpr,  # the cache is fp8
    PRECISION: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Program (item, split, kv head). Heads run fastest: neighbours read the same pages.

    The grid is flat, because its other dimensions end at 65,535.
    """
    launch_dependents(EARLY)
    program = tl.program_id(0)
    head = program % KV_HEADS
    split = program // KV_HEADS % SPLITS
    item = (program // (KV_HEADS * SPLITS)).to(tl.int64)
    row, begin, count, length, oldest = row_range(lengths, starts, chosen, item, QUERIES, WINDOW)
    before = length - count  # the position of the row's first query
    lo, hi, used = split_range(oldest // BLOCK * BLOCK, length, split, BLOCK, SPLITS)
    wait_for_previous_kernel(EARLY)
    if (lo < hi) | (split == 0):
        m, d, n = tl.arange(0, ROWS), tl.arange(0, WIDE), tl.arange(0, BLOCK)
        token = m // GROUP
        column = head * GROUP + m % GROUP
        inner = d[None, :] < SIZE
        at = (begin + token) * q_stride + column * SIZE
        real = (token < count)[:, None] & inner
        query = for_products(tl.load(q + at[:, None] + d[None, :], mask=real, other=0.0), NARROW)
        acc = tl.zeros([ROWS, WIDE], tl.float32)
        top = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        keys = cache + head * SIZE
        values = keys + tl.cast(half, tl.int64)
        own = table + row * table_stride
        units = (cap if CAPPED else scale) * 1.4426950408889634  # of exp2
        STRIDE: tl.constexpr = KV_HEADS * SIZE
        within = n[:, None] * STRIDE + d[None, :]
        # The page of the next tile is fetched while this one is computed: its number is needed
        # before the loads of its keys can even start.
        if BLOCK <= PAGE:
            page = tl.load(own + lo // PAGE, mask=lo < hi, other=0)
        else:
            page = tl.load(own + (lo + n) // PAGE, mask=lo + n < hi, other=0)
        for start in range(lo, hi, BLOCK):
            key = start + n
            stored = key < hi
            if WINDOW > 0:  # pages before the window may have been given back
                stored = stored & (key >= oldest)
            if BLOCK <= PAGE:
                base = (page.to(tl.int64) * PAGE + start % PAGE) * STRIDE
                k_at, v_at = keys + base + within, values + base + within
                page = tl.load(own + (start + BLOCK) // PAGE, mask=start + BLOCK < hi, other=0)
            else:
                slot = page.to(tl.int64) * PAGE + key % PAGE
                offset = slot[:, None] * STRIDE + d[None, :]
                k_at, v_at = keys + offset, values + offset
                page = tl.load(own + (key + BLOCK) // PAGE, mask=key + BLOCK < hi, other=0)
            # Hidden keys may be anything; hidden values must be numbers, for 0 * NaN is NaN.
            k = tl.load(k_at) if SIZE == WIDE else tl.load(k_at, mask=inner, other=0.0)
            kept = stored[:, None]
            v = tl.load(v_at, mask=kept if SIZE == WIDE else kept & inner, other=0.0)
            scores = tl.dot(query, tl.trans(k.to(query.dtype)), input_precision=PRECISION)
            if CAPPED:
                scores = capped(scores, scale, cap)
            seen = stored[None, :]
            if QUERIES > 1 and CAUSAL:
                position = before + token[:, None]
                seen = seen & (key[None, :] <= position)
                if WINDOW > 0:
                    seen = seen & (key[None, :] > position - WINDOW)
            scores = tl.where(seen, scores, float("-inf"))
            acc, top, total = accumulate(
                acc, top, total, scores, v.to(query.dtype), units, PRECISION
            )
        # A query that has seen nothing (padding, or hidden keys only): zeros, of weight 2 ** -inf.
        total = tl.where(total > 0.0, total, 1.0)
        acc = acc / total[:, None]
        if NARROW:
            acc = acc * v_scale
        HEADS: tl.constexpr = KV_HEADS * GROUP
        whole = out + ((begin + token) * HEADS + column)[:, None] * SIZE + d[None, :]
        if SPLITS == 1:
            tl.store(whole, acc.to(out.dtype.element_ty), mask=real)
        else:
            share = ((item * QUERIES + token) * HEADS + column) * SPLITS + split
            if used == 1:
                tl.store(whole, acc.to(out.dtype.element_ty), mask=real)
            else:
                tl.store(parts + share[:, None] * SIZE + d[None, :], acc, mask=real)
                tl.store(weights + share, top + tl.log2(total), mask=token < count)


@triton.jit
def combine_kernel(
    out,  # [tokens, heads, SIZE]
    parts,
    weights,
    lengths,
    starts,
    chosen,
    HEADS: tl.constexpr,
    QUERIES: tl.constexpr,
    SIZE: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    ROOM: tl.constexpr,  # SPLITS, padded to a power of two
    WINDOW: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Program (item, token of the item, head) joins the shares of one query and head."""
    launch_dependents(EARLY)
    program = tl.program_id(0)
    head = program % HEADS
    token = program // HEADS % QUERIES
    item = (program // (HEADS * QUERIES)).to(tl.int64)
    _, begin, count, length, oldest = row_range(lengths, starts, chosen, item, QUERIES, WINDOW)
    _, _, used = split_range(oldest // BLOCK * BLOCK, length, 0, BLOCK, SPLITS)
    wait_for_previous_kernel(EARLY)
    if (used > 1) & (token < count):
        s, d = tl.arange(0, ROOM), tl.arange(0, WIDE)
        share = ((item * QUERIES + token) * HEADS + head) * SPLITS + s
        weight = tl.load(weights + share, mask=s < used, other=float("-inf"))
        weight = tl.exp2(weight - tl.max(weight, 0))
        real = (s[:, None] < used) & (d[None, :] < SIZE)
        part = tl.load(parts + share[:, None] * SIZE + d[None, :], mask=real, other=0.0)
        joined = tl.sum(part * weight[:, None], 0) / tl.sum(weight, 0)
        target = out + ((begin + token) * HEADS + head) * SIZE + d
        tl.store(target, joined.to(out.dtype.element_ty), mask=d < SIZE)
