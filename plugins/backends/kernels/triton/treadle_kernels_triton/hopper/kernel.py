"""The kernel: one warp fetches, two warp groups multiply, all of them over the same tiles.

A tile is 128 rows of ``x`` and ``COLUMNS`` columns of the result, for which as many rows of the weight's
first half are fetched (the gate) as of its second (up). It comes in steps of 64 columns of ``x`` and of
the weight, ``STAGES`` of them on their way. While a tile is gated and written, tensor cores have
something to do in one of two ways, of which ``gated.choose_gated`` takes the faster:

* ``pingpong``: every warp group has tiles of its own, of 64 columns, and multiplies while the other one
  writes.
* ``deferred``: both have half the rows of each tile, of 128 columns, and write them while the first
  products of the next tile run. That takes a quarter less to fetch for each product, but only those
  products hide the writing.

Barriers are shared memory's: ``ready`` when a step has arrived, ``free`` when its readers are done;
a wait names the parity of the phase that it waits for the end of.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from treadle_kernels_triton.hopper.pieces import tile_of, tiles_of, write
from treadle_triton_kit.gluon import pack_columns, thread_barrier

__all__ = ("REGISTERS", "WARPS", "gated_kernel")

WARPS = 4
REGISTERS = 168
"""Of a thread on average, which is what the three groups divide among them: 240, 240 and 24."""

_ROWS = gl.constexpr(128)
_STEP = gl.constexpr(64)
_AHEAD = gl.constexpr(2)  # steps in flight while the tile before is written, if that is deferred


@gluon.jit
def producer(x_desc, w_desc, xs, ws, ready, free, m_tiles, n_tiles, steps, width):
    """One warp. What is not in the tensors arrives as zeros, or as columns that are not written."""
    STAGES: gl.constexpr = ws.shape[0]
    COLUMNS: gl.constexpr = ws.shape[1] // 2
    parts = ws._reinterpret(ws.dtype, [2 * STAGES, COLUMNS, _STEP], w_desc.layout)
    i = 0  # steps so far
    for n in range(tiles_of(m_tiles, n_tiles)):
        at_m, at_n = tile_of(n, m_tiles, n_tiles)
        row, column = at_m * _ROWS, at_n * COLUMNS
        for s in range(steps):
            k = i % STAGES
            mbarrier.wait(free.index(k), ((i // STAGES) & 1) ^ 1)
            bar = ready.index(k)
            mbarrier.expect(bar, (_ROWS + 2 * COLUMNS) * _STEP * 2)
            at = s * _STEP
            tma.async_copy_global_to_shared(x_desc, [row, at], bar, xs.index(k))
            tma.async_copy_global_to_shared(w_desc, [column, at], bar, parts.index(2 * k))
            tma.async_copy_global_to_shared(
                w_desc, [column + width, at], bar, parts.index(2 * k + 1)
            )
            i += 1


@gluon.jit
def multiply(acc, xs, ws, ready, i, PART: gl.constexpr, FIRST: gl.constexpr):
    """Begin the products of step ``i``, once it is there, with the ``PART``-th rows of ``x``."""
    STAGES: gl.constexpr = ws.shape[0]
    k = i % STAGES
    mbarrier.wait(ready.index(k), (i // STAGES) & 1)
    own = xs.index(xs.shape[0] // STAGES * k + PART)
    right = ws.index(k).permute((1, 0))
    return warpgroup_mma(own, right, acc, use_acc=not FIRST, is_async=True)


@gluon.jit
def multiply_rest(acc, xs, ws, ready, free, i, count, PART: gl.constexpr):
    """``count`` steps from ``i`` on; the one before and the last are in flight before and after."""
    STAGES: gl.constexpr = ws.shape[0]
    for _ in range(count):
        acc = multiply(acc, xs, ws, ready, i, PART, False)
        acc = warpgroup_mma_wait(1, deps=(acc,))
        mbarrier.arrive(free.index((i - 1) % STAGES), count=1)
        i += 1
    return acc


@gluon.jit
def pingpong(
    y_desc, xs, ws, buffers, ready, free, turns, m_tiles, n_tiles, steps,
    W: gl.constexpr,
):  # fmt: skip
    """A warp group: every second tile, which it begins when the other has begun its last step."""
    STAGES: gl.constexpr = ws.shape[0]
    COLUMNS: gl.constexpr = ws.shape[1] // 2
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 2 * COLUMNS, 16])
    for n in range(W, tiles_of(m_tiles, n_tiles), 2):
        i = n * steps
        acc = gl.zeros([_ROWS, 2 * COLUMNS], gl.float32, ACC)
        mbarrier.wait(turns.index(W), ((n // 2) & 1) ^ (1 - W))
        acc = multiply(acc, xs, ws, ready, i, 0, True)
        acc = warpgroup_mma_wait(1, deps=(acc,))
        acc = multiply_rest(acc, xs, ws, ready, free, i + 1, steps - 1, 0)
        mbarrier.arrive(turns.index(1 - W), count=1)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(free.index((i + steps - 1) % STAGES), count=1)
        at_m, at_n = tile_of(n, m_tiles, n_tiles)
        result = pack_columns(acc, y_desc.dtype)
        write(y_desc, buffers, result, at_m * _ROWS, at_n * COLUMNS)
    tma.store_wait(0)  # shared memory is read until then


@gluon.jit
def cooperative(
    y_desc, xs, ws, buffers, ready, free, m_tiles, n_tiles, steps,
    W: gl.constexpr,
):  # fmt: skip
    """A warp group: rows ``64 * W`` to ``64 * W + 63`` of every tile."""
    STAGES: gl.constexpr = ws.shape[0]
    COLUMNS: gl.constexpr = ws.shape[1] // 2
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 2 * COLUMNS, 16])
    rows: gl.constexpr = _ROWS // 2
    xs = xs._reinterpret(xs.dtype, [2 * STAGES, rows, _STEP], xs.layout)
    # Of the tile before; there is none at first, and nobody writes this.
    result = pack_columns(gl.zeros([rows, 2 * COLUMNS], gl.float32, ACC), y_desc.dtype)
    before_m, before_n = m_tiles, n_tiles * 0
    for n in range(tiles_of(m_tiles, n_tiles)):
        i = n * steps
        acc = gl.zeros([rows, 2 * COLUMNS], gl.float32, ACC)
        for s in gl.static_range(_AHEAD):
            acc = multiply(acc, xs, ws, ready, i + s, W, s == 0)
        # A branch, without which ptxas would take the exponentials before the products.
        if n > 0:
            row = before_m * _ROWS + W * rows
            write(y_desc, buffers, result, row, before_n * COLUMNS)
        acc = warpgroup_mma_wait(1, deps=(acc,))
        for s in gl.static_range(_AHEAD - 1):
            mbarrier.arrive(free.index((i + s) % STAGES), count=1)
        acc = multiply_rest(acc, xs, ws, ready, free, i + _AHEAD, steps - _AHEAD, W)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(free.index((i + steps - 1) % STAGES), count=1)
        result = pack_columns(acc, y_desc.dtype)
        before_m, before_n = tile_of(n, m_tiles, n_tiles)
    row = before_m * _ROWS + W * rows
    write(y_desc, buffers, result, row, before_n * COLUMNS)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=("m_tiles", "n_tiles", "steps", "width"))
def gated_kernel(
    x_desc,  # [rows, depth] in boxes of [128, 64]
    w_desc,  # [2 * width, depth] in boxes of [COLUMNS, 64]
    y_desc,  # [rows, width] in boxes of [128 if TURNS else 64, 64]
    m_tiles,
    n_tiles,
    steps,  # at least two
    width,
    TURNS: gl.constexpr,  # pingpong, else deferred
    COLUMNS: gl.constexpr,
    STAGES: gl.constexpr,
    BUFFERS: gl.constexpr,  # of 64 columns of results, for each warp group
):
    """``silu(x · first half) * (x · second half)``; at most as many programs as there are tiles."""
    TILE: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    ONE: gl.constexpr = mbarrier.MBarrierLayout()
    kind: gl.constexpr = x_desc.dtype
    high: gl.constexpr = _ROWS if TURNS else _ROWS // 2
    xs = gl.allocate_shared_memory(kind, [STAGES, _ROWS, _STEP], TILE)
    ws = gl.allocate_shared_memory(kind, [STAGES, 2 * COLUMNS, _STEP], TILE)
    buffers0 = gl.allocate_shared_memory(kind, [BUFFERS, high, 64], TILE)
    buffers1 = gl.allocate_shared_memory(kind, [BUFFERS, high, 64], TILE)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], ONE)
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], ONE)
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], ONE)
    for s in gl.static_range(STAGES):
        mbarrier.init(ready.index(s), count=1)
        mbarrier.init(free.index(s), count=1 if TURNS else 2)  # warp groups that read a step
    for w in gl.static_range(2):
        mbarrier.init(turns.index(w), count=1)
    fence_async_shared()
    thread_barrier()
    fetched = (x_desc, w_desc, xs, ws, ready, free, m_tiles, n_tiles, steps, width)
    if TURNS:
        gl.warp_specialize(
            [
                (pingpong, (
                    y_desc, xs, ws, buffers0, ready, free, turns, m_tiles, n_tiles, steps, 0,
                )),
                (pingpong, (
                    y_desc, xs, ws, buffers1, ready, free, turns, m_tiles, n_tiles, steps, 1,
                )),
                (producer, fetched),
            ],
            [4, 1],
            [240, 24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (cooperative, (
                    y_desc, xs, ws, buffers0, ready, free, m_tiles, n_tiles, steps, 0,
                )),
                (cooperative, (
                    y_desc, xs, ws, buffers1, ready, free, m_tiles, n_tiles, steps, 1,
                )),
                (producer, fetched),
            ],
            [4, 1],
            [240, 24],
        )  # fmt: skip
