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

from treadle_attention_triton.hopper.parts import (
    apply_causal_mask,
    fetch,
    fetch_queries,
    load_work_item,
    num_work_items,
    online_softmax,
    operand,
    rows_of,
    store_output,
    work_item_index,
    zero_tail,
)
from treadle_triton_kit.gluon import pack_columns, thread_barrier

__all__ = ("REGISTERS", "WARPS", "prompt_kernel")

WARPS = 4
REGISTERS = 168
"""Of a thread on average, which is what the three groups divide among them: 240, 240 and 24."""

_BLOCK = gl.constexpr(128)
_STAGES = gl.constexpr(2)  # blocks of keys, and of values, in flight; tiles of queries too


@gluon.jit
def producer(
    q_desc, kv_desc, queries, keys, values, q_ready, q_free, k_ready, k_free, v_ready, v_free,
    table, work, table_stride, units, values_at,
    KV_HEADS: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """One warp. Page numbers are loaded two blocks ahead: no fetch can start without them."""
    count = num_work_items(units)
    row, token, real, position, _length, head = load_work_item(
        work, work_item_index(0, units), KV_HEADS
    )
    hi = position + real
    a, b = rows_of(table + row * table_stride, (hi - 1) // _BLOCK, hi)
    i = 0  # blocks so far: of keys, and of values
    for n in range(count):
        row1, token1, real1, position1, _length1, head1 = load_work_item(
            work, work_item_index(n + 1, units), KV_HEADS
        )
        own = table + row * table_stride
        hi = position + real
        last = (hi - 1) // _BLOCK
        column = head * 128
        k = i % _STAGES
        mbarrier.wait(k_free.index(k), ((i // _STAGES) & 1) ^ 1)
        fetch(kv_desc, k_ready.index(k), keys.index(k), a, b, column)
        next_a, next_b = rows_of(own, gl.maximum(last - 1, 0), hi)
        for w in gl.static_range(2):
            at = n % _STAGES * 2 + w
            mbarrier.wait(q_free.index(at), ((n // _STAGES) & 1) ^ 1)
            fetch_queries(
                q_desc, q_ready.index(at), queries.index(at), token + w * (64 // GROUP), head, GROUP
            )
        for s in range(last):
            ahead_a, ahead_b = rows_of(own, gl.maximum(last - 2 - s, 0), hi)
            k = (i + 1) % _STAGES
            mbarrier.wait(k_free.index(k), (((i + 1) // _STAGES) & 1) ^ 1)
            fetch(kv_desc, k_ready.index(k), keys.index(k), next_a, next_b, column)
            v = i % _STAGES
            mbarrier.wait(v_free.index(v), ((i // _STAGES) & 1) ^ 1)
            fetch(kv_desc, v_ready.index(v), values.index(v), values_at + a, values_at + b, column)
            a, b = next_a, next_b
            next_a, next_b = ahead_a, ahead_b
            i += 1
        hi1 = position1 + real1
        first_a, first_b = rows_of(table + row1 * table_stride, (hi1 - 1) // _BLOCK, hi1)
        v = i % _STAGES
        mbarrier.wait(v_free.index(v), ((i // _STAGES) & 1) ^ 1)
        fetch(kv_desc, v_ready.index(v), values.index(v), values_at + a, values_at + b, column)
        i += 1
        a, b = first_a, first_b
        row, token, real, position, head = row1, token1, real1, position1, head1


@gluon.jit
def attend_block(
    query, keys, values, k_ready, k_free, v_ready, v_free, turns, passed, parity,
    weights, acc, top, total, i, start, seen, units,
    W: gl.constexpr, MASKED: gl.constexpr, SCORES: gl.constexpr, WEIGHTS: gl.constexpr,
):  # fmt: skip
    """Scores of block ``i`` and, while its softmax is taken, the products of block ``i`` - 1."""
    k, v = i % _STAGES, (i - 1) % _STAGES
    none = gl.zeros([64, _BLOCK], gl.float32, SCORES)
    mbarrier.wait(k_ready.index(k), (i // _STAGES) & 1)
    mbarrier.wait(turns.index(W), (i & 1) ^ (1 - W))  # there are as many turns as blocks
    scores = warpgroup_mma(query, keys.index(k).permute((1, 0)), none, use_acc=False, is_async=True)
    mbarrier.wait(v_ready.index(v), ((i - 1) // _STAGES) & 1)
    left = operand(weights, values.dtype, WEIGHTS)
    acc = warpgroup_mma(left, values.index(v), acc, is_async=True)
    mbarrier.arrive(turns.index(1 - W), count=1)
    scores = warpgroup_mma_wait(1, deps=(scores,))
    mbarrier.arrive(k_free.index(k), count=1)
    if MASKED:
        scores = apply_causal_mask(scores, start, seen, SCORES)
    p, top, worth = online_softmax(scores, top, units)
    total = total * worth + gl.sum(p, 1)
    # A barrier that was passed already, for its branch: ptxas would take the exponentials after
    # the wait below, where nothing runs beside them.
    mbarrier.wait(passed, parity)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    mbarrier.arrive(v_free.index(v), count=1)
    acc = acc * gl.convert_layout(worth, gl.SliceLayout(1, WEIGHTS.parent))[:, None]
    return pack_columns(p, values.dtype), acc, top, total


@gluon.jit
def consumer(
    queries, keys, values, q_ready, q_free, k_ready, k_free, v_ready, v_free, turns,
    out, work, units, scale,
    W: gl.constexpr, KV_HEADS: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """A warp group: rows ``64 * W`` to ``64 * W + 63`` of the tiles."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _BLOCK, 16])
    RESULTS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, RESULTS, 2)
    kind: gl.constexpr = values.dtype
    m = gl.arange(0, 64, layout=gl.SliceLayout(1, SCORES))
    own = 64 // GROUP * W + m // GROUP
    count = num_work_items(units)
    _row, token, real, position, length, head = load_work_item(
        work, work_item_index(0, units), KV_HEADS
    )
    i = 0
    for n in range(count):
        _row1, token1, real1, position1, length1, head1 = load_work_item(
            work, work_item_index(n + 1, units), KV_HEADS
        )
        hi = position + real
        last = (hi - 1) // _BLOCK
        seen = position + own
        full = (position + 64 // GROUP * W + 1) // _BLOCK  # blocks that all rows see all of
        at, parity = n % _STAGES * 2 + W, (n // _STAGES) & 1
        query = queries.index(at)
        mbarrier.wait(q_ready.index(at), parity)
        k = i % _STAGES
        mbarrier.wait(k_ready.index(k), (i // _STAGES) & 1)
        mbarrier.wait(turns.index(W), (i & 1) ^ (1 - W))
        none = gl.zeros([64, _BLOCK], gl.float32, SCORES)
        scores = warpgroup_mma(
            query, keys.index(k).permute((1, 0)), none, use_acc=False, is_async=True
        )
        mbarrier.arrive(turns.index(1 - W), count=1)
        scores = warpgroup_mma_wait(0, deps=(scores,))
        mbarrier.arrive(k_free.index(k), count=1)
        scores = apply_causal_mask(scores, last * _BLOCK, seen, SCORES)
        # Not -inf: rows past a tile's last token may see nothing at all, and -inf - -inf is NaN.
        top = gl.full([64], -1e30, gl.float32, layout=gl.SliceLayout(1, SCORES))
        p, top, _worth = online_softmax(scores, top, scale)
        total = gl.sum(p, 1)
        weights = pack_columns(p, kind)
        acc = gl.zeros([64, 128], gl.float32, RESULTS)
        if (length < (last + 1) * _BLOCK) & (hi % 64 != 0):
            mbarrier.wait(v_ready.index(k), (i // _STAGES) & 1)
            zero_tail(values.index(k), length - last * _BLOCK)
        masked = gl.maximum(gl.minimum(last - full, last), 0)
        for s in range(masked):
            i += 1
            weights, acc, top, total = attend_block(
                query, keys, values, k_ready, k_free, v_ready, v_free, turns, q_ready.index(at),
                parity, weights, acc, top, total, i, (last - 1 - s) * _BLOCK, seen, scale,
                W, True, SCORES, WEIGHTS,
            )  # fmt: skip
        for _ in range(masked, last):
            i += 1
            weights, acc, top, total = attend_block(
                query, keys, values, k_ready, k_free, v_ready, v_free, turns, q_ready.index(at),
                parity, weights, acc, top, total, i, 0, seen, scale,
                W, False, SCORES, WEIGHTS,
            )  # fmt: skip
        mbarrier.arrive(q_free.index(at), count=1)
        v = i % _STAGES
        mbarrier.wait(v_ready.index(v), (i // _STAGES) & 1)
        acc = warpgroup_mma(operand(weights, kind, WEIGHTS), values.index(v), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(v_free.index(v), count=1)
        i += 1
        total = gl.convert_layout(total, gl.SliceLayout(1, RESULTS))
        store_output(out, acc, total, token, real, head, W, KV_HEADS, GROUP, kind)
        token, real, position, length, head = token1, real1, position1, length1, head1


@gluon.jit(do_not_specialize=("table_stride", "units"))
def prompt_kernel(
    q_desc,  # [tokens, heads, 128] in boxes of [64 // GROUP, GROUP, 64]
    kv_desc,  # [2 * pages * 64, KV_HEADS * 128] in boxes of [64, 64]: keys of all pages, then values
    out,  # int32 [tokens, heads, 64]: pairs of results
    table,  # int32 [rows, pages], rows table_stride apart
    work,  # int32 [tiles, 5], see ``item``
    table_stride,
    units,  # tiles * KV_HEADS
    values_at,  # row of kv_desc where the values begin
    scale,  # in the units of exp2
    KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,  # a power of two up to 64
):
    """Causal attention of prompts; as many programs as multiprocessors."""
    TILE: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    ONE: gl.constexpr = mbarrier.MBarrierLayout()
    kind: gl.constexpr = kv_desc.dtype
    queries = gl.allocate_shared_memory(kind, [2 * _STAGES, 64, 128], TILE)
    keys = gl.allocate_shared_memory(kind, [_STAGES, _BLOCK, 128], TILE)
    values = gl.allocate_shared_memory(kind, [_STAGES, _BLOCK, 128], TILE)
    q_ready = gl.allocate_shared_memory(gl.int64, [2 * _STAGES, 1], ONE)
    q_free = gl.allocate_shared_memory(gl.int64, [2 * _STAGES, 1], ONE)
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], ONE)
    k_ready = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], ONE)
    k_free = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], ONE)
    v_ready = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], ONE)
    v_free = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], ONE)
    for w in gl.static_range(2 * _STAGES):
        mbarrier.init(q_ready.index(w), count=1)
        mbarrier.init(q_free.index(w), count=1)
    for s in gl.static_range(_STAGES):
        mbarrier.init(k_ready.index(s), count=1)
        mbarrier.init(v_ready.index(s), count=1)
        mbarrier.init(k_free.index(s), count=2)  # both warp groups
        mbarrier.init(v_free.index(s), count=2)
    for w in gl.static_range(2):
        mbarrier.init(turns.index(w), count=1)
    fence_async_shared()
    thread_barrier()
    gl.warp_specialize(
        [
            (consumer, (
                queries, keys, values, q_ready, q_free, k_ready, k_free, v_ready, v_free, turns,
                out, work, units, scale, 0, KV_HEADS, GROUP,
            )),
            (consumer, (
                queries, keys, values, q_ready, q_free, k_ready, k_free, v_ready, v_free, turns,
                out, work, units, scale, 1, KV_HEADS, GROUP,
            )),
            (producer, (
                q_desc, kv_desc, queries, keys, values, q_ready, q_free, k_ready, k_free,
                v_ready, v_free, table, work, table_stride, units, values_at, KV_HEADS, GROUP,
            )),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
