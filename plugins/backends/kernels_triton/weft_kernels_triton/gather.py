"""The ranks' columns side by side in one kernel: every rank pushes its own to all others.

What the programs of a rank have in common with those of ``weft_kernels_triton.reduce`` is the memory
that they write to and the flags behind it; a program here serves several chunks, and has one flag for
all of them, so that it never waits before everything is on its way.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft_kernels_triton.overlap import await_results, start_next
from weft_kernels_triton.reduce import announce, await_peer, flags_of, place_of

__all__ = ("BLOCK", "all_gather", "gather_kernel")

BLOCK = 8192
"""Elements of a chunk, which is a row or a part of one."""


@triton.jit
def gather_kernel(
    x,  # [rows, n], rows x_stride elements apart
    y,  # [rows, RANKS * n]
    places,  # int64 [RANKS]; see ``weft_kernels_triton.reduce``
    counts,  # int32 [STEP]
    rows,
    n,
    x_stride,
    room,
    rank,
    RANKS: tl.constexpr,
    STEP: tl.constexpr,  # which program has a chunk must not depend on their number
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Program (chunks p, p + STEP, ...)."""
    start_next(EARLY)
    program = tl.program_id(0)
    KIND: tl.constexpr = x.dtype.element_ty
    SIZE: tl.constexpr = KIND.primitive_bitwidth // 8
    wide = tl.cdiv(n, BLOCK)
    await_results(EARLY)
    turn = tl.load(counts + program) + 1
    half = (turn & 1).to(tl.int64) * RANKS
    for chunk in range(program, rows * wide, STEP):
        row = (chunk // wide).to(tl.int64)
        at = chunk % wide * BLOCK + tl.arange(0, BLOCK)
        inside = at < n
        value = tl.load(x + row * x_stride + at, mask=inside)
        for peer in tl.static_range(RANKS):
            if peer != rank:
                theirs = place_of(places, peer, KIND) + (half + rank) * room
                tl.store(theirs + row * n + at, value, mask=inside)
        tl.store(y + (row * RANKS + rank) * n + at, value, mask=inside)
    announce(places, room, program, turn, rank, SIZE, RANKS)
    flags = flags_of(places, rank, room, program, SIZE, RANKS)
    parts = place_of(places, rank, KIND) + half * room
    for peer in tl.static_range(RANKS):
        if peer != rank:
            come = await_peer(flags, peer, turn)
            for chunk in range(program, rows * wide, STEP):
                row = (chunk // wide).to(tl.int64)
                at = chunk % wide * BLOCK + tl.arange(0, BLOCK)
                inside = (at < n) & come
                found = parts + peer * room + row * n + at
                value = tl.load(found, mask=inside, cache_modifier=".cg")
                tl.store(y + (row * RANKS + peer) * n + at, value, mask=inside)
    tl.store(counts + program, turn)


def all_gather(
    x: Tensor, places: Tensor, counts: Tensor, rank: int, limit: int, *, early: bool
) -> Tensor:
    """The operation ``all_gather`` of ``weft.layers.kernels``."""
    (rows, n), ranks, step = x.shape, places.numel(), counts.numel()
    y = torch.empty(rows, ranks * n, dtype=x.dtype, device=x.device)
    programs = min(step, rows * triton.cdiv(n, BLOCK))
    gather_kernel[(programs,)](
        x, y, places, counts, rows, n, x.stride(0), limit // x.element_size(), rank,
        RANKS=ranks, STEP=step, BLOCK=BLOCK, EARLY=early, num_warps=8, launch_pdl=early,
    )  # fmt: skip
    return y
