"""Rows of several new tokens against their pages: prompts, chunks of prompts, drafts.

Tokens of all rows are packed. A program takes a tile of one row's queries for one kv head; the
query heads of the group are interleaved into the tile's rows (token-major), so that short chunks
fill a tile and keys are read once per group.
"""

from __future__ import annotations

import triton
import triton.language as tl

from treadle_attention_triton.softmax import accumulate, cast_query, first_softmax, softcap_tanh

__all__ = ("prefill_kernel",)


# The pages of a table change with each step: not specialized, or steps would compile variants.
@triton.jit(do_not_specialize=["page_table_stride"])
def prefill_kernel(
    q,  # [tokens, heads, HEAD_DIM], rows q_stride elements apart
    cache,  # [2, pages, PAGE_SIZE, NUM_KV_HEADS, HEAD_DIM]
    out,  # [tokens, heads, HEAD_DIM]
    page_table,  # int32 [rows, pages], rows page_table_stride apart
    seq_lens,  # int32 [rows]
    query_start_loc,  # int32 [rows + 1]: first token of each row
    tile_list,  # int32 [tiles, 2]: row, first query of the tile in the row
    sinks,  # float32 [heads]
    q_stride,
    page_table_stride,
    v_offset,
    scale,
    softcap,
    v_scale,  # of the values of a cache in fp8; that of its keys is part of ``scale``
    NUM_KV_HEADS: tl.constexpr,
    GQA_GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,  # rows of a tile: BLOCK_M // GQA_GROUP tokens
    BLOCK_N: tl.constexpr,  # keys of a tile
    SLIDING_WINDOW: tl.constexpr,
    CAUSAL: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    FP8_CACHE: tl.constexpr,  # the cache is fp8
    INPUT_PRECISION: tl.constexpr,
):
    """Program (kv head, tile)."""
    head, tile_idx = tl.program_id(0), tl.program_id(1)
    row = tl.load(tile_list + 2 * tile_idx).to(tl.int64)
    first_query = tl.load(tile_list + 2 * tile_idx + 1)
    query_start = tl.load(query_start_loc + row)
    query_len = tl.load(query_start_loc + row + 1) - query_start
    seq_len = tl.load(seq_lens + row)
    context_len = seq_len - query_len  # tokens that were in the cache already
    BLOCK_TOKENS: tl.constexpr = BLOCK_M // GQA_GROUP
    offs_m, offs_d, offs_n = (
        tl.arange(0, BLOCK_M),
        tl.arange(0, HEAD_DIM_PADDED),
        tl.arange(0, BLOCK_N),
    )
    token = first_query + offs_m // GQA_GROUP
    q_head = head * GQA_GROUP + offs_m % GQA_GROUP
    valid = (token < query_len) & (offs_m < BLOCK_TOKENS * GQA_GROUP)
    mask = valid[:, None] & (offs_d[None, :] < HEAD_DIM)
    token_idx = (query_start + token).to(tl.int64)
    query = tl.load(
        q + token_idx[:, None] * q_stride + (q_head * HEAD_DIM)[:, None] + offs_d[None, :],
        mask=mask,
        other=0.0,
    )
    query = cast_query(query, FP8_CACHE)
    query_pos = context_len + token
    acc = tl.zeros([BLOCK_M, HEAD_DIM_PADDED], tl.float32)
    m_i, l_i = first_softmax(sinks, q_head, True, BLOCK_M, HAS_SINKS)
    KV_STRIDE: tl.constexpr = NUM_KV_HEADS * HEAD_DIM
    k_base = cache + head * HEAD_DIM
    v_base = k_base + tl.cast(v_offset, tl.int64)
    page_table_row = page_table + row * page_table_stride
    qk_scale = (softcap if HAS_SOFTCAP else scale) * 1.4426950408889634  # of exp2
    # Keys [lo, hi) are seen by some query of the tile, keys [unmasked_start, unmasked_end) by all of them.
    lo = 0
    unmasked_start = 0
    hi = seq_len
    unmasked_end = seq_len // BLOCK_N * BLOCK_N
    if CAUSAL:
        hi = tl.minimum(seq_len, context_len + first_query + BLOCK_TOKENS)
        unmasked_end = (context_len + first_query + 1) // BLOCK_N * BLOCK_N
    if SLIDING_WINDOW > 0:
        lo = tl.maximum(context_len + first_query - SLIDING_WINDOW + 1, 0) // BLOCK_N * BLOCK_N
        unmasked_start = context_len + first_query + BLOCK_TOKENS - SLIDING_WINDOW
    mask_d = offs_d[None, :] < HEAD_DIM
    offs_kv = offs_n[:, None] * KV_STRIDE + offs_d[None, :]
    # A page's number is fetched one tile ahead: the loads of its keys cannot start without it.
    if BLOCK_N <= PAGE_SIZE:
        page = tl.load(page_table_row + lo // PAGE_SIZE, mask=lo < hi, other=0)
    else:
        page = tl.load(page_table_row + (lo + offs_n) // PAGE_SIZE, mask=lo + offs_n < hi, other=0)
    # One loop, and a branch around the mask: a second loop would have to fill its pipeline anew.
    for start in range(lo, hi, BLOCK_N):
        if BLOCK_N <= PAGE_SIZE:
            base = (page.to(tl.int64) * PAGE_SIZE + start % PAGE_SIZE) * KV_STRIDE
            k_ptrs, v_ptrs = k_base + base + offs_kv, v_base + base + offs_kv
            page = tl.load(
                page_table_row + (start + BLOCK_N) // PAGE_SIZE, mask=start + BLOCK_N < hi, other=0
            )
        else:
            slot = page.to(tl.int64) * PAGE_SIZE + (start + offs_n) % PAGE_SIZE
            offset = slot[:, None] * KV_STRIDE + offs_d[None, :]
            k_ptrs, v_ptrs = k_base + offset, v_base + offset
            page = tl.load(
                page_table_row + (start + BLOCK_N + offs_n) // PAGE_SIZE,
                mask=start + BLOCK_N + offs_n < hi,
                other=0,
            )
        # Hidden keys may be anything; hidden values must be numbers, for 0 * NaN is NaN.
        v_mask = start + offs_n < hi
        if SLIDING_WINDOW > 0:  # pages before the window may have been given back
            v_mask = v_mask & (start + offs_n > context_len + first_query - SLIDING_WINDOW)
        v_mask = v_mask[:, None]
        k = (
            tl.load(k_ptrs)
            if HEAD_DIM == HEAD_DIM_PADDED
            else tl.load(k_ptrs, mask=mask_d, other=0.0)
        )
        v = tl.load(
            v_ptrs, mask=v_mask if HEAD_DIM == HEAD_DIM_PADDED else v_mask & mask_d, other=0.0
        )
        qk = tl.dot(query, tl.trans(k.to(query.dtype)), input_precision=INPUT_PRECISION)
        if HAS_SOFTCAP:
            qk = softcap_tanh(qk, scale, softcap)
        if (start >= unmasked_end) | (start < unmasked_start):
            key_pos = start + offs_n
            visible = (key_pos < hi)[None, :]
            if CAUSAL:
                visible = visible & (key_pos[None, :] <= query_pos[:, None])
            if SLIDING_WINDOW > 0:
                visible = visible & (key_pos[None, :] > query_pos[:, None] - SLIDING_WINDOW)
            qk = tl.where(visible, qk, float("-inf"))
        acc, m_i, l_i = accumulate(acc, m_i, l_i, qk, v.to(query.dtype), qk_scale, INPUT_PRECISION)
    acc = acc / tl.where(l_i > 0.0, l_i, 1.0)[:, None]
    if FP8_CACHE:
        acc = acc * v_scale
    out_ptrs = (
        out
        + (token_idx * (NUM_KV_HEADS * GQA_GROUP))[:, None] * HEAD_DIM
        + (q_head * HEAD_DIM)[:, None]
        + offs_d[None, :]
    )
    tl.store(out_ptrs, acc.to(out.dtype.element_ty), mask=mask)
