"""Rows of one or few new tokens against their pages, the keys split over programs.

The split is FlashDecoding's (Dao et al., 2023): each program attends over a share of a row's keys,
and a second kernel joins the shares by their log-sum-exp. (Letting the last program to finish join
them was measured: no faster for groups of 2, 20 % slower for groups of 4, for it joins one head after
the other.) The query heads of a group, and the tokens of a draft, are the rows of one product, so
that keys and values are read once for all of them.

With ``USE_PDL`` (programmatic dependent launch) a kernel starts while the one before it still runs, reads
what the step's plan has fixed, and waits before it reads what that one may have written.
"""

from __future__ import annotations

import triton
import triton.language as tl

from treadle_attention_triton.softmax import accumulate, cast_query, first_softmax, softcap_tanh
from treadle_triton_kit.pdl import launch_dependents, wait_for_previous_kernel

__all__ = ("combine_kernel", "decode_kernel")


@triton.jit
def split_range(first_key, seq_len, split_idx, BLOCK_N: tl.constexpr, NUM_SPLITS: tl.constexpr):
    """Keys ``[lo, hi)`` of a split of ``[first_key, seq_len)``, and how many splits have any.

    Decided on the device from the true length, so that a captured graph adapts: a row of fewer
    tiles than splits uses as many splits as it has tiles.
    """
    num_tiles = tl.cdiv(seq_len - first_key, BLOCK_N)
    tiles_per_split = tl.maximum(tl.cdiv(num_tiles, NUM_SPLITS), 1)
    lo = first_key + split_idx * tiles_per_split * BLOCK_N
    hi = tl.minimum(lo + tiles_per_split * BLOCK_N, seq_len)
    return lo, hi, tl.maximum(tl.cdiv(num_tiles, tiles_per_split), 1)


@triton.jit
def row_range(
    seq_lens, query_start_loc, row_indices, item,
    MAX_QUERIES: tl.constexpr, SLIDING_WINDOW: tl.constexpr,
):  # fmt: skip
    """The row of an item, its first token, its tokens, its length, and the oldest key it sees."""
    if MAX_QUERIES == 1:
        row, query_start, query_len = item, item, 1
    else:
        row = tl.load(row_indices + item).to(tl.int64)
        query_start = tl.load(query_start_loc + row).to(tl.int64)
        query_len = tl.load(query_start_loc + row + 1) - query_start.to(tl.int32)
    seq_len = tl.load(seq_lens + row)
    first_key = 0
    if SLIDING_WINDOW > 0:
        first_key = tl.maximum(seq_len - query_len + 1 - SLIDING_WINDOW, 0)
    return row, query_start, query_len, seq_len, first_key


