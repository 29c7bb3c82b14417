"""One new token per row against its pages, the keys split over programs.

The split is FlashDecoding's (Dao et al., 2023): each program attends over a share of a row's keys,
and the shares are joined by their log-sum-exp. The last program of a (row, kv head) to finish does
that, for a second kernel would cost a small batch as long as the first. The query heads of a group
are the rows of one product, so that keys and values are read once for all of them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from weft_attention_triton.softmax import accumulate, capped

__all__ = ("decode_kernel",)


@triton.jit
def share_of(
    length,
    split,
    WINDOW: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    LEAST: tl.constexpr,
):
    """Keys ``[lo, hi)`` of a split, and how many splits have any. ``lo`` is a multiple of BLOCK.

    Decided on the device from the true length, so that a captured graph adapts: a short row keeps
    to few splits of at least ``LEAST`` tiles, a long one spreads over all.
    """
    first = 0
    if WINDOW > 0:
        first = tl.maximum(length - WINDOW, 0) // BLOCK * BLOCK
    tiles = tl.cdiv(length - first, BLOCK)
    each = tl.maximum(tl.cdiv(tiles, SPLITS), LEAST)
    lo = first + split * each * BLOCK
    hi = tl.minimum(lo + each * BLOCK, length)
    return lo, hi, tl.maximum(tl.cdiv(tiles, each), 1)


@triton.jit
def join(
    out,
    parts,
    weights,
    place,
    used,
    SIZE: tl.constexpr,
    WIDE: tl.constexpr,
    SPLITS: tl.constexpr,
    ROOM: tl.constexpr,
):
    """Join the shares of query head ``place`` (of all rows' heads)."""
    s, d = tl.arange(0, ROOM), tl.arange(0, WIDE)
    # Other programs wrote them: past the L1 cache, which does not see that.
    weight = tl.load(
        weights + place * SPLITS + s, mask=s < used, other=float("-inf"), cache_modifier=".cg"
    )
    weight = tl.exp2(weight - tl.max(weight, 0))
    real = (s[:, None] < used) & (d[None, :] < SIZE)
    at = parts + (place * SPLITS + s)[:, None] * SIZE + d[None, :]
    part = tl.load(at, mask=real, other=0.0, cache_modifier=".cg")
    joined = tl.sum(part * weight[:, None], 0) / tl.sum(weight, 0)
    tl.store(out + place * SIZE + d, joined.to(out.dtype.element_ty), mask=d < SIZE)


@triton.jit
def finish(
    out, parts, weights, tickets, acc, top, total, real, row, head, split, used,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, SIZE: tl.constexpr,
    WIDE: tl.constexpr, SPLITS: tl.constexpr, ROOM: tl.constexpr,
):  # fmt: skip
    """Store the result, or a share of it; the last of the ``used`` programs joins the shares."""
    g, d = tl.arange(0, ROWS), tl.arange(0, WIDE)
    first = row * (KV_HEADS * GROUP) + head * GROUP
    place = first + g
    whole = out + place[:, None] * SIZE + d[None, :]
    if SPLITS == 1:
        tl.store(whole, acc.to(out.dtype.element_ty), mask=real)
    else:
        if used == 1:
            tl.store(whole, acc.to(out.dtype.element_ty), mask=real)
        else:
            at = place * SPLITS + split
            tl.store(parts + at[:, None] * SIZE + d[None, :], acc, mask=real)
            tl.store(weights + at, top + tl.log2(total), mask=g < GROUP)
            # Every thread's stores come before the ticket, which releases them to the other
            # programs and acquires theirs.
            tl.debug_barrier()
            ticket = tickets + row * KV_HEADS + head
            if tl.atomic_add(ticket, 1, sem="acq_rel", scope="gpu") == used - 1:
                tl.store(ticket, 0)  # for the next layer, and the next replay
                if GROUP <= 8:
                    for i in tl.static_range(GROUP):
                        join(out, parts, weights, first + i, used, SIZE, WIDE, SPLITS, ROOM)
                else:
                    for i in range(GROUP):
                        join(out, parts, weights, first + i, used, SIZE, WIDE, SPLITS, ROOM)


@triton.jit
def decode_kernel(
    q,  # [rows, heads, SIZE], rows q_stride elements apart
    cache,  # [2, pages, PAGE, KV_HEADS, SIZE]
    out,  # [rows, heads, SIZE]
    parts,  # float32 [rows, heads, SPLITS, SIZE]: shares, each normalised
    weights,  # float32 [rows, heads, SPLITS]: their log2-sum-exp2
    tickets,  # int32 [rows, KV_HEADS]: 0, and 0 again afterwards
    table,  # int32 [rows, pages], rows table_stride apart
    lengths,  # int32 [rows]; 0: the row is padding
    q_stride,
    table_stride,
    half,
    scale,
    cap,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,  # GROUP, padded to what a product takes
    SIZE: tl.constexpr,
    WIDE: tl.constexpr,  # SIZE, padded to a power of two
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    ROOM: tl.constexpr,  # SPLITS, padded to a power of two
    LEAST: tl.constexpr,
    WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Program (kv head, split, row). Heads run fastest: neighbours read the same pages."""
    head, split, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    length = tl.load(lengths + row)
    lo, hi, used = share_of(length, split, WINDOW, BLOCK, SPLITS, LEAST)
    if (lo < hi) | (split == 0):
        g, d, n = tl.arange(0, ROWS), tl.arange(0, WIDE), tl.arange(0, BLOCK)
        heads = head * GROUP + g
        real = (g[:, None] < GROUP) & (d[None, :] < SIZE)
        query = tl.load(
            q + row * q_stride + heads[:, None] * SIZE + d[None, :], mask=real, other=0.0
        )
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
            seen = start + n < hi
            if WINDOW > 0:
                seen = seen & (start + n >= length - WINDOW)
            if BLOCK <= PAGE:
                base = (page.to(tl.int64) * PAGE + start % PAGE) * STRIDE
                k_at, v_at = keys + base + within, values + base + within
                page = tl.load(own + (start + BLOCK) // PAGE, mask=start + BLOCK < hi, other=0)
            else:
                slot = page.to(tl.int64) * PAGE + (start + n) % PAGE
                at = slot[:, None] * STRIDE + d[None, :]
                k_at, v_at = keys + at, values + at
                page = tl.load(
                    own + (start + BLOCK + n) // PAGE, mask=start + BLOCK + n < hi, other=0
                )
            # Hidden keys may be anything; hidden values must be numbers, for 0 * NaN is NaN.
            if SIZE == WIDE:
                k = tl.load(k_at)
                v = tl.load(v_at, mask=seen[:, None], other=0.0)
            else:
                k = tl.load(k_at, mask=d[None, :] < SIZE, other=0.0)
                v = tl.load(v_at, mask=seen[:, None] & (d[None, :] < SIZE), other=0.0)
            scores = tl.dot(query, tl.trans(k.to(query.dtype)), input_precision=PRECISION)
            if CAPPED:
                scores = capped(scores, scale, cap)
            scores = tl.where(seen[None, :], scores, float("-inf"))
            acc, top, total = accumulate(
                acc, top, total, scores, v.to(query.dtype), units, PRECISION
            )
        # Padding rows have seen nothing: zeros come out, and no division by zero.
        acc = acc / tl.where(total > 0.0, total, 1.0)[:, None]
        finish(
            out, parts, weights, tickets, acc, top, total, real, row, head, split, used,
            KV_HEADS, GROUP, ROWS, SIZE, WIDE, SPLITS, ROOM,
        )  # fmt: skip
