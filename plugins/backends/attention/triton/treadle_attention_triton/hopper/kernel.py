"""The kernel: one warp fetches, two warp groups multiply, all of them over a list of tiles.

A tile is 128 rows of queries of one row and kv head, tokens with the group's heads among them. It
meets its keys from the last block to the first, so that the masked blocks come before the loop of
all others. Barriers are shared memory's: ``ready`` when what was fetched has arrived, ``free`` when
its readers are done; a wait names the parity of the phase that it waits for the end of.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from treadle_attention_triton.hopper.primitives import (
    apply_causal_mask,
    fetch,
    fetch_queries,
    load_work_item,
    num_work_items,
    online_softmax,
    page_rows,
    store_output,
    to_operand,
    work_item_index,
    zero_tail,
)
from treadle_triton_kit.gluon import pack_columns, thread_barrier

__all__ = ("REGISTERS", "WARPS", "hopper_prefill_kernel")

WARPS = 4
REGISTERS = 168
"""Of a thread on average, which is what the three groups divide among them: 240, 240 and 24."""

_BLOCK_N = gl.constexpr(128)
_NUM_STAGES = gl.constexpr(2)  # blocks of keys, and of values, in flight; tiles of queries too


@gluon.jit
def producer(
    q_desc, kv_desc, q_smem, k_smem, v_smem, q_ready, q_free, k_ready, k_free, v_ready, v_free,
    page_table, work_items, page_table_stride, total_items, v_row_offset,
    NUM_KV_HEADS: gl.constexpr, GQA_GROUP: gl.constexpr,
):  # fmt: skip
    """One warp. Page numbers are loaded two blocks ahead: no fetch can start without them."""
    num_items = num_work_items(total_items)
    row, token, valid, pos, _seq_len, head = load_work_item(
        work_items, work_item_index(0, total_items), NUM_KV_HEADS
    )
    end_key = pos + valid
    a, b = page_rows(page_table + row * page_table_stride, (end_key - 1) // _BLOCK_N, end_key)
    i = 0  # blocks so far: of keys, and of values
    for n in range(num_items):
        next_row, next_token, next_valid, next_pos, _next_seq_len, next_head = load_work_item(
            work_items, work_item_index(n + 1, total_items), NUM_KV_HEADS
        )
        page_table_row = page_table + row * page_table_stride
        end_key = pos + valid
        last_block = (end_key - 1) // _BLOCK_N
        col = head * 128
        k_stage = i % _NUM_STAGES
        mbarrier.wait(k_free.index(k_stage), ((i // _NUM_STAGES) & 1) ^ 1)
        fetch(kv_desc, k_ready.index(k_stage), k_smem.index(k_stage), a, b, col)
        next_a, next_b = page_rows(page_table_row, gl.maximum(last_block - 1, 0), end_key)
        for w in gl.static_range(2):
            q_stage = n % _NUM_STAGES * 2 + w
            mbarrier.wait(q_free.index(q_stage), ((n // _NUM_STAGES) & 1) ^ 1)
            fetch_queries(
                q_desc,
                q_ready.index(q_stage),
                q_smem.index(q_stage),
                token + w * (64 // GQA_GROUP),
                head,
                GQA_GROUP,
            )
        for s in range(last_block):
            ahead_a, ahead_b = page_rows(page_table_row, gl.maximum(last_block - 2 - s, 0), end_key)
            k_stage = (i + 1) % _NUM_STAGES
            mbarrier.wait(k_free.index(k_stage), (((i + 1) // _NUM_STAGES) & 1) ^ 1)
            fetch(kv_desc, k_ready.index(k_stage), k_smem.index(k_stage), next_a, next_b, col)
            v_stage = i % _NUM_STAGES
            mbarrier.wait(v_free.index(v_stage), ((i // _NUM_STAGES) & 1) ^ 1)
            fetch(
                kv_desc,
                v_ready.index(v_stage),
                v_smem.index(v_stage),
                v_row_offset + a,
                v_row_offset + b,
                col,
            )
            a, b = next_a, next_b
            next_a, next_b = ahead_a, ahead_b
            i += 1
        next_end_key = next_pos + next_valid
        first_a, first_b = page_rows(
            page_table + next_row * page_table_stride, (next_end_key - 1) // _BLOCK_N, next_end_key
        )
        v_stage = i % _NUM_STAGES
        mbarrier.wait(v_free.index(v_stage), ((i // _NUM_STAGES) & 1) ^ 1)
        fetch(
            kv_desc,
            v_ready.index(v_stage),
            v_smem.index(v_stage),
            v_row_offset + a,
            v_row_offset + b,
            col,
        )
        i += 1
        a, b = first_a, first_b
        row, token, valid, pos, head = next_row, next_token, next_valid, next_pos, next_head


@gluon.jit
def attend_block(
    q_tile, k_smem, v_smem, k_ready, k_free, v_ready, v_free, order_bars, passed_bar, parity,
    p_prev, acc, m_i, l_i, i, block_start, query_pos, qk_scale,
    WARP_GROUP: gl.constexpr, MASKED: gl.constexpr, QK_LAYOUT: gl.constexpr, P_LAYOUT: gl.constexpr,
):  # fmt: skip
    """Scores of block ``i`` and, while its softmax is taken, the products of block ``i`` - 1."""
    k_stage, v_stage = i % _NUM_STAGES, (i - 1) % _NUM_STAGES
    zeros = gl.zeros([64, _BLOCK_N], gl.float32, QK_LAYOUT)
    mbarrier.wait(k_ready.index(k_stage), (i // _NUM_STAGES) & 1)
    mbarrier.wait(
        order_bars.index(WARP_GROUP), (i & 1) ^ (1 - WARP_GROUP)
    )  # there are as many turns as blocks
    qk = warpgroup_mma(
        q_tile, k_smem.index(k_stage).permute((1, 0)), zeros, use_acc=False, is_async=True
    )
    mbarrier.wait(v_ready.index(v_stage), ((i - 1) // _NUM_STAGES) & 1)
    p_operand = to_operand(p_prev, v_smem.dtype, P_LAYOUT)
    acc = warpgroup_mma(p_operand, v_smem.index(v_stage), acc, is_async=True)
    mbarrier.arrive(order_bars.index(1 - WARP_GROUP), count=1)
    qk = warpgroup_mma_wait(1, deps=(qk,))
    mbarrier.arrive(k_free.index(k_stage), count=1)
    if MASKED:
        qk = apply_causal_mask(qk, block_start, query_pos, QK_LAYOUT)
    p, m_i, alpha = online_softmax(qk, m_i, qk_scale)
    l_i = l_i * alpha + gl.sum(p, 1)
    # A barrier that was passed already, for its branch: ptxas would take the exponentials after
    # the wait below, where nothing runs beside them.
    mbarrier.wait(passed_bar, parity)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    mbarrier.arrive(v_free.index(v_stage), count=1)
    acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, P_LAYOUT.parent))[:, None]
    return pack_columns(p, v_smem.dtype), acc, m_i, l_i


@gluon.jit
def consumer(
    q_smem, k_smem, v_smem, q_ready, q_free, k_ready, k_free, v_ready, v_free, order_bars,
    out, work_items, total_items, qk_scale,
    WARP_GROUP: gl.constexpr, NUM_KV_HEADS: gl.constexpr, GQA_GROUP: gl.constexpr,
):  # fmt: skip
    """A warp group: rows ``64 * WARP_GROUP`` to ``64 * WARP_GROUP + 63`` of the tiles."""
    QK_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _BLOCK_N, 16])
    ACC_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, ACC_LAYOUT, 2)
    dtype: gl.constexpr = v_smem.dtype
    offs_m = gl.arange(0, 64, layout=gl.SliceLayout(1, QK_LAYOUT))
    token_offs = 64 // GQA_GROUP * WARP_GROUP + offs_m // GQA_GROUP
    num_items = num_work_items(total_items)
    _row, token, valid, pos, seq_len, head = load_work_item(
        work_items, work_item_index(0, total_items), NUM_KV_HEADS
    )
    i = 0
    for n in range(num_items):
        _next_row, next_token, next_valid, next_pos, next_seq_len, next_head = load_work_item(
            work_items, work_item_index(n + 1, total_items), NUM_KV_HEADS
        )
        end_key = pos + valid
        last_block = (end_key - 1) // _BLOCK_N
        query_pos = pos + token_offs
        num_full_blocks = (
            pos + 64 // GQA_GROUP * WARP_GROUP + 1
        ) // _BLOCK_N  # blocks that all rows see all of
        q_stage, parity = n % _NUM_STAGES * 2 + WARP_GROUP, (n // _NUM_STAGES) & 1
        q_tile = q_smem.index(q_stage)
        mbarrier.wait(q_ready.index(q_stage), parity)
        k_stage = i % _NUM_STAGES
        mbarrier.wait(k_ready.index(k_stage), (i // _NUM_STAGES) & 1)
        mbarrier.wait(order_bars.index(WARP_GROUP), (i & 1) ^ (1 - WARP_GROUP))
        zeros = gl.zeros([64, _BLOCK_N], gl.float32, QK_LAYOUT)
        qk = warpgroup_mma(
            q_tile, k_smem.index(k_stage).permute((1, 0)), zeros, use_acc=False, is_async=True
        )
        mbarrier.arrive(order_bars.index(1 - WARP_GROUP), count=1)
        qk = warpgroup_mma_wait(0, deps=(qk,))
        mbarrier.arrive(k_free.index(k_stage), count=1)
        qk = apply_causal_mask(qk, last_block * _BLOCK_N, query_pos, QK_LAYOUT)
        # Not -inf: rows past a tile's last token may see nothing at all, and -inf - -inf is NaN.
        m_i = gl.full([64], -1e30, gl.float32, layout=gl.SliceLayout(1, QK_LAYOUT))
        p, m_i, _alpha = online_softmax(qk, m_i, qk_scale)
        l_i = gl.sum(p, 1)
        p_packed = pack_columns(p, dtype)
        acc = gl.zeros([64, 128], gl.float32, ACC_LAYOUT)
        if (seq_len < (last_block + 1) * _BLOCK_N) & (end_key % 64 != 0):
            mbarrier.wait(v_ready.index(k_stage), (i // _NUM_STAGES) & 1)
            zero_tail(v_smem.index(k_stage), seq_len - last_block * _BLOCK_N)
        num_masked = gl.maximum(gl.minimum(last_block - num_full_blocks, last_block), 0)
        for s in range(num_masked):
            i += 1
            p_packed, acc, m_i, l_i = attend_block(
                q_tile, k_smem, v_smem, k_ready, k_free, v_ready, v_free, order_bars, q_ready.index(q_stage),
                parity, p_packed, acc, m_i, l_i, i, (last_block - 1 - s) * _BLOCK_N, query_pos, qk_scale,
                WARP_GROUP, True, QK_LAYOUT, P_LAYOUT,
            )  # fmt: skip
        for _ in range(num_masked, last_block):
            i += 1
            p_packed, acc, m_i, l_i = attend_block(
                q_tile, k_smem, v_smem, k_ready, k_free, v_ready, v_free, order_bars, q_ready.index(q_stage),
                parity, p_packed, acc, m_i, l_i, i, 0, query_pos, qk_scale,
                WARP_GROUP, False, QK_LAYOUT, P_LAYOUT,
            )  # fmt: skip
        mbarrier.arrive(q_free.index(q_stage), count=1)
        v_stage = i % _NUM_STAGES
        mbarrier.wait(v_ready.index(v_stage), (i // _NUM_STAGES) & 1)
        acc = warpgroup_mma(
            to_operand(p_packed, dtype, P_LAYOUT), v_smem.index(v_stage), acc, is_async=True
        )
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(v_free.index(v_stage), count=1)
        i += 1
        l_i = gl.convert_layout(l_i, gl.SliceLayout(1, ACC_LAYOUT))
        store_output(out, acc, l_i, token, valid, head, WARP_GROUP, NUM_KV_HEADS, GQA_GROUP, dtype)
        token, valid, pos, seq_len, head = next_token, next_valid, next_pos, next_seq_len, next_head


@gluon.jit(do_not_specialize=("page_table_stride", "total_items"))
def hopper_prefill_kernel(
    q_desc,  # [tokens, heads, 128] in boxes of [64 // GQA_GROUP, GQA_GROUP, 64]
    kv_desc,  # [2 * pages * 64, NUM_KV_HEADS * 128] in boxes of [64, 64]: keys of all pages, then values
    out,  # int32 [tokens, heads, 64]: pairs of results
    page_table,  # int32 [rows, pages], rows page_table_stride apart
    work_items,  # int32 [tiles, 5], see ``load_work_item``
    page_table_stride,
    total_items,  # tiles * NUM_KV_HEADS
    v_row_offset,  # row of kv_desc where the values begin
    qk_scale,  # in the units of exp2
    NUM_KV_HEADS: gl.constexpr,
    GQA_GROUP: gl.constexpr,  # a power of two up to 64
):
    """Causal attention of prompts; as many programs as multiprocessors."""
    SMEM_LAYOUT: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    MBAR_LAYOUT: gl.constexpr = mbarrier.MBarrierLayout()
    dtype: gl.constexpr = kv_desc.dtype
    q_smem = gl.allocate_shared_memory(dtype, [2 * _NUM_STAGES, 64, 128], SMEM_LAYOUT)
    k_smem = gl.allocate_shared_memory(dtype, [_NUM_STAGES, _BLOCK_N, 128], SMEM_LAYOUT)
    v_smem = gl.allocate_shared_memory(dtype, [_NUM_STAGES, _BLOCK_N, 128], SMEM_LAYOUT)
    q_ready = gl.allocate_shared_memory(gl.int64, [2 * _NUM_STAGES, 1], MBAR_LAYOUT)
    q_free = gl.allocate_shared_memory(gl.int64, [2 * _NUM_STAGES, 1], MBAR_LAYOUT)
    order_bars = gl.allocate_shared_memory(gl.int64, [2, 1], MBAR_LAYOUT)
    k_ready = gl.allocate_shared_memory(gl.int64, [_NUM_STAGES, 1], MBAR_LAYOUT)
    k_free = gl.allocate_shared_memory(gl.int64, [_NUM_STAGES, 1], MBAR_LAYOUT)
    v_ready = gl.allocate_shared_memory(gl.int64, [_NUM_STAGES, 1], MBAR_LAYOUT)
    v_free = gl.allocate_shared_memory(gl.int64, [_NUM_STAGES, 1], MBAR_LAYOUT)
    for w in gl.static_range(2 * _NUM_STAGES):
        mbarrier.init(q_ready.index(w), count=1)
        mbarrier.init(q_free.index(w), count=1)
    for s in gl.static_range(_NUM_STAGES):
        mbarrier.init(k_ready.index(s), count=1)
        mbarrier.init(v_ready.index(s), count=1)
        mbarrier.init(k_free.index(s), count=2)  # both warp groups
        mbarrier.init(v_free.index(s), count=2)
    for w in gl.static_range(2):
        mbarrier.init(order_bars.index(w), count=1)
    fence_async_shared()
    thread_barrier()
    gl.warp_specialize(
        [
            (consumer, (
                q_smem, k_smem, v_smem, q_ready, q_free, k_ready, k_free, v_ready, v_free, order_bars,
                out, work_items, total_items, qk_scale, 0, NUM_KV_HEADS, GQA_GROUP,
            )),
            (consumer, (
                q_smem, k_smem, v_smem, q_ready, q_free, k_ready, k_free, v_ready, v_free, order_bars,
                out, work_items, total_items, qk_scale, 1, NUM_KV_HEADS, GQA_GROUP,
            )),
            (producer, (
                q_desc, kv_desc, q_smem, k_smem, v_smem, q_ready, q_free, k_ready, k_free,
                v_ready, v_free, page_table, work_items, page_table_stride, total_items, v_row_offset, NUM_KV_HEADS, GQA_GROUP,
            )),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
