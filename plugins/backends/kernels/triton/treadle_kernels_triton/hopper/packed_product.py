"""The host's side of the kernel of packed weights: what it serves, how its tensors are described, the launch."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor

from treadle_kernels_triton.hopper.stream_k import schedule_stream_k
from treadle_kernels_triton.lookup import BASES, assembly, folded_power
from treadle_layers_kit.packed_layout import E2M1, PLACES, Levels

__all__ = (
    "BLOCKS",
    "BLOCK_N",
    "MAX_ROWS",
    "biased_levels",
    "choose_block_m",
    "multiply",
    "multiply_int4",
    "num_slots",
    "supports",
    "weight_format",
)

BLOCK_N = 128
"""Outputs of a tile."""
STAGE = 128
"""Inputs that are fetched at a time."""
SHARED_MEMORY = 222 * 1024
"""Of a multiprocessor, less what barriers and placeholders take."""
MAX_SLOTS = 10
BLOCKS = (32, 64, 128, 256)
"""Rows of tiles."""
MAX_ROWS = 2048
"""Beyond, the weight is unpacked and multiplied by the vendor's product."""
LARGE_WEIGHT_ELEMENTS = 1 << 25
"""Elements of a large weight: those of a feed-forward layer of an 8B model, not of its attention."""
KINDS = {torch.uint8: "exponent", torch.float8_e4m3fn: "fp8", torch.int32: "int4"}
"""Of scales that are not plain floats."""


def supports(capability: tuple[int, int] | None, shape: Mapping[str, int]) -> bool:
    """Whether the kernel can multiply a weight with these ``in_features``, ``out_features`` and ``group``, on any device of that
    capability."""
    group = shape["group"]
    return (
        capability is not None
        and capability[0] == 9
        and shape["in_features"] % 8 == 0  # rows of 16 bytes, which TMA fetches
        and shape["out_features"] % 64 == 0
        and (group in (16, 32, 64) or group % STAGE == 0)
    )


