"""How kernels with weights from registers divide tiles among programs, and write their sums.

A tile is 128 outputs, 64 for each of two warp groups, by ``BLOCK_M`` rows. Programs are persistent. Tiles beyond
those that keep every program busy are shared along the inputs (``stream_k``): a program takes a run of chunks of
these, which may be of several tiles, then tiles of its own; who is last with a shared tile adds up its parts,
always in the same order.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from treadle_triton_kit.gluon import thread_barrier

__all__ = (
    "flatten",
    "reduce_partials",
    "segment",
    "segments",
    "split_pair",
    "store_output",
    "unflatten",
)


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
def split_pair(x):
    """``[64, n]`` of twos to ``[64, 2 n]``."""
    low, high = gl.inline_asm_elementwise(
        "mov.b32 {$0, $1}, $2;", "=h,=h,r", [x], dtype=(gl.int16, gl.int16), is_pure=True, pack=1
    )
    return gl.reshape(gl.join(low, high), [64, 2 * x.shape[1]])


@gluon.jit
def flatten(acc, BLOCK_M: gl.constexpr):
    """``[64, BLOCK_M]`` in one dimension, by the place in memory: 16 bytes a thread, side by side."""
    v = gl.reshape(acc, [4, 2, 8, BLOCK_M // 8, 4, 2])  # warp g r, j c e
    return gl.reshape(gl.permute(v, [3, 0, 2, 4, 1, 5]), [64 * BLOCK_M])


@gluon.jit
def unflatten(v, BLOCK_M: gl.constexpr):
    """The inverse of ``flatten``."""
    v = gl.reshape(v, [BLOCK_M // 8, 4, 8, 4, 2, 2])  # j warp r c g e
    return gl.reshape(gl.permute(v, [1, 4, 2, 0, 3, 5]), [64, BLOCK_M])


@gluon.jit
def store_output(out, acc, n_start, m_start, M, N, BLOCK_M: gl.constexpr):
    """Store ``acc [64, BLOCK_M]``, of the outputs from ``n_start`` and the rows from ``m_start`` on."""
    # 16 bytes a thread and 32 a row of 16 outputs, by shuffles within warps alone.
    base_regs: gl.constexpr = [[1, 0], [2, 0], [4, 0], [0, 16]]
    num_extra_regs: gl.constexpr = (
        0 if BLOCK_M == 32 else 1 if BLOCK_M == 64 else 2 if BLOCK_M == 128 else 3
    )
    regs: gl.constexpr = base_regs + [[0, 32], [0, 64], [0, 128]][:num_extra_regs]
    layout: gl.constexpr = gl.DistributedLinearLayout(
        regs, [[8, 0], [0, 1], [0, 2], [0, 4], [0, 8]], [[16, 0], [32, 0]], [], [64, BLOCK_M]
    )
    y = gl.convert_layout(acc.to(out.dtype.element_ty), layout)
    offs_n = n_start + gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
    offs_m = m_start + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, layout))
    offs = offs_m.to(gl.int64)[None, :] * N + offs_n[:, None]
    gl.store(out + offs, y, mask=(offs_m < M)[None, :] & (offs_n < N)[:, None])


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
