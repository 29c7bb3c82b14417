"""The ranks' columns side by side in one kernel: see ``treadle_kernels_triton.exchange``."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from treadle_kernels_triton.exchange import (
    REGISTERS,
    next_third,
    receive,
    send,
    sendable,
    took_turn,
)
from treadle_triton_kit.pdl import launch_dependents, wait_for_previous_kernel

__all__ = ("all_gather", "gather_kernel")


@triton.jit
def gather_kernel(
    x,  # [rows, n], rows x_stride elements apart
    y,  # [rows, RANKS * n]
    places,  # int64 [RANKS]; see ``treadle_kernels_triton.exchange``
    counts,  # int32 [units]
    rows,
    n,
    x_stride,
    room,
    rank: tl.constexpr,
    RANKS: tl.constexpr,
    BLOCK: tl.constexpr,  # elements of a chunk, which is a row or a part of one
    TURNS: tl.constexpr,  # there are more chunks than programs
    EARLY: tl.constexpr,
):
    """Program (unit): every so many chunks."""
    launch_dependents(EARLY)
    unit, step = tl.program_id(0), tl.num_programs(0)
    each = tl.arange(0, BLOCK)
    slot, wide = unit * BLOCK + each, tl.cdiv(n, BLOCK)
    kind: tl.constexpr = x.dtype.element_ty
    wait_for_previous_kernel(EARLY)
    third = tl.load(counts + unit)
    for chunk in range(unit, rows * wide, step):
        third = next_third(third)
        row = (chunk // wide).to(tl.int64)
        at = chunk % wide * BLOCK + each
        inside = at < n
        own = y + row * RANKS * n + at
        bits = sendable(tl.load(x + row * x_stride + at, mask=inside, other=0.0))
        send(bits, slot, inside, third, places, room, rank, RANKS)
        took_turn(counts, unit, third, TURNS)
        tl.store(own + rank * n, bits.to(kind, bitcast=True), mask=inside)
        for peer in tl.static_range(RANKS):
            if peer != rank:
                part = receive(peer, slot, inside, third, places, room, rank, bits.dtype, RANKS)
                tl.store(own + peer * n, part.to(kind, bitcast=True), mask=inside)


def all_gather(
    x: Tensor, places: Tensor, counts: Tensor, rank: int, limit: int, *, early: bool
) -> Tensor:
    """The operation ``all_gather`` of ``treadle.layers.kernels``."""
    (rows, n), ranks, units, size = x.shape, places.numel(), counts.numel(), x.element_size()
    y = torch.empty(rows, ranks * n, dtype=x.dtype, device=x.device)
    block = limit // units // size
    chunks = rows * triton.cdiv(n, block)
    gather_kernel[(min(units, chunks),)](
        x, y, places, counts, rows, n, x.stride(0), limit // size,
        rank=rank, RANKS=ranks, BLOCK=block, TURNS=chunks > units, EARLY=early,
        num_warps=4, maxnreg=REGISTERS, launch_pdl=early,
    )  # fmt: skip
    return y
