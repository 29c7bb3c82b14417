"""The kernel of 2 to 256 rows: one warp fetches, up to three warp groups multiply, a tile a program.

The weight is the left side of the product, of which a warp group has 64 rows; the right side are the
rows of ``x``, and a result arrives transposed. A step is 64 columns of both, ``STAGES`` of them on their
way. A program starts while the kernel ahead still runs and fetches its first weights, which no kernel
writes; ``x`` only when that one has ended. Warp groups touch memory only after ``x`` has arrived, and so
after that end too.

Gated, the 64 rows are eight of the gate, eight of up, eight of the gate, and so on: what a thread has of
the result is then a gate's and its up's, for of rows ``r`` to ``r + 7`` and ``r + 8`` to ``r + 15`` it has
the same.

In parts, programs share the depth of a tile, and each writes what it has found as float32: whoever
reads the result, adds.

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

from treadle_kernels_triton.hopper.pieces import gate
from treadle_triton_kit.gluon import (
    launch_dependents,
    pack_columns,
    split_pairs,
    thread_barrier,
    wait_for_previous_kernel,
)

__all__ = ("REGISTERS", "WARPS", "batch_kernel")

WARPS = 4
REGISTERS = (168, 168, 128)
"""Of a thread on average, for one to three warp groups, which is what they and the fetching one divide.

