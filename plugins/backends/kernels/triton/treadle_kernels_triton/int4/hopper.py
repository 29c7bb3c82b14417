"""The host's side of Hopper's kernel: what it serves, how its tensors are described, the launch."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from treadle_kernels_triton.int4.stream_k import schedule_stream_k
from treadle_kernels_triton.int4.tiles import HopperTile
from treadle_layers_kit.int4_layout import CHUNK

__all__ = ("BLOCK_N", "multiply", "smem_layouts", "supports")

BLOCK_N = 128
"""Of a tile."""


def supports(capability: tuple[int, int] | None, out_features: int, group_size: int) -> bool:
    """Whether the kernel can multiply such a weight, on any device of that capability."""
    return (
        capability is not None
        and capability[0] == 9
        and out_features % 64 == 0
        and group_size % CHUNK == 0
    )


def multiply(
    x: Tensor,
    codes: Tensor,
    scales_and_zeros: Tensor,
    group_size: int,
    tile: HopperTile,
    tile_counters: Tensor,
    num_sms: int,
) -> Tensor:
    """``[num_rows, in] -> [num_rows, out]``; ``group_size`` is a multiple of 128, ``out`` of 64.

    ``tile_counters``: at least four for each of ``num_sms``.
    """
    # Here, for Gluon is an experiment of Triton's: it may be gone, and that hurts nobody else.
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from treadle_kernels_triton.int4.hopper_kernel import REGISTERS, WARPS, int4_hopper_kernel

    row_stride = x.stride(0)
    if x.stride(1) != 1 or row_stride % 8 or row_stride < x.shape[1] or x.data_ptr() % 16:  # TMA's
        x = x.clone(memory_format=torch.contiguous_format)
    num_rows = len(x)
    num_chunks, out_features, _ = codes.shape
    m_tiles = -(-num_rows // tile.block_m)
    schedule = schedule_stream_k(m_tiles * -(-out_features // BLOCK_N), num_chunks, num_sms)
    out = torch.empty((num_rows, out_features), dtype=x.dtype, device=x.device)
    partials_size = schedule.num_programs * schedule.max_partials * BLOCK_N * tile.block_m
    partials = torch.empty(max(partials_size, 1), dtype=torch.float32, device=x.device)
    x_layout, codes_layout, scales_layout = smem_layouts()
    code_pairs = codes.view(torch.int32).view(-1, 32)  # 128 bytes, which TMA fetches at once
    int4_hopper_kernel[(schedule.num_programs,)](
        TensorDescriptor(x, list(x.shape), list(x.stride()), [tile.block_m, 64], x_layout),
        TensorDescriptor(code_pairs, list(code_pairs.shape), [32, 1], [BLOCK_N // 2, 32], codes_layout),
        TensorDescriptor(scales_and_zeros, list(scales_and_zeros.shape), [out_features, 1], [1, BLOCK_N], scales_layout),
        out, partials, tile_counters,
        num_rows, out_features, num_chunks, group_size // CHUNK,
        schedule.num_split_tiles, schedule.chunks_per_program, schedule.num_waves, m_tiles, max(schedule.max_partials, 1),
        BLOCK_M=tile.block_m, NUM_STAGES=tile.num_stages, num_warps=WARPS, maxnreg=REGISTERS,
    )  # fmt: skip
    return out


@cache
def smem_layouts() -> tuple[object, object, object]:
    """In shared memory, of boxes of activations, of pairs of words and of steps."""
    from triton.experimental.gluon import language as gl

    return (
        gl.NVMMASharedLayout(128, 16, 2),
        gl.NVMMASharedLayout(128, 32, 2),
        gl.NVMMASharedLayout(0, 32, 2),
    )
