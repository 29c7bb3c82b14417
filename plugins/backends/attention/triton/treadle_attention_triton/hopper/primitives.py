"""The pieces of the kernel: which tile a program takes, what it fetches, softmax, results."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from treadle_triton_kit.gluon import pack_columns, split_pairs, thread_barrier

__all__ = (
    "apply_causal_mask",
    "fetch",
    "fetch_queries",
    "load_work_item",
    "num_work_items",
    "online_softmax",
    "page_rows",
    "store_output",
    "to_operand",
    "work_item_index",
    "zero_tail",
)  # fmt: skip

_BLOCK_N = gl.constexpr(128)  # keys of a block: two pages
_PAGE_SIZE = gl.constexpr(64)
_HEAD_DIM = gl.constexpr(128)  # of a head
_OUT_OF_RANGE_PAGE = gl.constexpr(
    1 << 24
)  # a page past the end of any cache, so that its rows are zeros


@gluon.jit
def load_work_item(work_items, item_idx, NUM_KV_HEADS: gl.constexpr):
    """Of a unit: row, its first token, real tokens, position of the first, keys of the row, head."""
    item_ptr = work_items + (item_idx // NUM_KV_HEADS) * 5
    row, token, valid = gl.load(item_ptr), gl.load(item_ptr + 1), gl.load(item_ptr + 2)
    return row, token, valid, gl.load(item_ptr + 3), gl.load(item_ptr + 4), item_idx % NUM_KV_HEADS


@gluon.jit
def work_item_index(n, total_items):
    """The n-th unit of this program, of a list that begins with the longest.

    There and back again (0 1 2, 2 1 0, ...), so that no program gets the longer ones each time.
    """
    pid, num_programs = gl.program_id(0), gl.num_programs(0)
    slot = gl.where(n % 2 == 0, pid, num_programs - 1 - pid)
    return gl.minimum(n * num_programs + slot, total_items - 1)


@gluon.jit
def num_work_items(total_items):
    """How many units this program takes."""
    pid, num_programs = gl.program_id(0), gl.num_programs(0)
    full_rounds = total_items // num_programs
    slot = gl.where(full_rounds % 2 == 0, pid, num_programs - 1 - pid)
    return full_rounds + (slot < total_items - full_rounds * num_programs).to(gl.int32)


@gluon.jit
def page_rows(page_table_row, block, end_key):
    """Where in the cache the two pages of a block begin, in tokens, for keys up to ``end_key``."""
    page = block * 2
    a = gl.load(page_table_row + page) * _PAGE_SIZE
    b = (
        gl.load(
            page_table_row + page + 1,
            mask=(page + 1) * _PAGE_SIZE < end_key,
            other=_OUT_OF_RANGE_PAGE,
        )
        * _PAGE_SIZE
    )
    return a, b


@gluon.jit
def fetch(desc, ready, buffer, a, b, col):
    """The keys, or values, of one block and head. Swizzled rows are 64 elements: two halves."""
    mbarrier.expect(ready, _BLOCK_N * _HEAD_DIM * 2)
    boxes = buffer._reinterpret(buffer.dtype, [4, 64, 64], desc.layout)
    for half in gl.static_range(2):
        box_col = col + 64 * half
        tma.async_copy_global_to_shared(desc, [a, box_col], ready, boxes.index(2 * half))
        tma.async_copy_global_to_shared(desc, [b, box_col], ready, boxes.index(2 * half + 1))


@gluon.jit
def fetch_queries(desc, ready, buffer, token, head, GQA_GROUP: gl.constexpr):
    """64 rows of queries: tokens, the group's heads among them."""
    mbarrier.expect(ready, 64 * _HEAD_DIM * 2)
    boxes = buffer._reinterpret(buffer.dtype, [2, 64 // GQA_GROUP, GQA_GROUP, 64], desc.layout)
    for half in gl.static_range(2):
        tma.async_copy_global_to_shared(
            desc, [token, head * GQA_GROUP, 64 * half], ready, boxes.index(half)
        )


@gluon.jit
def apply_causal_mask(qk, block_start, query_pos, QK_LAYOUT: gl.constexpr):
    """Scores of the block at ``block_start`` without keys after each query's own position."""
    offs_n = gl.arange(0, qk.shape[1], layout=gl.SliceLayout(0, QK_LAYOUT))
    return gl.where(offs_n[None, :] <= (query_pos - block_start)[:, None], qk, float("-inf"))


@gluon.jit
def online_softmax(qk, m_i, qk_scale):
    """Weights, the new top, and what the old sums are worth. ``m_i`` is in the units of exp2."""
    m_new = gl.maximum(m_i, gl.max(qk, 1) * qk_scale)
    return gl.exp2(qk * qk_scale - m_new[:, None]), m_new, gl.exp2(m_i - m_new)


@gluon.jit
def to_operand(x, dtype: gl.constexpr, OPERAND_LAYOUT: gl.constexpr):
    """What ``pack_columns`` packed, as the left side of a product."""
    low, high = split_pairs(x, dtype)
    values = gl.reshape(gl.join(low, high), [x.shape[0], 2 * x.shape[1]])
    return gl.convert_layout(values, OPERAND_LAYOUT, assert_trivial=True)


@gluon.jit
def zero_tail(buffer, num_valid):
    """Zeros for the values of keys from ``num_valid`` on, which nobody wrote: 0 * NaN is NaN."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    offs_n = gl.arange(0, buffer.shape[0], layout=gl.SliceLayout(1, layout))
    value = buffer.load(layout)
    buffer.store(gl.where((offs_n < num_valid)[:, None], value, 0.0))
    fence_async_shared()
    thread_barrier()


@gluon.jit
def store_output(
    out, acc, l_i, token, valid, head,
    WARP_GROUP: gl.constexpr, NUM_KV_HEADS: gl.constexpr, GQA_GROUP: gl.constexpr, dtype: gl.constexpr,
):  # fmt: skip
    """The results of rows ``64 * WARP_GROUP`` to ``64 * WARP_GROUP + 63`` of a tile; ``out`` counts pairs of them."""
    # 16 bytes a thread, by shuffles within warps alone.
    layout: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [8, 0], [0, 16], [0, 32]],
        [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]],
        [],
        [64, 64],
    )
    result = gl.convert_layout(pack_columns(acc * (1.0 / l_i)[:, None], dtype), layout)
    offs_m = 64 * WARP_GROUP + gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
    offs_d = gl.arange(0, 64, layout=gl.SliceLayout(0, layout))
    out_row = (
        (token + offs_m // GQA_GROUP).to(gl.int64) * (NUM_KV_HEADS * GQA_GROUP)
        + head * GQA_GROUP
        + offs_m % GQA_GROUP
    )
    mask = (offs_m // GQA_GROUP < valid)[:, None] & (offs_d < 64)[None, :]
    gl.store(out + out_row[:, None] * 64 + offs_d[None, :], result, mask=mask)
