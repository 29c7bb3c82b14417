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
    "operand",
    "rows_of",
    "store_output",
    "work_item_index",
    "zero_tail",
)  # fmt: skip

_BLOCK = gl.constexpr(128)  # keys of a block: two pages
_PAGE = gl.constexpr(64)
_SIZE = gl.constexpr(128)  # of a head
_NOWHERE = gl.constexpr(1 << 24)  # a page past the end of any cache, so that its rows are zeros


@gluon.jit
def load_work_item(work, unit, KV_HEADS: gl.constexpr):
    """Of a unit: row, its first token, real tokens, position of the first, keys of the row, head."""
    at = work + (unit // KV_HEADS) * 5
    row, token, real = gl.load(at), gl.load(at + 1), gl.load(at + 2)
    return row, token, real, gl.load(at + 3), gl.load(at + 4), unit % KV_HEADS


@gluon.jit
def work_item_index(n, units):
    """The n-th unit of this program, of a list that begins with the longest.

    There and back again (0 1 2, 2 1 0, ...), so that no program gets the longer ones each time.
    """
    pid, programs = gl.program_id(0), gl.num_programs(0)
    at = gl.where(n % 2 == 0, pid, programs - 1 - pid)
    return gl.minimum(n * programs + at, units - 1)


@gluon.jit
def num_work_items(units):
    """How many units this program takes."""
    pid, programs = gl.program_id(0), gl.num_programs(0)
    whole = units // programs
    at = gl.where(whole % 2 == 0, pid, programs - 1 - pid)
    return whole + (at < units - whole * programs).to(gl.int32)


@gluon.jit
def rows_of(own, block, hi):
    """Where in the cache the two pages of a block begin, in tokens, for keys up to ``hi``."""
    page = block * 2
    a = gl.load(own + page) * _PAGE
    b = gl.load(own + page + 1, mask=(page + 1) * _PAGE < hi, other=_NOWHERE) * _PAGE
    return a, b


@gluon.jit
def fetch(desc, ready, buffer, a, b, column):
    """The keys, or values, of one block and head. Swizzled rows are 64 elements: two halves."""
    mbarrier.expect(ready, _BLOCK * _SIZE * 2)
    parts = buffer._reinterpret(buffer.dtype, [4, 64, 64], desc.layout)
    for half in gl.static_range(2):
        at = column + 64 * half
        tma.async_copy_global_to_shared(desc, [a, at], ready, parts.index(2 * half))
        tma.async_copy_global_to_shared(desc, [b, at], ready, parts.index(2 * half + 1))


@gluon.jit
def fetch_queries(desc, ready, buffer, token, head, GROUP: gl.constexpr):
    """64 rows of queries: tokens, the group's heads among them."""
    mbarrier.expect(ready, 64 * _SIZE * 2)
    parts = buffer._reinterpret(buffer.dtype, [2, 64 // GROUP, GROUP, 64], desc.layout)
    for half in gl.static_range(2):
        tma.async_copy_global_to_shared(
            desc, [token, head * GROUP, 64 * half], ready, parts.index(half)
        )


@gluon.jit
def apply_causal_mask(scores, start, seen, LAYOUT: gl.constexpr):
    """Scores of the block at ``start`` without keys after each query's own position."""
    n = gl.arange(0, scores.shape[1], layout=gl.SliceLayout(0, LAYOUT))
    return gl.where(n[None, :] <= (seen - start)[:, None], scores, float("-inf"))


@gluon.jit
def online_softmax(scores, top, units):
    """Weights, the new top, and what the old sums are worth. ``top`` is in the units of exp2."""
    higher = gl.maximum(top, gl.max(scores, 1) * units)
    return gl.exp2(scores * units - higher[:, None]), higher, gl.exp2(top - higher)


@gluon.jit
def operand(x, kind: gl.constexpr, OPERAND: gl.constexpr):
    """What ``pack_columns`` packed, as the left side of a product."""
    low, high = split_pairs(x, kind)
    both = gl.reshape(gl.join(low, high), [x.shape[0], 2 * x.shape[1]])
    return gl.convert_layout(both, OPERAND, assert_trivial=True)


@gluon.jit
def zero_tail(buffer, left):
    """Zeros for the values of keys from ``left`` on, which nobody wrote: 0 * NaN is NaN."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    n = gl.arange(0, buffer.shape[0], layout=gl.SliceLayout(1, layout))
    value = buffer.load(layout)
    buffer.store(gl.where((n < left)[:, None], value, 0.0))
    fence_async_shared()
    thread_barrier()


@gluon.jit
def store_output(
    out, acc, total, token, real, head,
    W: gl.constexpr, KV_HEADS: gl.constexpr, GROUP: gl.constexpr, kind: gl.constexpr,
):  # fmt: skip
    """The results of rows ``64 * W`` to ``64 * W + 63`` of a tile; ``out`` counts pairs of them."""
    # 16 bytes a thread, by shuffles within warps alone.
    layout: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [8, 0], [0, 16], [0, 32]],
        [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]],
        [],
        [64, 64],
    )
    result = gl.convert_layout(pack_columns(acc * (1.0 / total)[:, None], kind), layout)
    m = 64 * W + gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
    d = gl.arange(0, 64, layout=gl.SliceLayout(0, layout))
    at = (token + m // GROUP).to(gl.int64) * (KV_HEADS * GROUP) + head * GROUP + m % GROUP
    mask = (m // GROUP < real)[:, None] & (d < 64)[None, :]
    gl.store(out + at[:, None] * 64 + d[None, :], result, mask=mask)