# The pages of a table change with each step: not specialized, or steps would compile variants.
@triton.jit(do_not_specialize=["page_table_stride"])
def decode_kernel(
    q,  # [tokens, heads, HEAD_DIM], rows q_stride elements apart
    cache,  # [2, pages, PAGE_SIZE, NUM_KV_HEADS, HEAD_DIM]
    out,  # [tokens, heads, HEAD_DIM]
    partial_out,  # float32 [items, MAX_QUERIES, heads, NUM_SPLITS, HEAD_DIM]: shares, each normalised
    partial_lse,  # float32 [items, MAX_QUERIES, heads, NUM_SPLITS]: their log2-sum-exp2
    page_table,  # int32 [rows, pages], rows page_table_stride apart
    seq_lens,  # int32 [rows]; 0: the row is padding
    query_start_loc,  # int32 [rows + 1]: first token of each row
    row_indices,  # int32 [items]: the rows to attend for; item = row = token if MAX_QUERIES is 1
    sinks,  # float32 [heads]
    q_stride,
    page_table_stride,
    v_offset,
    scale,
    softcap,
    v_scale,  # of the values of a cache in fp8; that of its keys is part of ``scale``
    NUM_KV_HEADS: tl.constexpr,
    GQA_GROUP: tl.constexpr,
    MAX_QUERIES: tl.constexpr,  # the most new tokens of a row
    BLOCK_M: tl.constexpr,  # MAX_QUERIES * GQA_GROUP, padded to what a product takes
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,  # HEAD_DIM, padded to a power of two
    PAGE_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    SLIDING_WINDOW: tl.constexpr,
    CAUSAL: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    FP8_CACHE: tl.constexpr,  # the cache is fp8
    INPUT_PRECISION: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """Program (item, split, kv head). Heads run fastest: neighbours read the same pages.

    The grid is flat, because its other dimensions end at 65,535.
    """
    launch_dependents(USE_PDL)
    pid = tl.program_id(0)
    head = pid % NUM_KV_HEADS
    split_idx = pid // NUM_KV_HEADS % NUM_SPLITS
    item = (pid // (NUM_KV_HEADS * NUM_SPLITS)).to(tl.int64)
    row, query_start, query_len, seq_len, first_key = row_range(
        seq_lens, query_start_loc, row_indices, item, MAX_QUERIES, SLIDING_WINDOW
    )
    context_len = seq_len - query_len  # the position of the row's first query
    lo, hi, used_splits = split_range(
        first_key // BLOCK_N * BLOCK_N, seq_len, split_idx, BLOCK_N, NUM_SPLITS
    )
    wait_for_previous_kernel(USE_PDL)
    if (lo < hi) | (split_idx == 0):
        offs_m, offs_d, offs_n = (
            tl.arange(0, BLOCK_M),
            tl.arange(0, HEAD_DIM_PADDED),
            tl.arange(0, BLOCK_N),
        )
        token = offs_m // GQA_GROUP
        q_head = head * GQA_GROUP + offs_m % GQA_GROUP
        mask_d = offs_d[None, :] < HEAD_DIM
        offs_q = (query_start + token) * q_stride + q_head * HEAD_DIM
        valid = (token < query_len)[:, None] & mask_d
        query = cast_query(
            tl.load(q + offs_q[:, None] + offs_d[None, :], mask=valid, other=0.0), FP8_CACHE
        )
        acc = tl.zeros([BLOCK_M, HEAD_DIM_PADDED], tl.float32)
        m_i, l_i = first_softmax(sinks, q_head, split_idx == 0, BLOCK_M, HAS_SINKS)
        k_base = cache + head * HEAD_DIM
        v_base = k_base + tl.cast(v_offset, tl.int64)
        page_table_row = page_table + row * page_table_stride
        qk_scale = (softcap if HAS_SOFTCAP else scale) * 1.4426950408889634  # of exp2
        KV_STRIDE: tl.constexpr = NUM_KV_HEADS * HEAD_DIM
        offs_kv = offs_n[:, None] * KV_STRIDE + offs_d[None, :]
        # The page of the next tile is fetched while this one is computed: its number is needed
        # before the loads of its keys can even start.
        if BLOCK_N <= PAGE_SIZE:
            page = tl.load(page_table_row + lo // PAGE_SIZE, mask=lo < hi, other=0)
        else:
            page = tl.load(
                page_table_row + (lo + offs_n) // PAGE_SIZE, mask=lo + offs_n < hi, other=0
            )
        for start in range(lo, hi, BLOCK_N):
            key_pos = start + offs_n
            key_mask = key_pos < hi
            if SLIDING_WINDOW > 0:  # pages before the window may have been given back
                key_mask = key_mask & (key_pos >= first_key)
            if BLOCK_N <= PAGE_SIZE:
                base = (page.to(tl.int64) * PAGE_SIZE + start % PAGE_SIZE) * KV_STRIDE
                k_ptrs, v_ptrs = k_base + base + offs_kv, v_base + base + offs_kv
                page = tl.load(
                    page_table_row + (start + BLOCK_N) // PAGE_SIZE,
                    mask=start + BLOCK_N < hi,
                    other=0,
                )
            else:
                slot = page.to(tl.int64) * PAGE_SIZE + key_pos % PAGE_SIZE
                offset = slot[:, None] * KV_STRIDE + offs_d[None, :]
                k_ptrs, v_ptrs = k_base + offset, v_base + offset
                page = tl.load(
                    page_table_row + (key_pos + BLOCK_N) // PAGE_SIZE,
                    mask=key_pos + BLOCK_N < hi,
                    other=0,
                )
            # Hidden keys may be anything; hidden values must be numbers, for 0 * NaN is NaN.
            k = (
                tl.load(k_ptrs)
                if HEAD_DIM == HEAD_DIM_PADDED
                else tl.load(k_ptrs, mask=mask_d, other=0.0)
            )
            v_mask = key_mask[:, None]
            v = tl.load(
                v_ptrs, mask=v_mask if HEAD_DIM == HEAD_DIM_PADDED else v_mask & mask_d, other=0.0
            )
            qk = tl.dot(query, tl.trans(k.to(query.dtype)), input_precision=INPUT_PRECISION)
            if HAS_SOFTCAP:
                qk = softcap_tanh(qk, scale, softcap)
            visible = key_mask[None, :]
            if MAX_QUERIES > 1 and CAUSAL:
                query_pos = context_len + token[:, None]
                visible = visible & (key_pos[None, :] <= query_pos)
                if SLIDING_WINDOW > 0:
                    visible = visible & (key_pos[None, :] > query_pos - SLIDING_WINDOW)
            qk = tl.where(visible, qk, float("-inf"))
            acc, m_i, l_i = accumulate(
                acc, m_i, l_i, qk, v.to(query.dtype), qk_scale, INPUT_PRECISION
            )
        # A query that has seen nothing (padding, or hidden keys only): zeros, of weight 2 ** -inf.
        l_i = tl.where(l_i > 0.0, l_i, 1.0)
        acc = acc / l_i[:, None]
        if FP8_CACHE:
            acc = acc * v_scale
        NUM_HEADS: tl.constexpr = NUM_KV_HEADS * GQA_GROUP
        out_ptrs = (
            out + ((query_start + token) * NUM_HEADS + q_head)[:, None] * HEAD_DIM + offs_d[None, :]
        )
        if NUM_SPLITS == 1:
            tl.store(out_ptrs, acc.to(out.dtype.element_ty), mask=valid)
        else:
            partial_idx = (
                (item * MAX_QUERIES + token) * NUM_HEADS + q_head
            ) * NUM_SPLITS + split_idx
            if used_splits == 1:
                tl.store(out_ptrs, acc.to(out.dtype.element_ty), mask=valid)
            else:
                tl.store(
                    partial_out + partial_idx[:, None] * HEAD_DIM + offs_d[None, :], acc, mask=valid
                )
                tl.store(partial_lse + partial_idx, m_i + tl.log2(l_i), mask=token < query_len)


@triton.jit
def combine_kernel(
    out,  # [tokens, heads, HEAD_DIM]
    partial_out,
    partial_lse,
    seq_lens,
    query_start_loc,
    row_indices,
    NUM_HEADS: tl.constexpr,
    MAX_QUERIES: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    NUM_SPLITS_PADDED: tl.constexpr,  # NUM_SPLITS, padded to a power of two
    SLIDING_WINDOW: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """Program (item, token of the item, head) joins the shares of one query and head."""
    launch_dependents(USE_PDL)
    pid = tl.program_id(0)
    head = pid % NUM_HEADS
    token = pid // NUM_HEADS % MAX_QUERIES
    item = (pid // (NUM_HEADS * MAX_QUERIES)).to(tl.int64)
    _, query_start, query_len, seq_len, first_key = row_range(
        seq_lens, query_start_loc, row_indices, item, MAX_QUERIES, SLIDING_WINDOW
    )
    _, _, used_splits = split_range(first_key // BLOCK_N * BLOCK_N, seq_len, 0, BLOCK_N, NUM_SPLITS)
    wait_for_previous_kernel(USE_PDL)
    if (used_splits > 1) & (token < query_len):
        offs_s, offs_d = tl.arange(0, NUM_SPLITS_PADDED), tl.arange(0, HEAD_DIM_PADDED)
        partial_idx = ((item * MAX_QUERIES + token) * NUM_HEADS + head) * NUM_SPLITS + offs_s
        weight = tl.load(partial_lse + partial_idx, mask=offs_s < used_splits, other=float("-inf"))
        weight = tl.exp2(weight - tl.max(weight, 0))
        valid = (offs_s[:, None] < used_splits) & (offs_d[None, :] < HEAD_DIM)
        partial = tl.load(
            partial_out + partial_idx[:, None] * HEAD_DIM + offs_d[None, :], mask=valid, other=0.0
        )
        combined = tl.sum(partial * weight[:, None], 0) / tl.sum(weight, 0)
        out_ptrs = out + ((query_start + token) * NUM_HEADS + head) * HEAD_DIM + offs_d
        tl.store(out_ptrs, combined.to(out.dtype.element_ty), mask=offs_d < HEAD_DIM)