def choose_block_m(
    rows: int,
    in_features: int,
    out_features: int,
    levels: Levels,
    scale_type: torch.dtype | None,
) -> int | None:
    """Rows of a tile; ``None``: Triton's kernel, or unpack the weight.

    Measured on one H200 (triton 3.6) in graphs, over cold weights of Qwen3-8B's shapes, in the order 4096 x 6144, 4096 x
    4096, 4096 x 24576 and 12288 x 4096 (in x out). Microseconds of MXFP4, of ``int4_linear`` in groups of 128, and of cuBLAS
    in bfloat16 (the last of another host):

    * 32 rows: 14.0, 10.7, 31.6, 18.2; 12.4, 9.6, 26.9, 16.3; 17.6, 15.1, 57.0, 34.6;
    * 64: 16.2, 12.2, 36.6, 21.9; 14.6, 11.1, 32.9, 19.7; 17.9, 12.6, 56.3, 37.4;
    * 128: 21.4, 15.9, 47.9, 28.5; 19.1, 14.6, 44.1, 25.9; 19.3, 15.7, 59.4, 38.8;
    * 256: 28.7, 20.8, 80.9, 44.6, with tiles of 256 31.8, 24.6, 78.2, 45.0; 26.2, 18.9, 75.9, 43.1, with 256 30.9, 23.6,
      76.8, 45.3; 23.9, 18.5, 77.8, 47.4;
    * 1024 with 256: 81.4, 47.4, 275.7, 133.1; 79.0, 47.4, 289.9, 143.6; 71.5, 47.7, 275.9, 139.7;
    * 2048 with 256: 146, 97, 576, 276; 149, 99, 610, 306; 146, 95, 562, 285; unpacked first, MXFP4 takes 160, 105, 630, 308.

    Other formats differ by some per cent. Up to 16 rows Triton's kernels are faster, and up to 32 where bytes have no scales.
    A tile of 256 rows takes about 16/9 of the time of one of 128, once there are enough of them to fill the device:
    whichever pads less is taken. Beyond ``MAX_ROWS`` rows the card's power is the limit, and numbers made anew for each
    tile cost more of it: 8,192 rows of 4096 x 24576 took 2803 us in ``int4_linear``, 2635 unpacked first, without rest.
    """
    is_bytes, is_int4 = isinstance(levels, str), scale_type is torch.int32
    if not (32 if is_bytes and scale_type is None else 16) < rows <= MAX_ROWS:
        return None
    if rows <= 128:
        return next(block_m for block_m in BLOCKS if rows <= block_m)
    is_large = in_features * out_features >= LARGE_WEIGHT_ELEMENTS
    if rows <= 256:
        return 256 if is_large and not is_bytes and not is_int4 else 128
    if rows <= 512 and not is_large:
        return 128
    return 128 if 9 * -(-rows // 128) < 16 * -(-rows // 256) else 256


def num_slots(block_m: int, bits: int, step_bytes: int) -> int:
    """How many stages fit into shared memory; ``step_bytes``: of an output's scales and offsets in a stage."""
    size = 2 * block_m * STAGE + BLOCK_N * (STAGE * bits // 8 + step_bytes)
    return min(MAX_SLOTS, SHARED_MEMORY // size)


def weight_format(
    codes: Tensor,
    scales: Tensor | None,
    offsets: Tensor | None,
    factors: Tensor | None,
    levels: Levels,
    group_size: int,
    dtype: torch.dtype,
) -> Any:
    """What the kernel is compiled for, for activations of ``dtype``."""
    from treadle_kernels_triton.hopper.packed_fragments import WeightFormat

    # In float16 folded numbers are in range with scales of FP8 alone.
    kind = None if scales is None else scales.dtype
    is_in_range = dtype is torch.bfloat16 or kind is torch.float8_e4m3fn
    fold = levels == E2M1 and kind is not None and offsets is None and is_in_range
    return WeightFormat(
        asm=assembly(levels, dtype, fold),
        places=PLACES[isinstance(levels, str)],
        run=codes.shape[-1],
        group=STAGE if kind is None else group_size,
        scales="" if kind is None else KINDS.get(kind, "float"),
        offsets="" if offsets is None else "float",
        has_factors=factors is not None,
        power=folded_power(dtype) if fold else 0.0,
    )


def multiply(
    x: Tensor,
    codes: Tensor,
    scales: Tensor | None,
    offsets: Tensor | None,
    factors: Tensor | None,
    levels: Levels,
    group_size: int,
    block_m: int,
    tile_counters: Tensor,
    num_sms: int,
) -> Tensor:
    """``[num_rows, in] -> [num_rows, out]``, with tiles of ``block_m`` rows; no ``offsets`` without ``scales``.

    ``tile_counters``: at least four for each of ``num_sms``. Scales and offsets are rounded to the type of ``x``, and so is what
    becomes of a number with them.
    """
    # Here, for Gluon is an experiment of Triton's: it may be gone, and that hurts nobody else.
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from treadle_kernels_triton.hopper.packed_kernel import REGISTERS, WARPS, packed_hopper_kernel

    row_stride = x.stride(0)
    if x.stride(1) != 1 or row_stride % 8 or row_stride < x.shape[1] or x.data_ptr() % 16:  # TMA's
        x = x.clone(memory_format=torch.contiguous_format)
    num_rows, in_features = x.shape
    _, out_features, run = codes.shape
    m_tiles, num_stages = -(-num_rows // block_m), -(-in_features // STAGE)
    schedule = schedule_stream_k(m_tiles * -(-out_features // BLOCK_N), num_stages, num_sms)
    out = torch.empty((num_rows, out_features), dtype=x.dtype, device=x.device)
    partials_size = schedule.num_programs * schedule.max_partials * BLOCK_N * block_m
    partials = torch.empty(max(partials_size, 1), dtype=torch.float32, device=x.device)
    code_pairs = codes.view(torch.int32).view(-1, 32)  # 128 bytes, which TMA fetches at once
    format = weight_format(codes, scales, offsets, factors, levels, group_size, x.dtype)

    def describe(tensor: Tensor, box: list[int], swizzle: int) -> Any:
        layout = smem_layout(swizzle, 8 * tensor.itemsize)
        return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), box, layout)

    def describe_steps(steps: Tensor | None) -> Any:
        if steps is None:  # a placeholder
            return describe(x, [1, BLOCK_N], 0)
        return describe(
            steps.view(torch.uint8) if steps.itemsize == 1 else steps, [format.steps, BLOCK_N], 0
        )

    step_bytes = format.steps * sum(t.itemsize for t in (scales, offsets) if t is not None)
    packed_hopper_kernel[(schedule.num_programs,)](
        describe(x, [block_m, 64], 128),
        describe(code_pairs, [2 * run, 32], 128),
        describe_steps(scales), describe_steps(offsets),
        out if factors is None else factors, out, partials, tile_counters,
        num_rows, out_features, num_stages,
        schedule.num_split_tiles, schedule.chunks_per_program, schedule.num_waves, m_tiles, max(schedule.max_partials, 1),
        ASM=format.asm, PLACES=format.places, RUN=run, GROUP=format.group, SCALE_KIND=format.scales, OFFSET_KIND=format.offsets,
        HAS_FACTORS=format.has_factors, POWER=format.power, BLOCK_M=block_m, NUM_SLOTS=num_slots(block_m, 16 // format.places, step_bytes),
        num_warps=WARPS, maxnreg=REGISTERS,
    )  # fmt: skip
    return out


def multiply_int4(
    x: Tensor,
    codes: Tensor,
    scales_and_zeros: Tensor,
    group_size: int,
    block_m: int,
    tile_counters: Tensor,
    num_sms: int,
) -> Tensor:
    """The same of a weight of ``int4_linear``."""
    weight = codes, scales_and_zeros, None, None, biased_levels(x.dtype)
    return multiply(x, *weight, group_size, block_m, tile_counters, num_sms)


@cache
def biased_levels(dtype: torch.dtype) -> Levels:
    """What codes of ``int4_linear`` are before their zero is added."""
    return tuple(BASES[dtype] + code for code in range(16))


@cache
def smem_layout(swizzle: int, bits: int) -> object:
    """Of boxes in shared memory."""
    from triton.experimental.gluon import language as gl

    return gl.NVMMASharedLayout(swizzle, bits, 2)