With three they are all that a multiprocessor has."""

_STEP = gl.constexpr(64)
_BYTES = gl.constexpr(128)  # of a row of a step


@gluon.jit
def fetch_part(w_desc, own, bar, s, feature, at, GATED: gl.constexpr):
    """64 rows of the weight, from ``feature`` on; of the result's features, if GATED."""
    if GATED:
        to = own._reinterpret(own.dtype, [own.shape[0], 4, 2, 8, _STEP], w_desc.layout)
        tma.async_copy_global_to_shared(w_desc, [feature // 8, 0, 0, at], bar, to.index(s))
    else:
        tma.async_copy_global_to_shared(w_desc, [feature, at], bar, own.index(s))


@gluon.jit
def fetch_weight(
    w_desc, w0, w1, w2, bar, s, feature, step, GROUPS: gl.constexpr, GATED: gl.constexpr
):
    wide: gl.constexpr = 32 if GATED else 64
    mbarrier.expect(bar, 64 * GROUPS * _BYTES)
    fetch_part(w_desc, w0, bar, s, feature, step * _STEP, GATED)
    if GROUPS > 1:
        fetch_part(w_desc, w1, bar, s, feature + wide, step * _STEP, GATED)
    if GROUPS > 2:
        fetch_part(w_desc, w2, bar, s, feature + 2 * wide, step * _STEP, GATED)


@gluon.jit
def fetch_x(x_desc, rest_desc, x0, x1, bar, s, row, real, step, ROWS: gl.constexpr):
    """``real`` rows rounded up to 16: what does not exist takes longer to fetch than what does.

    Nobody needs the others. What is in their place goes into columns of the result that are not
    written, and into no other.
    """
    MANY: gl.constexpr = x0.shape[1] // 64
    MORE: gl.constexpr = x1.shape[1] // 64
    for p in gl.static_range(ROWS // 64):
        if p < MANY:
            ring, k = x0, s * MANY + p
        else:
            ring, k = x1, s * MORE + p - MANY
        at = [row + 64 * p, step * _STEP]
        if real >= 64 * (p + 1):
            boxes = ring._reinterpret(
                ring.dtype, [ring.shape[0] * ring.shape[1] // 64, 64, _STEP], x_desc.layout
            )
            mbarrier.expect(bar, 64 * _BYTES)
            tma.async_copy_global_to_shared(x_desc, at, bar, boxes.index(k))
        elif real > 64 * p:
            boxes = ring._reinterpret(
                ring.dtype, [ring.shape[0] * ring.shape[1] // 16, 16, _STEP], rest_desc.layout
            )
            for q in gl.static_range(4):  # a constant each time: Triton 3.6 takes no other
                count = (real - 64 * p + 15) // 16
                mbarrier.expect(bar, (q + 1) * 16 * _BYTES, pred=count == q + 1)
            for q in gl.static_range(4):
                at = [row + 64 * p + 16 * q, step * _STEP]
                exists = real > 64 * p + 16 * q
                tma.async_copy_global_to_shared(
                    rest_desc, at, bar, boxes.index(4 * k + q), pred=exists
                )
        else:
            mbarrier.arrive(bar, count=1)


@gluon.jit
def producer(fetched, ROWS: gl.constexpr, GROUPS: gl.constexpr, GATED: gl.constexpr):
    """One warp. What is not in the weight arrives as zeros."""
    x_desc, rest_desc, w_desc, x0, x1, w0, w1, w2 = fetched[:8]
    ready, free, row, real, feature, first, count = fetched[8:]
    STAGES: gl.constexpr = x0.shape[0]
    ahead = gl.minimum(count, STAGES)
    for s in range(ahead):
        fetch_weight(w_desc, w0, w1, w2, ready.index(s), s, feature, first + s, GROUPS, GATED)
    wait_for_previous_kernel()
    for s in range(ahead):
        fetch_x(x_desc, rest_desc, x0, x1, ready.index(s), s, row, real, first + s, ROWS)
    for i in range(STAGES, count):
        k = i % STAGES
        mbarrier.wait(free.index(k), ((i // STAGES) & 1) ^ 1)
        bar = ready.index(k)
        fetch_weight(w_desc, w0, w1, w2, bar, k, feature, first + i, GROUPS, GATED)
        fetch_x(x_desc, rest_desc, x0, x1, bar, k, row, real, first + i, ROWS)


@gluon.jit
def multiply(acc0, acc1, x0, x1, own, ready, i, FIRST: gl.constexpr, TWO: gl.constexpr):
    """Begin the products of step ``i``, when it is there; wait for those of the step before."""
    s = i % x0.shape[0]
    mbarrier.wait(ready.index(s), (i // x0.shape[0]) & 1)
    left, right = own.index(s), x0.index(s).permute((1, 0))
    acc0 = warpgroup_mma(left, right, acc0, use_acc=not FIRST, is_async=True)
    if TWO:
        right = x1.index(s).permute((1, 0))
        acc1 = warpgroup_mma(left, right, acc1, use_acc=not FIRST, is_async=True)
        acc0, acc1 = warpgroup_mma_wait(2, deps=(acc0, acc1))
    else:
        acc0 = warpgroup_mma_wait(1, deps=(acc0,))
    return acc0, acc1


@gluon.jit
def added(acc, bias, biased, feature, features):
    """Sums ``[features, rows]`` and the bias of these features, if there is one."""
    f = feature + gl.arange(0, 64, layout=gl.SliceLayout(1, acc.type.layout))
    own = gl.load(bias + f, mask=(f < features) & (biased > 0), other=0.0)
    return acc + own.to(gl.float32)[:, None]


@gluon.jit
def rounded(acc, kind: gl.constexpr, GATED: gl.constexpr):
    if GATED:
        return pack_columns(acc, kind)
    else:
        return acc.to(kind)


@gluon.jit
def finished(value, kind: gl.constexpr, GATED: gl.constexpr):
    """What ``rounded`` has made of ``[64, n]``; if GATED, ``[32, n]``, for which nothing moves."""
    if GATED:
        n: gl.constexpr = 2 * value.shape[1]
        pairs = gl.permute(gl.reshape(value, [4, 2, 8, n // 2]), [0, 2, 3, 1])
        first, second = gl.split(pairs)
        low, high = split_pairs(gate(first, second, kind), kind)
        return gl.reshape(gl.join(low, high), [32, n])
    else:
        return value


@gluon.jit
def put(y_desc, buffer, value, row, feature):
    """``value [features, rows]`` to ``y [rows, features]``; TMA drops what y has not."""
    thread_barrier()  # all warps are done with what was there
    buffer.permute((1, 0)).store(value)
    fence_async_shared()
    thread_barrier()
    HIGH: gl.constexpr = y_desc.block_type.shape[0]
    MANY: gl.constexpr = buffer.shape[0] // HIGH
    boxes = buffer._reinterpret(buffer.dtype, [MANY, HIGH, buffer.shape[1]], y_desc.layout)
    for p in gl.static_range(MANY):
        tma.async_copy_shared_to_global(y_desc, [row + p * HIGH, feature], boxes.index(p))


@gluon.jit
def put_part(out, acc, before, row, feature, rows, features):
    """Sums ``[features, rows]`` to ``out [.., features]``, ``before`` rows after its begin."""
    LAYOUT: gl.constexpr = acc.type.layout
    f = gl.arange(0, 64, layout=gl.SliceLayout(1, LAYOUT))
    r = gl.arange(0, acc.shape[1], layout=gl.SliceLayout(0, LAYOUT))
    mask = (r < rows - row)[None, :] & (f < features - feature)[:, None]
    own = out + (before + row).to(gl.int64) * features + feature
    gl.store(own + (r[None, :] * features + f[:, None]), acc, mask=mask)


@gluon.jit
def consumer(
    common, own,
    W: gl.constexpr, ROWS: gl.constexpr, GATED: gl.constexpr, PARTS: gl.constexpr,
):  # fmt: skip
    """A warp group: the ``W``-th 64 rows of the tile's weights, which are in ``own``."""
    y_desc, bias, out, x0, x1, ready, free = common[:7]
    row, feature, rows, features, split, count, biased = common[7:]
    STAGES: gl.constexpr = x0.shape[0]
    MOST: gl.constexpr = x0.shape[1]
    REST: gl.constexpr = x1.shape[1]
    TWO: gl.constexpr = ROWS > MOST
    ACC0: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, MOST, 16])
    ACC1: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, REST, 16])
    kind: gl.constexpr = x0.dtype
    acc0 = gl.zeros([64, MOST], gl.float32, ACC0)
    acc1 = row  # nothing
    if TWO:
        acc1 = gl.zeros([64, REST], gl.float32, ACC1)
    acc0, acc1 = multiply(acc0, acc1, x0, x1, own, ready, 0, True, TWO)
    for i in range(1, count):
        acc0, acc1 = multiply(acc0, acc1, x0, x1, own, ready, i, False, TWO)
        mbarrier.arrive(free.index((i - 1) % STAGES), count=1)
    wide: gl.constexpr = 32 if GATED else 64
    feature += wide * W
    if TWO:
        acc0, acc1 = warpgroup_mma_wait(0, deps=(acc0, acc1))
    else:
        acc0 = warpgroup_mma_wait(0, deps=(acc0,))
    if not GATED and not PARTS:
        acc0 = added(acc0, bias, biased, feature, features)
        if TWO:
            acc1 = added(acc1, bias, biased, feature, features)
    if PARTS:
        put_part(out, acc0, split * rows, row, feature, rows, features)
        if TWO:
            put_part(out, acc1, split * rows, row + MOST, feature, rows, features)
    else:
        # By way of this warp group's weights: nobody else reads them, and nothing is on its way there.
        value = rounded(acc0, kind, GATED)
        if TWO:
            more = rounded(acc1, kind, GATED)
        buffer = own._reinterpret(kind, [1, MOST, wide], y_desc.layout).index(0)
        put(y_desc, buffer, finished(value, kind, GATED), row, feature)
        if TWO:
            AT: gl.constexpr = MOST // REST
            rest = own._reinterpret(kind, [AT + 1, REST, wide], y_desc.layout).index(AT)
            if row + MOST < rows:
                put(y_desc, rest, finished(more, kind, GATED), row + MOST, feature)
        tma.store_wait(0)  # shared memory is read until then


@gluon.jit(do_not_specialize=("rows", "features", "down", "steps", "splits", "biased"))
def batch_kernel(
    x_desc,  # [rows, depth] in boxes of [64, 64]
    rest_desc,  # the same in boxes of [16, 64]
    w_desc,  # [features, depth] in boxes of [64, 64]; GATED: [width / 8, 2, 8, depth], [4, 2, 8, 64]
    y_desc,  # [rows, width] in boxes of [rows of a piece, 32 if GATED else 64]; not with PARTS
    bias,  # [features], if biased; neither with GATED nor with PARTS
    out,  # float32 [splits, rows, features]; only with PARTS
    rows,
    features,
    down,  # tiles of rows; those of the same weights are neighbours
    steps,  # of the depth, as many as splits at least
    splits,  # 1 unless PARTS
    biased,  # 0 or 1
    GROUPS: gl.constexpr,
    ROWS: gl.constexpr,
    MOST: gl.constexpr,  # of these at once, the rest in a second product
    STAGES: gl.constexpr,
    GATED: gl.constexpr,
    PARTS: gl.constexpr,
):
    """Program (tile of weights, share of the depth, tile of rows)."""
    launch_dependents()
    pid = gl.program_id(0)
    wide: gl.constexpr = 32 * GROUPS if GATED else 64 * GROUPS
    row = pid % down * ROWS
    split, feature = pid // down % splits, pid // down // splits * wide
    real = gl.minimum(rows - row, ROWS)
    first = split * steps // splits
    count = (split + 1) * steps // splits - first
    TILE: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    ONE: gl.constexpr = mbarrier.MBarrierLayout()
    kind: gl.constexpr = x_desc.dtype
    x0 = gl.allocate_shared_memory(kind, [STAGES, MOST, _STEP], TILE)
    x1 = x0
    if ROWS > MOST:
        x1 = gl.allocate_shared_memory(kind, [STAGES, ROWS - MOST, _STEP], TILE)
    w0 = gl.allocate_shared_memory(kind, [STAGES, 64, _STEP], TILE)
    w1, w2 = w0, w0
    if GROUPS > 1:
        w1 = gl.allocate_shared_memory(kind, [STAGES, 64, _STEP], TILE)
    if GROUPS > 2:
        w2 = gl.allocate_shared_memory(kind, [STAGES, 64, _STEP], TILE)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], ONE)
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], ONE)
    for s in gl.static_range(STAGES):
        mbarrier.init(ready.index(s), count=1 + ROWS // 64)  # weights, and each 64 rows of x
        mbarrier.init(free.index(s), count=GROUPS)
    fence_async_shared()
    thread_barrier()
    fetched = (
        x_desc, rest_desc, w_desc, x0, x1, w0, w1, w2, ready, free, row, real, feature, first, count,
    )  # fmt: skip
    common = (
        y_desc, bias, out, x0, x1, ready, free, row, feature, rows, features, split, count, biased,
    )  # fmt: skip
    if GROUPS == 1:
        gl.warp_specialize(
            [
                (consumer, (common, w0, 0, ROWS, GATED, PARTS)),
                (producer, (fetched, ROWS, GROUPS, GATED)),
            ],
            [1],
            [24],
        )
    elif GROUPS == 2:
        gl.warp_specialize(
            [
                (consumer, (common, w0, 0, ROWS, GATED, PARTS)),
                (consumer, (common, w1, 1, ROWS, GATED, PARTS)),
                (producer, (fetched, ROWS, GROUPS, GATED)),
            ],
            [4, 1],
            [240, 24],
        )
    else:
        gl.warp_specialize(
            [
                (consumer, (common, w0, 0, ROWS, GATED, PARTS)),
                (consumer, (common, w1, 1, ROWS, GATED, PARTS)),
                (consumer, (common, w2, 2, ROWS, GATED, PARTS)),
                (producer, (fetched, ROWS, GROUPS, GATED)),
            ],
            [4, 4, 1],
            [160, 160, 24],
        )
