"""The kernel for many rows on Hopper: one warp fetches, two warp groups unpack and multiply.

The product is transposed: the weight is the left operand, from registers, where codes become numbers;
rows of ``x`` are the right one, from shared memory. A tile is 128 outputs, 64 for each warp group, by
32 to 256 rows. Programs are persistent. Barriers are shared memory's: ``ready`` when what was fetched
has arrived, ``free`` when its readers are done; a wait names the parity of the phase that it waits for
the end of.

Tiles beyond those that keep every program busy are shared along the inputs (``plan.plan``). A program
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
    flat,
    fragment,
    numbers,
    scaling,
    unflat,
    write,
)
from treadle_triton_kit.gluon import thread_barrier

__all__ = ("REGISTERS", "WARPS", "wide_kernel")

WARPS = 4
REGISTERS = 168
"""Of a thread on average, which is what the three groups divide among them: 240, 240 and 24."""

_OUTS = gl.constexpr(128)  # outputs of a tile
_CHUNK = gl.constexpr(128)  # inputs of a stage


@gluon.jit
def segments(shared, share, chunks, rounds):
    """This program's first chunk of the shared tiles, the one after its last, how many tiles these
    are of, and how many with those of its own."""
    units = shared * chunks
    begin = gl.minimum(gl.program_id(0) * share, units)
    end = gl.minimum(begin + share, units)
    touched = gl.where(begin < end, (end - 1) // chunks - begin // chunks + 1, 0)
    return begin, end, touched, touched + rounds


@gluon.jit
def segment(n, begin, end, touched, shared, chunks):
    """Tile, first chunk and the one after the last of the n-th one."""
    mine = begin // chunks + n
    own = shared + gl.program_id(0) + (n - touched) * gl.num_programs(0)
    tile = gl.where(n < touched, mine, own)
    first = gl.where(n < touched, gl.maximum(begin - mine * chunks, 0), 0)
    last = gl.where(n < touched, gl.minimum(end - mine * chunks, chunks), chunks)
    return tile, first, last


@gluon.jit
def producer(
    x_desc, codes_desc, steps_desc, inputs, codes, steps, ready, free,
    width, chunks, group, shared, share, rounds, down, ROWS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """One warp."""
    begin, end, touched, count = segments(shared, share, chunks, rounds)
    i = 0
    for n in range(count):
        tile, first, last = segment(n, begin, end, touched, shared, chunks)
        out = tile // down * _OUTS
        row = tile % down * ROWS
        for chunk in range(first, last):
            s = i % STAGES
            bar = ready.index(s)
            mbarrier.wait(free.index(s), ((i // STAGES) & 1) ^ 1)
            mbarrier.expect(bar, ROWS * 2 * _CHUNK + _OUTS * 64 + _OUTS * 4)
            # Past the last output there is another chunk, or zeros: whatever it is, it is not stored.
            tma.async_copy_global_to_shared(
                codes_desc, [(chunk * width + out) // 2, 0], bar, codes.index(s)
            )
            tma.async_copy_global_to_shared(steps_desc, [chunk // group, out], bar, steps.index(s))
            for half in gl.static_range(2):
                tma.async_copy_global_to_shared(
                    x_desc, [row, chunk * _CHUNK + half * 64], bar, inputs.index(2 * s + half)
                )
            i += 1


@gluon.jit
def take(codes, steps, ready, i, W: gl.constexpr, KIND: gl.constexpr, STAGES: gl.constexpr):
    """Pairs of words and scaling of stage ``i``; of the first half of its inputs, numbers."""
    PAIRS: gl.constexpr = gl.DistributedLinearLayout(
        [[8, 0], [0, 4], [0, 8]], [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [],
        [64, 16],
    )  # fmt: skip
    TWOS: gl.constexpr = gl.DistributedLinearLayout(  # the same, as memory has it
        [[4, 0], [0, 4], [0, 8]], [[0, 1], [0, 2], [0, 16], [1, 0], [2, 0]], [[8, 0], [16, 0]], [],
        [32, 32],
    )  # fmt: skip
    s = i % STAGES
    mbarrier.wait(ready.index(s), (i // STAGES) & 1)
    pairs = gl.reshape(codes.index(2 * s + W).load(TWOS), [64, 16])
    pairs = gl.convert_layout(pairs, PAIRS, assert_trivial=True)
    way = scaling(steps.index(2 * s + W).load(gl.SliceLayout(1, PAIRS)), KIND)
    two = numbers(pairs, way, 0, KIND)
    # A barrier that was passed already, for its branch: ptxas would take the numbers after the wait
    # that follows, where no product runs beside them.
    mbarrier.wait(ready.index(s), (i // STAGES) & 1)
    return pairs, way, two


@gluon.jit
def share_out(
    out, acc, parts, tickets, tile, top, row, rows, width, chunks, share, slots,
    W: gl.constexpr, ROWS: gl.constexpr, SUMS: gl.constexpr,
):  # fmt: skip
    """Store a part of a shared tile; if all others are there, write the sum."""
    # A program's first tile is part 0 of its own, a last one that is another, part 1.
    size: gl.constexpr = 64 * ROWS
    me = gl.program_id(0)
    base = (me * slots + (me * share < tile * chunks).to(gl.int32)) * 2 + W
    own = flat(acc, ROWS)
    e = gl.arange(0, size, layout=own.type.layout)
    gl.store(parts + base.to(gl.int64) * size + e, own)
    lo = tile * chunks // share
    hi = ((tile + 1) * chunks - 1) // share
    thread_barrier()  # all threads have stored before one says so
    ticket = tickets + tile * 2 + W
    if gl.atomic_add(ticket, 1, sem="acq_rel") == hi - lo:
        thread_barrier()
        # What is still in registers is not read again, unless they would not do.
        KEPT: gl.constexpr = ROWS <= 128
        y = gl.zeros_like(own)
        for p in range(lo, hi + 1):
            of = (p * slots + (p * share < tile * chunks).to(gl.int32)) * 2 + W
            part = parts + of.to(gl.int64) * size + e
            # From L2, where other multiprocessors' stores are.
            if KEPT:
                if p == me:
                    y += own
                else:
                    y += gl.load(part, cache_modifier=".cg")
            else:
                y += gl.load(part, cache_modifier=".cg")
        y = gl.convert_layout(unflat(y, ROWS), SUMS, assert_trivial=True)
        write(out, y, top, row, rows, width, ROWS)
        gl.store(ticket, 0)


@gluon.jit
def consumer(
    inputs, codes, steps, ready, free, out, parts, tickets,
    rows, width, chunks, shared, share, rounds, down, slots,
    W: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """A warp group: outputs ``64 * W`` to ``64 * W + 63`` of the tiles."""
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    KIND: gl.constexpr = inputs.dtype
    begin, end, touched, count = segments(shared, share, chunks, rounds)
    total = end - begin + rounds * chunks
    i = 0
    pairs, way, two = take(codes, steps, ready, 0, W, KIND, STAGES)
    for n in range(count):
        tile, first, last = segment(n, begin, end, touched, shared, chunks)
        acc = gl.zeros([64, ROWS], gl.float32, SUMS)
        for _ in range(first, last):
            s = i % STAGES
            right = inputs.index(2 * s).permute((1, 0))
            acc = warpgroup_mma(fragment(two, KIND, WEIGHTS), right, acc, is_async=True)
            two = numbers(pairs, way, 1, KIND)
            right = inputs.index(2 * s + 1).permute((1, 0))
            acc = warpgroup_mma(fragment(two, KIND, WEIGHTS), right, acc, is_async=True)
            acc = warpgroup_mma_wait(1, deps=(acc,))  # the first one's registers are free
            i += 1
            # Beside the last product: what the next one begins with, of the next tile even.
            pairs, way, two = take(codes, steps, ready, gl.minimum(i, total - 1), W, KIND, STAGES)
            # None is in flight from one round to the next: ptxas would run each by itself.
            acc = warpgroup_mma_wait(0, deps=(acc,))
            mbarrier.arrive(free.index(s), count=1)
        top = tile // down * _OUTS + W * 64
        row = tile % down * ROWS
        if (first == 0) & (last == chunks):
            write(out, acc, top, row, rows, width, ROWS)
        else:
            share_out(
                out, acc, parts, tickets, tile, top, row, rows, width, chunks, share, slots,
                W, ROWS, SUMS,
            )  # fmt: skip


_COUNTS = ("rows", "chunks", "group", "shared", "share", "rounds", "down", "slots")


@gluon.jit(do_not_specialize=_COUNTS)  # one kernel for all numbers of them
def wide_kernel(
    x_desc,  # [rows, inputs] in boxes of [ROWS, 64]
    codes_desc,  # int32, pairs of words of two outputs [chunks * width / 2, 32] in boxes of [64, 32]
    steps_desc,  # int32 [groups, width] in boxes of [1, 128]
    out,  # [rows, width]
    parts,  # float32 [programs * slots, 128 * ROWS]
    tickets,  # int32, zeros, two for each shared tile; left as they were
    rows,
    width,
    chunks,
    group,  # chunks of a group
    shared,  # tiles that are shared, the first ones
    share,  # chunks of these that a program takes
    rounds,  # tiles of its own that it takes
    down,  # tiles of rows
    slots,  # parts of a program
    ROWS: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Tiles are numbered by rows first: those with the same weight run at the same time."""
    ONE: gl.constexpr = mbarrier.MBarrierLayout()
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    inputs = gl.allocate_shared_memory(x_desc.dtype, [2 * STAGES, ROWS, 64], x_desc.layout)
    codes = gl.allocate_shared_memory(gl.int32, [STAGES, _OUTS // 2, 32], codes_desc.layout)
    steps = gl.allocate_shared_memory(gl.int32, [2 * STAGES, 64], PLAIN)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], ONE)
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], ONE)
    for s in gl.static_range(STAGES):
        mbarrier.init(ready.index(s), count=1)
        mbarrier.init(free.index(s), count=2)  # both warp groups
    fence_async_shared()
    thread_barrier()
    # As the boxes are, and as the warp groups read them.
    steps_in = steps._reinterpret(gl.int32, [STAGES, 1, _OUTS], steps_desc.layout)
    halves = codes._reinterpret(gl.int32, [2 * STAGES, 32, 32], codes_desc.layout)
    gl.warp_specialize(
        [
            (consumer, (
                inputs, halves, steps, ready, free, out, parts, tickets,
                rows, width, chunks, shared, share, rounds, down, slots, 0, ROWS, STAGES,
            )),
            (consumer, (
                inputs, halves, steps, ready, free, out, parts, tickets,
                rows, width, chunks, shared, share, rounds, down, slots, 1, ROWS, STAGES,
            )),
            (producer, (
                x_desc, codes_desc, steps_desc, inputs, codes, steps_in, ready, free,
                width, chunks, group, shared, share, rounds, down, ROWS, STAGES,
            )),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
