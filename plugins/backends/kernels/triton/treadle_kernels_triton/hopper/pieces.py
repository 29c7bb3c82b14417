"""Pieces of the kernels: which tile a program takes, how results are gated and written."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from treadle_triton_kit.gluon import round_pair, split_pairs, thread_barrier

__all__ = ("gate", "tile_of", "tiles_of", "write")

_BAND = gl.constexpr(16)


@gluon.jit
def tiles_of(m_tiles, n_tiles):
    """How many tiles this program takes."""
    programs = gl.num_programs(0)
    return (m_tiles * n_tiles - gl.program_id(0) + programs - 1) // programs


@gluon.jit
def tile_of(n, m_tiles, n_tiles):
    """The n-th tile of this program: its number among the rows, and among the columns.

    Up to ``_BAND`` tiles of rows meet the same weights one after the other, while L2 has them.
    """
    unit = gl.program_id(0) + n * gl.num_programs(0)
    band = unit // (_BAND * n_tiles)
    left = unit - band * (_BAND * n_tiles)
    high = gl.minimum(m_tiles - band * _BAND, _BAND)
    return band * _BAND + left % high, left // high


@gluon.jit
def halves(x):
    """Left and right columns, which are in registers of the same threads."""
    return gl.split(gl.permute(gl.reshape(x, [x.shape[0], 2, x.shape[1] // 2]), (0, 2, 1)))


@gluon.jit
def wide(x, kind: gl.constexpr):
    """The same as float32."""
    if kind == gl.bfloat16:  # the upper half of a float32: one instruction for each
        low = (x << 16).to(gl.float32, bitcast=True)
        high = (x & -65536).to(gl.float32, bitcast=True)
    else:
        low, high = split_pairs(x, kind)
        low, high = low.to(gl.float32), high.to(gl.float32)
    return low, high


@gluon.jit
def unpacked(x, kind: gl.constexpr):
    """What was packed, in the layout in which ``stmatrix`` stores without shuffles."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    low, high = split_pairs(x, kind)
    both = gl.reshape(gl.join(low, high), [x.shape[0], 2 * x.shape[1]])
    return gl.convert_layout(both, layout, assert_trivial=True)


@gluon.jit
def gate(x, up, kind: gl.constexpr):
    """``activation.gate`` of packed pairs, with its roundings: the same bits."""
    low, high = wide(x, kind)
    gated = round_pair(low / (1.0 + gl.exp(-low)), high / (1.0 + gl.exp(-high)), kind)
    name: gl.constexpr = "bf16x2" if kind == gl.bfloat16 else "f16x2"
    return gl.inline_asm_elementwise(
        "mul.rn." + name + " $0, $1, $2;",
        "=r,r,r",
        [gated, up],
        dtype=gl.int32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def put(desc, buffers, PART: gl.constexpr, value, row, column):
    """Write the ``PART``-th 64 columns by way of shared memory; TMA drops what the tensor has not."""
    buffer = buffers.index(PART)
    tma.store_wait(buffers.shape[0] - 1)  # of the thread that stores; the others learn of it below
    thread_barrier()
    buffer.store(unpacked(value, desc.dtype))
    fence_async_shared()
    thread_barrier()
    tma.async_copy_shared_to_global(desc, [row, column + 64 * PART], buffer)


@gluon.jit
def write(desc, buffers, result, row, column):
    """Gate and write a packed tile, whose left half is the gate's and whose right one is up's."""
    kind: gl.constexpr = desc.dtype
    x, up = halves(result)
    if x.shape[1] == 32:
        put(desc, buffers, 0, gate(x, up, kind), row, column)
    else:
        x0, x1 = halves(x)
        up0, up1 = halves(up)
        put(desc, buffers, 0, gate(x0, up0, kind), row, column)
        put(desc, buffers, 1, gate(x1, up1, kind), row, column)
