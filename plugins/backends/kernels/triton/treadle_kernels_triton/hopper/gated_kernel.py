"""The kernel: one warp fetches, two warp groups multiply, all of them over the same tiles.

A tile is 128 rows of ``x`` and ``BLOCK_N`` columns of the result, for which as many rows of the weight's
first half are fetched (the gate) as of its second (up). It comes in steps of 64 columns of ``x`` and of
the weight, ``NUM_STAGES`` of them on their way. While a tile is gated and written, tensor cores have
something to do in one of two ways, of which ``gated_linear.choose_variant`` takes the faster:

* ``pingpong``: every warp group has tiles of its own, of 64 columns, and multiplies while the other one
  writes.
* ``cooperative``: both have half the rows of each tile, of 128 columns, and write them while the first
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

from treadle_kernels_triton.hopper.primitives import (
    num_program_tiles,
    store_gated,
    tile_coordinates,
)
from treadle_triton_kit.gluon import pack_columns, thread_barrier

__all__ = ("REGISTERS", "WARPS", "gated_kernel")

WARPS = 4
REGISTERS = 168
"""Of a thread on average, which is what the three groups divide among them: 240, 240 and 24."""

_BLOCK_M = gl.constexpr(128)
_BLOCK_K = gl.constexpr(64)
_STEPS_IN_FLIGHT = gl.constexpr(
    2
)  # steps in flight while the tile before is written, with ``cooperative``


@gluon.jit
def producer(x_desc, w_desc, x_smem, w_smem, ready, free, m_tiles, n_tiles, k_tiles, N):
    """One warp. What is not in the tensors arrives as zeros, or as columns that are not written."""
    NUM_STAGES: gl.constexpr = w_smem.shape[0]
    BLOCK_N: gl.constexpr = w_smem.shape[1] // 2
    w_tiles = w_smem._reinterpret(w_smem.dtype, [2 * NUM_STAGES, BLOCK_N, _BLOCK_K], w_desc.layout)
    i = 0  # steps so far
    for tile_idx in range(num_program_tiles(m_tiles, n_tiles)):
        pid_m, pid_n = tile_coordinates(tile_idx, m_tiles, n_tiles)
        row, col = pid_m * _BLOCK_M, pid_n * BLOCK_N
        for k_tile in range(k_tiles):
            stage = i % NUM_STAGES
            mbarrier.wait(free.index(stage), ((i // NUM_STAGES) & 1) ^ 1)
            bar = ready.index(stage)
            mbarrier.expect(bar, (_BLOCK_M + 2 * BLOCK_N) * _BLOCK_K * 2)
            offs_k = k_tile * _BLOCK_K
            tma.async_copy_global_to_shared(x_desc, [row, offs_k], bar, x_smem.index(stage))
            tma.async_copy_global_to_shared(w_desc, [col, offs_k], bar, w_tiles.index(2 * stage))
            tma.async_copy_global_to_shared(
                w_desc, [col + N, offs_k], bar, w_tiles.index(2 * stage + 1)
            )
            i += 1


@gluon.jit
def multiply(acc, x_smem, w_smem, ready, i, M_PART: gl.constexpr, IS_FIRST: gl.constexpr):
    """Begin the products of step ``i``, once it is there, with the ``M_PART``-th rows of ``x``."""
    NUM_STAGES: gl.constexpr = w_smem.shape[0]
    stage = i % NUM_STAGES
    mbarrier.wait(ready.index(stage), (i // NUM_STAGES) & 1)
    x_tile = x_smem.index(x_smem.shape[0] // NUM_STAGES * stage + M_PART)
    w_tile = w_smem.index(stage).permute((1, 0))
    return warpgroup_mma(x_tile, w_tile, acc, use_acc=not IS_FIRST, is_async=True)


@gluon.jit
def multiply_rest(acc, x_smem, w_smem, ready, free, i, num_k_tiles, M_PART: gl.constexpr):
    """``num_k_tiles`` steps from ``i`` on; the one before and the last are in flight before and after."""
    NUM_STAGES: gl.constexpr = w_smem.shape[0]
    for _ in range(num_k_tiles):
        acc = multiply(acc, x_smem, w_smem, ready, i, M_PART, False)
        acc = warpgroup_mma_wait(1, deps=(acc,))
        mbarrier.arrive(free.index((i - 1) % NUM_STAGES), count=1)
        i += 1
    return acc


@gluon.jit
def pingpong(
    y_desc, x_smem, w_smem, buffers, ready, free, order_bars, m_tiles, n_tiles, k_tiles,
    WARP_GROUP: gl.constexpr,
):  # fmt: skip
    """A warp group: every second tile, which it begins when the other has begun its last step."""
    NUM_STAGES: gl.constexpr = w_smem.shape[0]
    BLOCK_N: gl.constexpr = w_smem.shape[1] // 2
    ACC_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 2 * BLOCK_N, 16])
    for tile_idx in range(WARP_GROUP, num_program_tiles(m_tiles, n_tiles), 2):
        i = tile_idx * k_tiles
        acc = gl.zeros([_BLOCK_M, 2 * BLOCK_N], gl.float32, ACC_LAYOUT)
        mbarrier.wait(order_bars.index(WARP_GROUP), ((tile_idx // 2) & 1) ^ (1 - WARP_GROUP))
        acc = multiply(acc, x_smem, w_smem, ready, i, 0, True)
        acc = warpgroup_mma_wait(1, deps=(acc,))
        acc = multiply_rest(acc, x_smem, w_smem, ready, free, i + 1, k_tiles - 1, 0)
        mbarrier.arrive(order_bars.index(1 - WARP_GROUP), count=1)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(free.index((i + k_tiles - 1) % NUM_STAGES), count=1)
        pid_m, pid_n = tile_coordinates(tile_idx, m_tiles, n_tiles)
        result = pack_columns(acc, y_desc.dtype)
        store_gated(y_desc, buffers, result, pid_m * _BLOCK_M, pid_n * BLOCK_N)
    tma.store_wait(0)  # shared memory is read until then


@gluon.jit
def cooperative(
    y_desc, x_smem, w_smem, buffers, ready, free, m_tiles, n_tiles, k_tiles,
    WARP_GROUP: gl.constexpr,
):  # fmt: skip
    """A warp group: rows ``64 * WARP_GROUP`` to ``64 * WARP_GROUP + 63`` of every tile."""
    NUM_STAGES: gl.constexpr = w_smem.shape[0]
    BLOCK_N: gl.constexpr = w_smem.shape[1] // 2
    ACC_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 2 * BLOCK_N, 16])
    half_rows: gl.constexpr = _BLOCK_M // 2
    x_smem = x_smem._reinterpret(x_smem.dtype, [2 * NUM_STAGES, half_rows, _BLOCK_K], x_smem.layout)
    # Of the tile before; there is none at first, and nobody writes this.
    result = pack_columns(gl.zeros([half_rows, 2 * BLOCK_N], gl.float32, ACC_LAYOUT), y_desc.dtype)
    prev_m, prev_n = m_tiles, n_tiles * 0
    for tile_idx in range(num_program_tiles(m_tiles, n_tiles)):
        i = tile_idx * k_tiles
        acc = gl.zeros([half_rows, 2 * BLOCK_N], gl.float32, ACC_LAYOUT)
        for k_tile in gl.static_range(_STEPS_IN_FLIGHT):
            acc = multiply(acc, x_smem, w_smem, ready, i + k_tile, WARP_GROUP, k_tile == 0)
        # A branch, without which ptxas would take the exponentials before the products.
        if tile_idx > 0:
            row = prev_m * _BLOCK_M + WARP_GROUP * half_rows
            store_gated(y_desc, buffers, result, row, prev_n * BLOCK_N)
        acc = warpgroup_mma_wait(1, deps=(acc,))
        for k_tile in gl.static_range(_STEPS_IN_FLIGHT - 1):
            mbarrier.arrive(free.index((i + k_tile) % NUM_STAGES), count=1)
        acc = multiply_rest(
            acc,
            x_smem,
            w_smem,
            ready,
            free,
            i + _STEPS_IN_FLIGHT,
            k_tiles - _STEPS_IN_FLIGHT,
            WARP_GROUP,
        )
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(free.index((i + k_tiles - 1) % NUM_STAGES), count=1)
        result = pack_columns(acc, y_desc.dtype)
        prev_m, prev_n = tile_coordinates(tile_idx, m_tiles, n_tiles)
    row = prev_m * _BLOCK_M + WARP_GROUP * half_rows
    store_gated(y_desc, buffers, result, row, prev_n * BLOCK_N)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=("m_tiles", "n_tiles", "k_tiles", "N"))
def gated_kernel(
    x_desc,  # [rows, K] in boxes of [128, 64]
    w_desc,  # [2 * N, K] in boxes of [BLOCK_N, 64]
    y_desc,  # [rows, N] in boxes of [128 if PINGPONG else 64, 64]
    m_tiles,
    n_tiles,
    k_tiles,  # at least two
    N,
    PINGPONG: gl.constexpr,  # pingpong, else cooperative
    BLOCK_N: gl.constexpr,
    NUM_STAGES: gl.constexpr,
    NUM_BUFFERS: gl.constexpr,  # of 64 columns of results, for each warp group
):
    """``silu(x · first half) * (x · second half)``; at most as many programs as there are tiles."""
    SMEM_LAYOUT: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    MBAR_LAYOUT: gl.constexpr = mbarrier.MBarrierLayout()
    dtype: gl.constexpr = x_desc.dtype
    store_rows: gl.constexpr = _BLOCK_M if PINGPONG else _BLOCK_M // 2
    x_smem = gl.allocate_shared_memory(dtype, [NUM_STAGES, _BLOCK_M, _BLOCK_K], SMEM_LAYOUT)
    w_smem = gl.allocate_shared_memory(dtype, [NUM_STAGES, 2 * BLOCK_N, _BLOCK_K], SMEM_LAYOUT)
    buffers0 = gl.allocate_shared_memory(dtype, [NUM_BUFFERS, store_rows, 64], SMEM_LAYOUT)
    buffers1 = gl.allocate_shared_memory(dtype, [NUM_BUFFERS, store_rows, 64], SMEM_LAYOUT)
    ready = gl.allocate_shared_memory(gl.int64, [NUM_STAGES, 1], MBAR_LAYOUT)
    free = gl.allocate_shared_memory(gl.int64, [NUM_STAGES, 1], MBAR_LAYOUT)
    order_bars = gl.allocate_shared_memory(gl.int64, [2, 1], MBAR_LAYOUT)
    for s in gl.static_range(NUM_STAGES):
        mbarrier.init(ready.index(s), count=1)
        mbarrier.init(free.index(s), count=1 if PINGPONG else 2)  # warp groups that read a step
    for w in gl.static_range(2):
        mbarrier.init(order_bars.index(w), count=1)
    fence_async_shared()
    thread_barrier()
    producer_args = (x_desc, w_desc, x_smem, w_smem, ready, free, m_tiles, n_tiles, k_tiles, N)
    if PINGPONG:
        gl.warp_specialize(
            [
                (pingpong, (
                    y_desc, x_smem, w_smem, buffers0, ready, free, order_bars, m_tiles, n_tiles, k_tiles, 0,
                )),
                (pingpong, (
                    y_desc, x_smem, w_smem, buffers1, ready, free, order_bars, m_tiles, n_tiles, k_tiles, 1,
                )),
                (producer, producer_args),
            ],
            [4, 1],
            [240, 24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (cooperative, (
                    y_desc, x_smem, w_smem, buffers0, ready, free, m_tiles, n_tiles, k_tiles, 0,
                )),
                (cooperative, (
                    y_desc, x_smem, w_smem, buffers1, ready, free, m_tiles, n_tiles, k_tiles, 1,
                )),
                (producer, producer_args),
            ],
            [4, 1],
            [240, 24],
        )  # fmt: skip
