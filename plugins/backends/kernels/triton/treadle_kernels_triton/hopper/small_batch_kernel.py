"""The kernel of 2 to 256 rows: one warp fetches, up to three warp groups multiply, a tile a program.

The weight is the left side of the product, of which a warp group has 64 rows; the right side are the
rows of ``x``, and a result arrives transposed. A step is 64 columns of both, ``NUM_STAGES`` of them on their
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

from treadle_kernels_triton.hopper.primitives import gate
from treadle_triton_kit.gluon import (
    launch_dependents,
    pack_columns,
    split_pairs,
    thread_barrier,
    wait_for_previous_kernel,
)

__all__ = ("REGISTERS", "WARPS", "small_batch_kernel")

WARPS = 4
REGISTERS = (168, 168, 128)
"""Of a thread on average, for one to three warp groups, which is what they and the fetching one divide.

With three they are all that a multiprocessor has."""

_BLOCK_K = gl.constexpr(64)
_ROW_BYTES = gl.constexpr(128)  # of a row of a step


@gluon.jit
def fetch_part(w_desc, w_smem, bar, stage, feature, offs_k, GATED: gl.constexpr):
    """64 rows of the weight, from ``feature`` on; of the result's features, if GATED."""
    if GATED:
        dst = w_smem._reinterpret(w_smem.dtype, [w_smem.shape[0], 4, 2, 8, _BLOCK_K], w_desc.layout)
        tma.async_copy_global_to_shared(w_desc, [feature // 8, 0, 0, offs_k], bar, dst.index(stage))
    else:
        tma.async_copy_global_to_shared(w_desc, [feature, offs_k], bar, w_smem.index(stage))


@gluon.jit
def fetch_weight(
    w_desc,
    w0,
    w1,
    w2,
    bar,
    stage,
    feature,
    k_tile,
    NUM_WARP_GROUPS: gl.constexpr,
    GATED: gl.constexpr,
):
    group_features: gl.constexpr = 32 if GATED else 64
    mbarrier.expect(bar, 64 * NUM_WARP_GROUPS * _ROW_BYTES)
    fetch_part(w_desc, w0, bar, stage, feature, k_tile * _BLOCK_K, GATED)
    if NUM_WARP_GROUPS > 1:
        fetch_part(w_desc, w1, bar, stage, feature + group_features, k_tile * _BLOCK_K, GATED)
    if NUM_WARP_GROUPS > 2:
        fetch_part(w_desc, w2, bar, stage, feature + 2 * group_features, k_tile * _BLOCK_K, GATED)


@gluon.jit
def fetch_x(x_desc, x_desc_16, x0, x1, bar, stage, row, valid_rows, k_tile, BLOCK_M: gl.constexpr):
    """``valid_rows`` rows rounded up to 16: what does not exist takes longer to fetch than what does.

    Nobody needs the others. What is in their place goes into columns of the result that are not
    written, and into no other.
    """
    X0_BOXES: gl.constexpr = x0.shape[1] // 64
    X1_BOXES: gl.constexpr = x1.shape[1] // 64
    for box in gl.static_range(BLOCK_M // 64):
        if box < X0_BOXES:
            smem, box_idx = x0, stage * X0_BOXES + box
        else:
            smem, box_idx = x1, stage * X1_BOXES + box - X0_BOXES
        coords = [row + 64 * box, k_tile * _BLOCK_K]
        if valid_rows >= 64 * (box + 1):
            boxes = smem._reinterpret(
                smem.dtype, [smem.shape[0] * smem.shape[1] // 64, 64, _BLOCK_K], x_desc.layout
            )
            mbarrier.expect(bar, 64 * _ROW_BYTES)
            tma.async_copy_global_to_shared(x_desc, coords, bar, boxes.index(box_idx))
        elif valid_rows > 64 * box:
            boxes = smem._reinterpret(
                smem.dtype, [smem.shape[0] * smem.shape[1] // 16, 16, _BLOCK_K], x_desc_16.layout
            )
            for sub_box in gl.static_range(4):  # a constant each time: Triton 3.6 takes no other
                num_sub_boxes = (valid_rows - 64 * box + 15) // 16
                mbarrier.expect(
                    bar, (sub_box + 1) * 16 * _ROW_BYTES, pred=num_sub_boxes == sub_box + 1
                )
            for sub_box in gl.static_range(4):
                coords = [row + 64 * box + 16 * sub_box, k_tile * _BLOCK_K]
                is_valid = valid_rows > 64 * box + 16 * sub_box
                tma.async_copy_global_to_shared(
                    x_desc_16, coords, bar, boxes.index(4 * box_idx + sub_box), pred=is_valid
                )
        else:
            mbarrier.arrive(bar, count=1)


@gluon.jit
def producer(args, BLOCK_M: gl.constexpr, NUM_WARP_GROUPS: gl.constexpr, GATED: gl.constexpr):
    """One warp. What is not in the weight arrives as zeros."""
    x_desc, x_desc_16, w_desc, x0, x1, w0, w1, w2 = args[:8]
    ready, free, row, valid_rows, feature, first_k_tile, num_k_tiles = args[8:]
    NUM_STAGES: gl.constexpr = x0.shape[0]
    num_prefetched = gl.minimum(num_k_tiles, NUM_STAGES)
    for s in range(num_prefetched):
        fetch_weight(
            w_desc, w0, w1, w2, ready.index(s), s, feature, first_k_tile + s, NUM_WARP_GROUPS, GATED
        )
    wait_for_previous_kernel()
    for s in range(num_prefetched):
        fetch_x(
            x_desc, x_desc_16, x0, x1, ready.index(s), s, row, valid_rows, first_k_tile + s, BLOCK_M
        )
    for i in range(NUM_STAGES, num_k_tiles):
        stage = i % NUM_STAGES
        mbarrier.wait(free.index(stage), ((i // NUM_STAGES) & 1) ^ 1)
        bar = ready.index(stage)
        fetch_weight(
            w_desc, w0, w1, w2, bar, stage, feature, first_k_tile + i, NUM_WARP_GROUPS, GATED
        )
        fetch_x(x_desc, x_desc_16, x0, x1, bar, stage, row, valid_rows, first_k_tile + i, BLOCK_M)


@gluon.jit
def multiply(acc0, acc1, x0, x1, w_smem, ready, i, IS_FIRST: gl.constexpr, TWO_ACCS: gl.constexpr):
    """Begin the products of step ``i``, when it is there; wait for those of the step before."""
    stage = i % x0.shape[0]
    mbarrier.wait(ready.index(stage), (i // x0.shape[0]) & 1)
    w_tile, x_tile = w_smem.index(stage), x0.index(stage).permute((1, 0))
    acc0 = warpgroup_mma(w_tile, x_tile, acc0, use_acc=not IS_FIRST, is_async=True)
    if TWO_ACCS:
        x_tile = x1.index(stage).permute((1, 0))
        acc1 = warpgroup_mma(w_tile, x_tile, acc1, use_acc=not IS_FIRST, is_async=True)
        acc0, acc1 = warpgroup_mma_wait(2, deps=(acc0, acc1))
    else:
        acc0 = warpgroup_mma_wait(1, deps=(acc0,))
    return acc0, acc1


@gluon.jit
def add_bias(acc, bias, has_bias, feature, features):
    """Sums ``[features, rows]`` and the bias of these features, if there is one."""
    offs_f = feature + gl.arange(0, 64, layout=gl.SliceLayout(1, acc.type.layout))
    bias_values = gl.load(bias + offs_f, mask=(offs_f < features) & (has_bias > 0), other=0.0)
    return acc + bias_values.to(gl.float32)[:, None]


@gluon.jit
def to_output_dtype(acc, dtype: gl.constexpr, GATED: gl.constexpr):
    if GATED:
        return pack_columns(acc, dtype)
    else:
        return acc.to(dtype)


@gluon.jit
def apply_gate(value, dtype: gl.constexpr, GATED: gl.constexpr):
    """What ``to_output_dtype`` has made of ``[64, n]``; if GATED, ``[32, n]``, for which nothing moves."""
    if GATED:
        n: gl.constexpr = 2 * value.shape[1]
        pairs = gl.permute(gl.reshape(value, [4, 2, 8, n // 2]), [0, 2, 3, 1])
        gate_pairs, up_pairs = gl.split(pairs)
        low, high = split_pairs(gate(gate_pairs, up_pairs, dtype), dtype)
        return gl.reshape(gl.join(low, high), [32, n])
    else:
        return value


@gluon.jit
def store_tile(y_desc, buffer, value, row, feature):
    """``value [features, rows]`` to ``y [rows, features]``; TMA drops what y has not."""
    thread_barrier()  # all warps are done with what was there
    buffer.permute((1, 0)).store(value)
    fence_async_shared()
    thread_barrier()
    BOX_ROWS: gl.constexpr = y_desc.block_type.shape[0]
    NUM_BOXES: gl.constexpr = buffer.shape[0] // BOX_ROWS
    boxes = buffer._reinterpret(buffer.dtype, [NUM_BOXES, BOX_ROWS, buffer.shape[1]], y_desc.layout)
    for box in gl.static_range(NUM_BOXES):
        tma.async_copy_shared_to_global(y_desc, [row + box * BOX_ROWS, feature], boxes.index(box))


@gluon.jit
def store_partial(out, acc, row_offset, row, feature, rows, features):
    """Sums ``[features, rows]`` to ``out [.., features]``, ``row_offset`` rows after its begin."""
    ACC_LAYOUT: gl.constexpr = acc.type.layout
    offs_f = gl.arange(0, 64, layout=gl.SliceLayout(1, ACC_LAYOUT))
    offs_r = gl.arange(0, acc.shape[1], layout=gl.SliceLayout(0, ACC_LAYOUT))
    mask = (offs_r < rows - row)[None, :] & (offs_f < features - feature)[:, None]
    out_ptr = out + (row_offset + row).to(gl.int64) * features + feature
    gl.store(out_ptr + (offs_r[None, :] * features + offs_f[:, None]), acc, mask=mask)


@gluon.jit
def consumer(
    args, w_smem,
    WARP_GROUP: gl.constexpr, BLOCK_M: gl.constexpr, GATED: gl.constexpr, SPLIT_K: gl.constexpr,
):  # fmt: skip
    """A warp group: the ``WARP_GROUP``-th 64 rows of the tile's weights, which are in ``w_smem``."""
    y_desc, bias, out, x0, x1, ready, free = args[:7]
    row, feature, rows, features, split_idx, num_k_tiles, has_bias = args[7:]
    NUM_STAGES: gl.constexpr = x0.shape[0]
    ACC0_M: gl.constexpr = x0.shape[1]
    ACC1_M: gl.constexpr = x1.shape[1]
    TWO_ACCS: gl.constexpr = BLOCK_M > ACC0_M
    ACC0_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ACC0_M, 16])
    ACC1_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ACC1_M, 16])
    dtype: gl.constexpr = x0.dtype
    acc0 = gl.zeros([64, ACC0_M], gl.float32, ACC0_LAYOUT)
    acc1 = row  # nothing
    if TWO_ACCS:
        acc1 = gl.zeros([64, ACC1_M], gl.float32, ACC1_LAYOUT)
    acc0, acc1 = multiply(acc0, acc1, x0, x1, w_smem, ready, 0, True, TWO_ACCS)
    for i in range(1, num_k_tiles):
        acc0, acc1 = multiply(acc0, acc1, x0, x1, w_smem, ready, i, False, TWO_ACCS)
        mbarrier.arrive(free.index((i - 1) % NUM_STAGES), count=1)
    group_features: gl.constexpr = 32 if GATED else 64
    feature += group_features * WARP_GROUP
    if TWO_ACCS:
        acc0, acc1 = warpgroup_mma_wait(0, deps=(acc0, acc1))
    else:
        acc0 = warpgroup_mma_wait(0, deps=(acc0,))
    if not GATED and not SPLIT_K:
        acc0 = add_bias(acc0, bias, has_bias, feature, features)
        if TWO_ACCS:
            acc1 = add_bias(acc1, bias, has_bias, feature, features)
    if SPLIT_K:
        store_partial(out, acc0, split_idx * rows, row, feature, rows, features)
        if TWO_ACCS:
            store_partial(out, acc1, split_idx * rows, row + ACC0_M, feature, rows, features)
    else:
        # By way of this warp group's weights: nobody else reads them, and nothing is on its way there.
        out0 = to_output_dtype(acc0, dtype, GATED)
        if TWO_ACCS:
            out1 = to_output_dtype(acc1, dtype, GATED)
        buffer = w_smem._reinterpret(dtype, [1, ACC0_M, group_features], y_desc.layout).index(0)
        store_tile(y_desc, buffer, apply_gate(out0, dtype, GATED), row, feature)
        if TWO_ACCS:
            BUFFER1_IDX: gl.constexpr = ACC0_M // ACC1_M
            buffer1 = w_smem._reinterpret(
                dtype, [BUFFER1_IDX + 1, ACC1_M, group_features], y_desc.layout
            ).index(BUFFER1_IDX)
            if row + ACC0_M < rows:
                store_tile(y_desc, buffer1, apply_gate(out1, dtype, GATED), row + ACC0_M, feature)
        tma.store_wait(0)  # shared memory is read until then


@gluon.jit(
    do_not_specialize=("rows", "features", "num_row_tiles", "k_tiles", "num_splits", "has_bias")
)
def small_batch_kernel(
    x_desc,  # [rows, depth] in boxes of [64, 64]
    x_desc_16,  # the same in boxes of [16, 64]
    w_desc,  # [features, depth] in boxes of [64, 64]; GATED: [width / 8, 2, 8, depth], [4, 2, 8, 64]
    y_desc,  # [rows, width] in boxes of [rows of a piece, 32 if GATED else 64]; not with SPLIT_K
    bias,  # [features], if biased; neither with GATED nor with SPLIT_K
    out,  # float32 [num_splits, rows, features]; only with SPLIT_K
    rows,
    features,
    num_row_tiles,  # tiles of rows; those of the same weights are neighbours
    k_tiles,  # of the depth, as many as splits at least
    num_splits,  # 1 unless SPLIT_K
    has_bias,  # 0 or 1
    NUM_WARP_GROUPS: gl.constexpr,
    BLOCK_M: gl.constexpr,
    ACC0_M: gl.constexpr,  # of these at once, the rest in a second product
    NUM_STAGES: gl.constexpr,
    GATED: gl.constexpr,
    SPLIT_K: gl.constexpr,
):
    """Program (tile of weights, share of the depth, tile of rows)."""
    launch_dependents()
    pid = gl.program_id(0)
    tile_features: gl.constexpr = 32 * NUM_WARP_GROUPS if GATED else 64 * NUM_WARP_GROUPS
    row = pid % num_row_tiles * BLOCK_M
    split_idx, feature = (
        pid // num_row_tiles % num_splits,
        pid // num_row_tiles // num_splits * tile_features,
    )
    valid_rows = gl.minimum(rows - row, BLOCK_M)
    first_k_tile = split_idx * k_tiles // num_splits
    num_k_tiles = (split_idx + 1) * k_tiles // num_splits - first_k_tile
    SMEM_LAYOUT: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    MBAR_LAYOUT: gl.constexpr = mbarrier.MBarrierLayout()
    dtype: gl.constexpr = x_desc.dtype
    x0 = gl.allocate_shared_memory(dtype, [NUM_STAGES, ACC0_M, _BLOCK_K], SMEM_LAYOUT)
    x1 = x0
    if BLOCK_M > ACC0_M:
        x1 = gl.allocate_shared_memory(dtype, [NUM_STAGES, BLOCK_M - ACC0_M, _BLOCK_K], SMEM_LAYOUT)
    w0 = gl.allocate_shared_memory(dtype, [NUM_STAGES, 64, _BLOCK_K], SMEM_LAYOUT)
    w1, w2 = w0, w0
    if NUM_WARP_GROUPS > 1:
        w1 = gl.allocate_shared_memory(dtype, [NUM_STAGES, 64, _BLOCK_K], SMEM_LAYOUT)
    if NUM_WARP_GROUPS > 2:
        w2 = gl.allocate_shared_memory(dtype, [NUM_STAGES, 64, _BLOCK_K], SMEM_LAYOUT)
    ready = gl.allocate_shared_memory(gl.int64, [NUM_STAGES, 1], MBAR_LAYOUT)
    free = gl.allocate_shared_memory(gl.int64, [NUM_STAGES, 1], MBAR_LAYOUT)
    for s in gl.static_range(NUM_STAGES):
        mbarrier.init(ready.index(s), count=1 + BLOCK_M // 64)  # weights, and each 64 rows of x
        mbarrier.init(free.index(s), count=NUM_WARP_GROUPS)
    fence_async_shared()
    thread_barrier()
    producer_args = (
        x_desc, x_desc_16, w_desc, x0, x1, w0, w1, w2, ready, free, row, valid_rows, feature, first_k_tile, num_k_tiles,
    )  # fmt: skip
    consumer_args = (
        y_desc, bias, out, x0, x1, ready, free, row, feature, rows, features, split_idx, num_k_tiles, has_bias,
    )  # fmt: skip
    if NUM_WARP_GROUPS == 1:
        gl.warp_specialize(
            [
                (consumer, (consumer_args, w0, 0, BLOCK_M, GATED, SPLIT_K)),
                (producer, (producer_args, BLOCK_M, NUM_WARP_GROUPS, GATED)),
            ],
            [1],
            [24],
        )
    elif NUM_WARP_GROUPS == 2:
        gl.warp_specialize(
            [
                (consumer, (consumer_args, w0, 0, BLOCK_M, GATED, SPLIT_K)),
                (consumer, (consumer_args, w1, 1, BLOCK_M, GATED, SPLIT_K)),
                (producer, (producer_args, BLOCK_M, NUM_WARP_GROUPS, GATED)),
            ],
            [4, 1],
            [240, 24],
        )
    else:
        gl.warp_specialize(
            [
                (consumer, (consumer_args, w0, 0, BLOCK_M, GATED, SPLIT_K)),
                (consumer, (consumer_args, w1, 1, BLOCK_M, GATED, SPLIT_K)),
                (consumer, (consumer_args, w2, 2, BLOCK_M, GATED, SPLIT_K)),
                (producer, (producer_args, BLOCK_M, NUM_WARP_GROUPS, GATED)),
            ],
            [4, 4, 1],
            [160, 160, 24],
        )
