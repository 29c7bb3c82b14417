"""The kernel for many rows on Hopper: one warp fetches, two warp groups unpack and multiply.

The product is transposed: the weight is the left operand, from registers, where codes become numbers;
rows of ``x`` are the right one, from shared memory. A tile is 128 outputs, 64 for each warp group, by
32 to 256 rows. Programs are persistent. Barriers are shared memory's: ``ready`` when what was fetched
has arrived, ``free`` when its readers are done; a wait names the parity of the phase that it waits for
the end of.

Tiles beyond those that keep every program busy are shared along the inputs (``stream_k``). A program
takes a run of chunks of these, which may be of several tiles, then tiles of its own; who is last with a
shared tile adds up its parts, always in the same order.
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

from treadle_kernels_triton.int4.fragments import (
    dequantize,
    flatten,
    fragment,
    store_output,
    unflatten,
    unpack_scales,
)
from treadle_triton_kit.gluon import thread_barrier

__all__ = ("REGISTERS", "WARPS", "int4_hopper_kernel")

WARPS = 4
REGISTERS = 168
"""Of a thread on average, which is what the three groups divide among them: 240, 240 and 24."""

_BLOCK_N = gl.constexpr(128)  # outputs of a tile
_CHUNK = gl.constexpr(128)  # inputs of a stage


@gluon.jit
def segments(num_split_tiles, chunks_per_program, chunks, num_waves):
    """This program's first chunk of the shared tiles, the one after its last, how many tiles these
    are of, and how many with those of its own."""
    split_chunks = num_split_tiles * chunks
    begin = gl.minimum(gl.program_id(0) * chunks_per_program, split_chunks)
    end = gl.minimum(begin + chunks_per_program, split_chunks)
    num_split = gl.where(begin < end, (end - 1) // chunks - begin // chunks + 1, 0)
    return begin, end, num_split, num_split + num_waves


@gluon.jit
def segment(idx, begin, end, num_split, num_split_tiles, chunks):
    """Tile, first chunk and the one after the last of the n-th one."""
    split_tile = begin // chunks + idx
    whole_tile = num_split_tiles + gl.program_id(0) + (idx - num_split) * gl.num_programs(0)
    tile = gl.where(idx < num_split, split_tile, whole_tile)
    first_chunk = gl.where(idx < num_split, gl.maximum(begin - split_tile * chunks, 0), 0)
    end_chunk = gl.where(idx < num_split, gl.minimum(end - split_tile * chunks, chunks), chunks)
    return tile, first_chunk, end_chunk


@gluon.jit
def producer(
    x_desc, codes_desc, scales_desc, x_smem, codes_smem, scales_smem, ready, free,
    N, chunks, chunks_per_group, num_split_tiles, chunks_per_program, num_waves, m_tiles, BLOCK_M: gl.constexpr, NUM_STAGES: gl.constexpr,
):  # fmt: skip
    """One warp."""
    begin, end, num_split, num_segments = segments(
        num_split_tiles, chunks_per_program, chunks, num_waves
    )
    i = 0
    for idx in range(num_segments):
        tile, first_chunk, end_chunk = segment(idx, begin, end, num_split, num_split_tiles, chunks)
        n_start = tile // m_tiles * _BLOCK_N
        m_start = tile % m_tiles * BLOCK_M
        for chunk in range(first_chunk, end_chunk):
            stage = i % NUM_STAGES
            bar = ready.index(stage)
            mbarrier.wait(free.index(stage), ((i // NUM_STAGES) & 1) ^ 1)
            mbarrier.expect(bar, BLOCK_M * 2 * _CHUNK + _BLOCK_N * 64 + _BLOCK_N * 4)
            # Past the last output there is another chunk, or zeros: whatever it is, it is not stored.
            tma.async_copy_global_to_shared(
                codes_desc, [(chunk * N + n_start) // 2, 0], bar, codes_smem.index(stage)
            )
            tma.async_copy_global_to_shared(
                scales_desc, [chunk // chunks_per_group, n_start], bar, scales_smem.index(stage)
            )
            for half in gl.static_range(2):
                tma.async_copy_global_to_shared(
                    x_desc,
                    [m_start, chunk * _CHUNK + half * 64],
                    bar,
                    x_smem.index(2 * stage + half),
                )
            i += 1


@gluon.jit
def load_stage(
    codes_smem,
    scales_smem,
    ready,
    i,
    WARP_GROUP: gl.constexpr,
    DTYPE: gl.constexpr,
    NUM_STAGES: gl.constexpr,
):
    """Pairs of words and scaling of stage ``i``; of the first half of its inputs, numbers."""
    PAIRS_LAYOUT: gl.constexpr = gl.DistributedLinearLayout(
        [[8, 0], [0, 4], [0, 8]], [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [],
        [64, 16],
    )  # fmt: skip
    SMEM_PAIRS_LAYOUT: gl.constexpr = gl.DistributedLinearLayout(  # the same, as memory has it
        [[4, 0], [0, 4], [0, 8]], [[0, 1], [0, 2], [0, 16], [1, 0], [2, 0]], [[8, 0], [16, 0]], [],
        [32, 32],
    )  # fmt: skip
    stage = i % NUM_STAGES
    mbarrier.wait(ready.index(stage), (i // NUM_STAGES) & 1)
    pairs = gl.reshape(codes_smem.index(2 * stage + WARP_GROUP).load(SMEM_PAIRS_LAYOUT), [64, 16])
    pairs = gl.convert_layout(pairs, PAIRS_LAYOUT, assert_trivial=True)
    zero_scale = unpack_scales(
        scales_smem.index(2 * stage + WARP_GROUP).load(gl.SliceLayout(1, PAIRS_LAYOUT)), DTYPE
    )
    weights = dequantize(pairs, zero_scale, 0, DTYPE)
    # A barrier that was passed already, for its branch: ptxas would take the numbers after the wait
    # that follows, where no product runs beside them.
    mbarrier.wait(ready.index(stage), (i // NUM_STAGES) & 1)
    return pairs, zero_scale, weights


@gluon.jit
def reduce_partials(
    out, acc, partials, tile_counters, tile, n_start, m_start, M, N, chunks, chunks_per_program, max_partials,
    WARP_GROUP: gl.constexpr, BLOCK_M: gl.constexpr, ACC_LAYOUT: gl.constexpr,
):  # fmt: skip
    """Store a part of a shared tile; if all others are there, write the sum."""
    # A program's first tile is part 0 of its own, a last one that is another, part 1.
    size: gl.constexpr = 64 * BLOCK_M
    pid = gl.program_id(0)
    partial_idx = (
        pid * max_partials + (pid * chunks_per_program < tile * chunks).to(gl.int32)
    ) * 2 + WARP_GROUP
    flat_acc = flatten(acc, BLOCK_M)
    offs = gl.arange(0, size, layout=flat_acc.type.layout)
    gl.store(partials + partial_idx.to(gl.int64) * size + offs, flat_acc)
    first_program = tile * chunks // chunks_per_program
    last_program = ((tile + 1) * chunks - 1) // chunks_per_program
    thread_barrier()  # all threads have stored before one says so
    counter = tile_counters + tile * 2 + WARP_GROUP
    if gl.atomic_add(counter, 1, sem="acq_rel") == last_program - first_program:
        thread_barrier()
        # What is still in registers is not read again, unless they would not do.
        KEEP_IN_REGS: gl.constexpr = BLOCK_M <= 128
        y = gl.zeros_like(flat_acc)
        for program in range(first_program, last_program + 1):
            peer_idx = (
                program * max_partials + (program * chunks_per_program < tile * chunks).to(gl.int32)
            ) * 2 + WARP_GROUP
            partial_ptrs = partials + peer_idx.to(gl.int64) * size + offs
            # From L2, where other multiprocessors' stores are.
            if KEEP_IN_REGS:
                if program == pid:
                    y += flat_acc
                else:
                    y += gl.load(partial_ptrs, cache_modifier=".cg")
            else:
                y += gl.load(partial_ptrs, cache_modifier=".cg")
        y = gl.convert_layout(unflatten(y, BLOCK_M), ACC_LAYOUT, assert_trivial=True)
        store_output(out, y, n_start, m_start, M, N, BLOCK_M)
        gl.store(counter, 0)


@gluon.jit
def consumer(
    x_smem, codes_smem, scales_smem, ready, free, out, partials, tile_counters,
    M, N, chunks, num_split_tiles, chunks_per_program, num_waves, m_tiles, max_partials,
    WARP_GROUP: gl.constexpr, BLOCK_M: gl.constexpr, NUM_STAGES: gl.constexpr,
):  # fmt: skip
    """A warp group: outputs ``64 * WARP_GROUP`` to ``64 * WARP_GROUP + 63`` of the tiles."""
    ACC_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    W_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, ACC_LAYOUT, 2)
    DTYPE: gl.constexpr = x_smem.dtype
    begin, end, num_split, num_segments = segments(
        num_split_tiles, chunks_per_program, chunks, num_waves
    )
    num_own_chunks = end - begin + num_waves * chunks
    i = 0
    pairs, zero_scale, weights = load_stage(
        codes_smem, scales_smem, ready, 0, WARP_GROUP, DTYPE, NUM_STAGES
    )
    for idx in range(num_segments):
        tile, first_chunk, end_chunk = segment(idx, begin, end, num_split, num_split_tiles, chunks)
        acc = gl.zeros([64, BLOCK_M], gl.float32, ACC_LAYOUT)
        for _ in range(first_chunk, end_chunk):
            stage = i % NUM_STAGES
            x_tile = x_smem.index(2 * stage).permute((1, 0))
            acc = warpgroup_mma(fragment(weights, DTYPE, W_LAYOUT), x_tile, acc, is_async=True)
            weights = dequantize(pairs, zero_scale, 1, DTYPE)
            x_tile = x_smem.index(2 * stage + 1).permute((1, 0))
            acc = warpgroup_mma(fragment(weights, DTYPE, W_LAYOUT), x_tile, acc, is_async=True)
            acc = warpgroup_mma_wait(1, deps=(acc,))  # the first one's registers are free
            i += 1
            # Beside the last product: what the next one begins with, of the next tile even.
            pairs, zero_scale, weights = load_stage(
                codes_smem,
                scales_smem,
                ready,
                gl.minimum(i, num_own_chunks - 1),
                WARP_GROUP,
                DTYPE,
                NUM_STAGES,
            )
            # None is in flight from one round to the next: ptxas would run each by itself.
            acc = warpgroup_mma_wait(0, deps=(acc,))
            mbarrier.arrive(free.index(stage), count=1)
        n_start = tile // m_tiles * _BLOCK_N + WARP_GROUP * 64
        m_start = tile % m_tiles * BLOCK_M
        if (first_chunk == 0) & (end_chunk == chunks):
            store_output(out, acc, n_start, m_start, M, N, BLOCK_M)
        else:
            reduce_partials(
                out, acc, partials, tile_counters, tile, n_start, m_start, M, N, chunks, chunks_per_program, max_partials,
                WARP_GROUP, BLOCK_M, ACC_LAYOUT,
            )  # fmt: skip


_NOT_SPECIALIZED = (
    "M",
    "chunks",
    "chunks_per_group",
    "num_split_tiles",
    "chunks_per_program",
    "num_waves",
    "m_tiles",
    "max_partials",
)


@gluon.jit(do_not_specialize=_NOT_SPECIALIZED)  # one kernel for all numbers of them
def int4_hopper_kernel(
    x_desc,  # [M, K] in boxes of [BLOCK_M, 64]
    codes_desc,  # int32, pairs of words of two outputs [chunks * N / 2, 32] in boxes of [64, 32]
    scales_desc,  # int32 [groups, N] in boxes of [1, 128]
    out,  # [M, N]
    partials,  # float32 [programs * max_partials, 128 * BLOCK_M]
    tile_counters,  # int32, zeros, two for each shared tile; left as they were
    M,
    N,
    chunks,
    chunks_per_group,  # chunks of a group
    num_split_tiles,  # tiles that are shared, the first ones
    chunks_per_program,  # chunks of these that a program takes
    num_waves,  # tiles of its own that it takes
    m_tiles,  # tiles of rows
    max_partials,  # parts of a program
    BLOCK_M: gl.constexpr,
    NUM_STAGES: gl.constexpr,
):
    """Tiles are numbered by rows first: those with the same weight run at the same time."""
    MBAR_LAYOUT: gl.constexpr = mbarrier.MBarrierLayout()
    SCALES_LAYOUT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    x_smem = gl.allocate_shared_memory(x_desc.dtype, [2 * NUM_STAGES, BLOCK_M, 64], x_desc.layout)
    codes_smem = gl.allocate_shared_memory(
        gl.int32, [NUM_STAGES, _BLOCK_N // 2, 32], codes_desc.layout
    )
    scales_smem = gl.allocate_shared_memory(gl.int32, [2 * NUM_STAGES, 64], SCALES_LAYOUT)
    ready = gl.allocate_shared_memory(gl.int64, [NUM_STAGES, 1], MBAR_LAYOUT)
    free = gl.allocate_shared_memory(gl.int64, [NUM_STAGES, 1], MBAR_LAYOUT)
    for s in gl.static_range(NUM_STAGES):
        mbarrier.init(ready.index(s), count=1)
        mbarrier.init(free.index(s), count=2)  # both warp groups
    fence_async_shared()
    thread_barrier()
    # As the boxes are, and as the warp groups read them.
    scales_boxes = scales_smem._reinterpret(gl.int32, [NUM_STAGES, 1, _BLOCK_N], scales_desc.layout)
    code_halves = codes_smem._reinterpret(gl.int32, [2 * NUM_STAGES, 32, 32], codes_desc.layout)
    gl.warp_specialize(
        [
            (consumer, (
                x_smem, code_halves, scales_smem, ready, free, out, partials, tile_counters,
                M, N, chunks, num_split_tiles, chunks_per_program, num_waves, m_tiles, max_partials, 0, BLOCK_M, NUM_STAGES,
            )),
            (consumer, (
                x_smem, code_halves, scales_smem, ready, free, out, partials, tile_counters,
                M, N, chunks, num_split_tiles, chunks_per_program, num_waves, m_tiles, max_partials, 1, BLOCK_M, NUM_STAGES,
            )),
            (producer, (
                x_desc, codes_desc, scales_desc, x_smem, codes_smem, scales_boxes, ready, free,
                N, chunks, chunks_per_group, num_split_tiles, chunks_per_program, num_waves, m_tiles, BLOCK_M, NUM_STAGES,
            )),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
