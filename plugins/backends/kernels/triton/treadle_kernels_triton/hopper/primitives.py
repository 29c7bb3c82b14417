"""Pieces of the kernels: which tile a program takes, how results are gated and written."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from treadle_triton_kit.gluon import round_pair, split_pairs, thread_barrier

__all__ = ("gate", "num_program_tiles", "store_gated", "tile_coordinates")

_GROUP_SIZE_M = gl.constexpr(16)


@gluon.jit
def num_program_tiles(m_tiles, n_tiles):
    """How many tiles this program takes."""
    num_programs = gl.num_programs(0)
    return (m_tiles * n_tiles - gl.program_id(0) + num_programs - 1) // num_programs


@gluon.jit
def tile_coordinates(n, m_tiles, n_tiles):
    """The n-th tile of this program: its number among the rows, and among the columns.

    Up to ``_GROUP_SIZE_M`` tiles of rows meet the same weights one after the other, while L2 has them.
    """
    tile_idx = gl.program_id(0) + n * gl.num_programs(0)
    group_id = tile_idx // (_GROUP_SIZE_M * n_tiles)
    idx_in_group = tile_idx - group_id * (_GROUP_SIZE_M * n_tiles)
    group_size_m = gl.minimum(m_tiles - group_id * _GROUP_SIZE_M, _GROUP_SIZE_M)
    return group_id * _GROUP_SIZE_M + idx_in_group % group_size_m, idx_in_group // group_size_m


@gluon.jit
def split_columns(x):
    """Left and right columns, which are in registers of the same threads."""
    return gl.split(gl.permute(gl.reshape(x, [x.shape[0], 2, x.shape[1] // 2]), (0, 2, 1)))


@gluon.jit
def unpack_float32(x, dtype: gl.constexpr):
    """The same as float32."""
    if dtype == gl.bfloat16:  # the upper half of a float32: one instruction for each
        low = (x << 16).to(gl.float32, bitcast=True)
        high = (x & -65536).to(gl.float32, bitcast=True)
    else:
        low, high = split_pairs(x, dtype)
        low, high = low.to(gl.float32), high.to(gl.float32)
    return low, high


@gluon.jit
def unpack_columns(x, dtype: gl.constexpr):
    """What was packed, in the layout in which ``stmatrix`` stores without shuffles."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    low, high = split_pairs(x, dtype)
    values = gl.reshape(gl.join(low, high), [x.shape[0], 2 * x.shape[1]])
    return gl.convert_layout(values, layout, assert_trivial=True)


@gluon.jit
def gate(x, up, dtype: gl.constexpr):
    """``activation.gate`` of packed pairs, with its roundings: the same bits."""
    low, high = unpack_float32(x, dtype)
    silu = round_pair(low / (1.0 + gl.exp(-low)), high / (1.0 + gl.exp(-high)), dtype)
    suffix: gl.constexpr = "bf16x2" if dtype == gl.bfloat16 else "f16x2"
    return gl.inline_asm_elementwise(
        "mul.rn." + suffix + " $0, $1, $2;",
        "=r,r,r",
        [silu, up],
        dtype=gl.int32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def store_columns(desc, buffers, COL_BLOCK: gl.constexpr, value, row, col):
    """Write the ``COL_BLOCK``-th 64 columns by way of shared memory; TMA drops what the tensor has not."""
    buffer = buffers.index(COL_BLOCK)
    tma.store_wait(buffers.shape[0] - 1)  # of the thread that stores; the others learn of it below
    thread_barrier()
    buffer.store(unpack_columns(value, desc.dtype))
    fence_async_shared()
    thread_barrier()
    tma.async_copy_shared_to_global(desc, [row, col + 64 * COL_BLOCK], buffer)


@gluon.jit
def store_gated(desc, buffers, result, row, col):
    """Gate and write a packed tile, whose left half is the gate's and whose right one is up's."""
    dtype: gl.constexpr = desc.dtype
    x, up = split_columns(result)
    if x.shape[1] == 32:
        store_columns(desc, buffers, 0, gate(x, up, dtype), row, col)
    else:
        x0, x1 = split_columns(x)
        up0, up1 = split_columns(up)
        store_columns(desc, buffers, 0, gate(x0, up0, dtype), row, col)
        store_columns(desc, buffers, 1, gate(x1, up1, dtype), row, col)
