"""The host's side of Hopper's kernel: what it serves, how its tensors are described, the launch."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from treadle_kernels_triton.int4.plan import schedule_stream_k
from treadle_kernels_triton.int4.tiles import HopperTile
from treadle_layers_kit.int4_layout import CHUNK

__all__ = ("OUTPUTS", "layouts", "multiply", "serves")

OUTPUTS = 128
"""Of a tile."""


def serves(capability: tuple[int, int] | None, outputs: int, group: int) -> bool:
    """Whether the kernel can multiply such a weight, on any device of that capability."""
    return (
        capability is not None and capability[0] == 9 and outputs % 64 == 0 and group % CHUNK == 0
    )


def multiply(
    x: Tensor,
    codes: Tensor,
    steps: Tensor,
    group: int,
    tile: HopperTile,
    tickets: Tensor,
    processors: int,
) -> Tensor:
    """``[rows, in] -> [rows, out]``; ``group`` is a multiple of 128, ``out`` of 64.

    ``tickets``: at least four for each of ``processors``.
    """
    # Here, for Gluon is an experiment of Triton's: it may be gone, and that hurts nobody else.
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from treadle_kernels_triton.int4.wide import REGISTERS, WARPS, wide_kernel

    apart = x.stride(0)
    if x.stride(1) != 1 or apart % 8 or apart < x.shape[1] or x.data_ptr() % 16:  # TMA's
        x = x.clone(memory_format=torch.contiguous_format)
    rows = len(x)
    chunks, width, _ = codes.shape
    down = -(-rows // tile.rows)
    made = schedule_stream_k(down * -(-width // OUTPUTS), chunks, processors)
    out = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    size = made.programs * made.max_partials * OUTPUTS * tile.rows
    parts = torch.empty(max(size, 1), dtype=torch.float32, device=x.device)
    of_inputs, of_codes, of_steps = layouts()
    pairs = codes.view(torch.int32).view(-1, 32)  # 128 bytes, which TMA fetches at once
    wide_kernel[(made.programs,)](
        TensorDescriptor(x, list(x.shape), list(x.stride()), [tile.rows, 64], of_inputs),
        TensorDescriptor(pairs, list(pairs.shape), [32, 1], [OUTPUTS // 2, 32], of_codes),
        TensorDescriptor(steps, list(steps.shape), [width, 1], [1, OUTPUTS], of_steps),
        out, parts, tickets,
        rows, width, chunks, group // CHUNK,
        made.num_split_tiles, made.chunks_per_program, made.num_waves, down, max(made.max_partials, 1),
        ROWS=tile.rows, STAGES=tile.stages, num_warps=WARPS, maxnreg=REGISTERS,
    )  # fmt: skip
    return out


@cache
def layouts() -> tuple[object, object, object]:
    """In shared memory, of boxes of activations, of pairs of words and of steps."""
    from triton.experimental.gluon import language as gl

    return (
        gl.NVMMASharedLayout(128, 16, 2),
        gl.NVMMASharedLayout(128, 32, 2),
        gl.NVMMASharedLayout(0, 32, 2),
    )
