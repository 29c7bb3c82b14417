"""The kernel of packed weights for many rows: one warp fetches, two warp groups unpack and multiply.

The product is transposed: the weight is the left operand, from registers, where codes become numbers; rows of
``x`` are the right one, from shared memory. Which tiles a program takes, and how it shares some with others, is in
``split_tiles``; which codes a thread reads, in ``packed_fragments``. Barriers are shared memory's: ``ready`` when what was fetched has
arrived, ``free`` when its readers are done; a wait names the parity of the phase that it waits for the end of.
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

from treadle_kernels_triton.hopper.packed_fragments import (
    STAGE,
    fetch_half,
    make_half,
    weight_format,
)
from treadle_kernels_triton.hopper.split_tiles import (
    reduce_partials,
    segment,
    segments,
    store_output,
)
from treadle_triton_kit.gluon import thread_barrier

__all__ = ("REGISTERS", "WARPS", "packed_hopper_kernel")

WARPS = 4
REGISTERS = 168
"""Of a thread on average, which is what the three groups divide among them: 240, 240 and 24."""

_BLOCK_N = gl.constexpr(128)  # outputs of a tile


@gluon.jit
def producer(
    x_desc, codes_desc, scales_desc, offsets_desc, x_smem, codes_smem, scales_smem, offsets_smem, ready, free,
    N, num_stages, num_split_tiles, stages_per_program, num_waves, m_tiles,
    FORMAT: gl.constexpr, BLOCK_M: gl.constexpr, NUM_SLOTS: gl.constexpr,
):  # fmt: skip
    """One warp."""
    CHUNKS: gl.constexpr = FORMAT.chunks
    STEP_BITS: gl.constexpr = (
        scales_desc.dtype.primitive_bitwidth * (FORMAT.scales != "")
        + offsets_desc.dtype.primitive_bitwidth * (FORMAT.offsets != "")
    )  # fmt: skip
    NUM_BYTES: gl.constexpr = (
        2 * BLOCK_M * STAGE + _BLOCK_N * (2 * STAGE // FORMAT.places + FORMAT.steps * STEP_BITS // 8)
    )  # fmt: skip
    begin, end, num_split, num_segments = segments(
        num_split_tiles, stages_per_program, num_stages, num_waves
    )
    i = 0
    for idx in range(num_segments):
        tile, first, last = segment(idx, begin, end, num_split, num_split_tiles, num_stages)
        n_start = tile // m_tiles * _BLOCK_N
        m_start = tile % m_tiles * BLOCK_M
        for stage in range(first, last):
            slot = i % NUM_SLOTS
            bar = ready.index(slot)
            step = stage // FORMAT.stages_per_group * FORMAT.steps
            mbarrier.wait(free.index(slot), ((i // NUM_SLOTS) & 1) ^ 1)
            mbarrier.expect(bar, NUM_BYTES)
            # Past the last output there is another chunk, or zeros: whatever it is, it is not stored.
            for c in gl.static_range(CHUNKS):
                row = ((stage * CHUNKS + c) * N + n_start) * FORMAT.run // 64
                tma.async_copy_global_to_shared(
                    codes_desc, [row, 0], bar, codes_smem.index(slot * CHUNKS + c)
                )
            if FORMAT.scales != "":
                tma.async_copy_global_to_shared(
                    scales_desc, [step, n_start], bar, scales_smem.index(slot)
                )
            if FORMAT.offsets != "":
                tma.async_copy_global_to_shared(
                    offsets_desc, [step, n_start], bar, offsets_smem.index(slot)
                )
            for half in gl.static_range(2):
                tma.async_copy_global_to_shared(
                    x_desc, [m_start, stage * STAGE + half * 64], bar, x_smem.index(2 * slot + half)
                )
            i += 1


@gluon.jit
def load_stage(
    codes_smem, scales_smem, offsets_smem, ready, i,
    WARP_GROUP: gl.constexpr, FORMAT: gl.constexpr, DTYPE: gl.constexpr, W_LAYOUT: gl.constexpr, NUM_SLOTS: gl.constexpr,
):  # fmt: skip
    """Of stage ``i`` the first half of the weights, and what the second one is made of."""
    slot, parity = i % NUM_SLOTS, (i // NUM_SLOTS) & 1
    mbarrier.wait(ready.index(slot), parity)
    fetched = fetch_half(codes_smem, scales_smem, offsets_smem, slot, 0, WARP_GROUP, FORMAT, DTYPE)
    weights = make_half(fetched, 0, FORMAT, DTYPE, W_LAYOUT)
    fetched = fetch_half(codes_smem, scales_smem, offsets_smem, slot, 1, WARP_GROUP, FORMAT, DTYPE)
    # A barrier that was passed already, for its branch: ptxas would take the numbers after the wait
    # that follows, where no product runs beside them.
    mbarrier.wait(ready.index(slot), parity)
    return weights, fetched


@gluon.jit
def consumer(
    x_smem, codes_smem, scales_smem, offsets_smem, ready, free, out, partials, tile_counters, factors,
    M, N, num_stages, num_split_tiles, stages_per_program, num_waves, m_tiles, max_partials,
    WARP_GROUP: gl.constexpr, FORMAT: gl.constexpr, BLOCK_M: gl.constexpr, NUM_SLOTS: gl.constexpr,
):  # fmt: skip
    """A warp group: outputs ``64 * WARP_GROUP`` to ``64 * WARP_GROUP + 63`` of the tiles."""
    ACC_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    W_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, ACC_LAYOUT, 2)
    DTYPE: gl.constexpr = x_smem.dtype
    begin, end, num_split, num_segments = segments(
        num_split_tiles, stages_per_program, num_stages, num_waves
    )
    num_own_stages = end - begin + num_waves * num_stages
    i = 0
    weights, fetched = load_stage(
        codes_smem, scales_smem, offsets_smem, ready, 0, WARP_GROUP, FORMAT, DTYPE, W_LAYOUT, NUM_SLOTS
    )  # fmt: skip
    for idx in range(num_segments):
        tile, first, last = segment(idx, begin, end, num_split, num_split_tiles, num_stages)
        acc = gl.zeros([64, BLOCK_M], gl.float32, ACC_LAYOUT)
        for _ in range(first, last):
            slot = i % NUM_SLOTS
            x_tile = x_smem.index(2 * slot).permute((1, 0))
            acc = warpgroup_mma(weights, x_tile, acc, is_async=True)
            weights = make_half(fetched, 1, FORMAT, DTYPE, W_LAYOUT)
            x_tile = x_smem.index(2 * slot + 1).permute((1, 0))
            acc = warpgroup_mma(weights, x_tile, acc, is_async=True)
            acc = warpgroup_mma_wait(1, deps=(acc,))  # the first one's registers are free
            i += 1
            # Beside the last product: what the next one begins with, of the next tile even.
            weights, fetched = load_stage(
                codes_smem, scales_smem, offsets_smem, ready, gl.minimum(i, num_own_stages - 1),
                WARP_GROUP, FORMAT, DTYPE, W_LAYOUT, NUM_SLOTS,
            )  # fmt: skip
            # None is in flight from one round to the next: ptxas would run each by itself.
            acc = warpgroup_mma_wait(0, deps=(acc,))
            mbarrier.arrive(free.index(slot), count=1)
        n_start = tile // m_tiles * _BLOCK_N + WARP_GROUP * 64
        m_start = tile % m_tiles * BLOCK_M
        if FORMAT.power > 0:
            acc *= FORMAT.power
        if FORMAT.has_factors:
            offs_n = n_start + gl.arange(0, 64, layout=gl.SliceLayout(1, ACC_LAYOUT))
            acc *= gl.load(factors + offs_n, mask=offs_n < N, other=0.0)[:, None]
        if (first == 0) & (last == num_stages):
            store_output(out, acc, n_start, m_start, M, N, BLOCK_M)
        else:
            reduce_partials(
                out, acc, partials, tile_counters, tile, n_start, m_start, M, N, num_stages, stages_per_program, max_partials,
                WARP_GROUP, BLOCK_M, ACC_LAYOUT,
            )  # fmt: skip


_NOT_SPECIALIZED = (
    "M",
    "num_stages",
    "num_split_tiles",
    "stages_per_program",
    "num_waves",
    "m_tiles",
    "max_partials",
)


@gluon.jit(do_not_specialize=_NOT_SPECIALIZED)  # one kernel for all numbers of them
def packed_hopper_kernel(
    x_desc,  # [M, K] in boxes of [BLOCK_M, 64]
    codes_desc,  # int32, pairs of words [chunks * N * run / 64, 32] in boxes of [2 * run, 32]
    scales_desc,  # [groups, N] in boxes of [groups of a stage, 128]
    offsets_desc,  # as scales
    factors,  # float32 [N]
    out,  # [M, N]
    partials,  # float32 [programs * max_partials, 128 * BLOCK_M]
    tile_counters,  # int32, zeros, two for each shared tile; left as they were
    M,
    N,
    num_stages,  # of a tile: inputs / 128
    num_split_tiles,  # tiles that are shared, the first ones
    stages_per_program,  # stages of these that a program takes
    num_waves,  # tiles of its own that it takes
    m_tiles,  # tiles of rows
    max_partials,  # parts of a program
    # The fields of WeightFormat, which processes that compile can be told.
    ASM: gl.constexpr,
    PLACES: gl.constexpr,
    RUN: gl.constexpr,
    GROUP: gl.constexpr,
    SCALE_KIND: gl.constexpr,
    OFFSET_KIND: gl.constexpr,
    HAS_FACTORS: gl.constexpr,
    POWER: gl.constexpr,
    BLOCK_M: gl.constexpr,
    NUM_SLOTS: gl.constexpr,  # stages that are on their way or used at a time
):
    """Tiles are numbered by rows first: those with the same weight run at the same time."""
    FORMAT: gl.constexpr = weight_format(
        ASM, PLACES, RUN, GROUP, SCALE_KIND, OFFSET_KIND, HAS_FACTORS, POWER
    )
    MBAR_LAYOUT: gl.constexpr = mbarrier.MBarrierLayout()
    STEPS_LAYOUT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    # Of what a format has not, as little as there can be.
    SCALES: gl.constexpr = NUM_SLOTS if FORMAT.scales != "" else 1
    OFFSETS: gl.constexpr = NUM_SLOTS if FORMAT.offsets != "" else 1
    SCALE_STEPS: gl.constexpr = FORMAT.steps if FORMAT.scales != "" else 1
    OFFSET_STEPS: gl.constexpr = FORMAT.steps if FORMAT.offsets != "" else 1
    PIECES: gl.constexpr = NUM_SLOTS * FORMAT.chunks
    x_smem = gl.allocate_shared_memory(x_desc.dtype, [2 * NUM_SLOTS, BLOCK_M, 64], x_desc.layout)
    codes_smem = gl.allocate_shared_memory(
        gl.int32, [PIECES, 2 * FORMAT.run, 32], codes_desc.layout
    )
    scales_smem = gl.allocate_shared_memory(
        scales_desc.dtype, [SCALES, SCALE_STEPS, _BLOCK_N], scales_desc.layout
    )
    offsets_smem = gl.allocate_shared_memory(
        offsets_desc.dtype, [OFFSETS, OFFSET_STEPS, _BLOCK_N], offsets_desc.layout
    )
    ready = gl.allocate_shared_memory(gl.int64, [NUM_SLOTS, 1], MBAR_LAYOUT)
    free = gl.allocate_shared_memory(gl.int64, [NUM_SLOTS, 1], MBAR_LAYOUT)
    for s in gl.static_range(NUM_SLOTS):
        mbarrier.init(ready.index(s), count=1)
        mbarrier.init(free.index(s), count=2)  # both warp groups
    fence_async_shared()
    thread_barrier()
    # As the warp groups read what arrives in boxes.
    code_halves = codes_smem._reinterpret(gl.int32, [2 * PIECES, FORMAT.run, 32], codes_desc.layout)
    scale_halves = scales_smem._reinterpret(
        scales_desc.dtype, [2 * SCALES * SCALE_STEPS, 64], STEPS_LAYOUT
    )
    offset_halves = offsets_smem._reinterpret(
        offsets_desc.dtype, [2 * OFFSETS * OFFSET_STEPS, 64], STEPS_LAYOUT
    )
    gl.warp_specialize(
        [
            (consumer, (
                x_smem, code_halves, scale_halves, offset_halves, ready, free, out, partials, tile_counters, factors,
                M, N, num_stages, num_split_tiles, stages_per_program, num_waves, m_tiles, max_partials, 0, FORMAT, BLOCK_M, NUM_SLOTS,
            )),
            (consumer, (
                x_smem, code_halves, scale_halves, offset_halves, ready, free, out, partials, tile_counters, factors,
                M, N, num_stages, num_split_tiles, stages_per_program, num_waves, m_tiles, max_partials, 1, FORMAT, BLOCK_M, NUM_SLOTS,
            )),
            (producer, (
                x_desc, codes_desc, scales_desc, offsets_desc, x_smem, codes_smem, scales_smem, offsets_smem, ready, free,
                N, num_stages, num_split_tiles, stages_per_program, num_waves, m_tiles, FORMAT, BLOCK_M, NUM_SLOTS,
            )),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
