"""Sums over the ranks of one host in one kernel: every rank sends its part to all, each adds them up.

The parts travel once and nobody asks for them (torch's kernel reads those of the others, which is a way
there and back). A program serves a unit, a chunk or a row: it writes it into every other rank's memory,
then a flag behind it, and waits for the flags of the others. What it writes to changes between two
halves, and it writes to one only after all ranks have been seen in the other, that is, after they have
read the first. All programs of a kernel must fit on the device at once, or those that run would wait for
some that cannot start: those of 4 MiB do on an H200, with as few registers as two ranks take.

A rank's memory (``places``, the address of each rank's) is 2 halves of RANKS parts of ``room`` elements,
then the flags, int32 [units, RANKS]. ``counts`` int32 [units] is how many turns each unit has taken.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft_kernels_triton.norm import normalised
from weft_kernels_triton.overlap import await_results, start_next

__all__ = ("CHUNK", "all_reduce", "all_reduce_kernel", "all_reduce_norm", "sum_norm_kernel")

CHUNK = 4096
"""Bytes of one program, and of one count. The place of a chunk must not depend on what is summed. Of
8 and 16 KiB a sum of 8 KiB takes 8 and 13 % longer, and one of 2 MiB as long."""


@triton.jit
def place_of(places, peer, KIND: tl.constexpr):
    """The memory of a rank as a pointer to KIND. Its pages are aligned, which lets threads move 16
    bytes at once."""
    return tl.multiple_of(tl.load(places + peer).to(tl.pointer_type(KIND), bitcast=True), 16)


@triton.jit
def flags_of(places, peer, room, unit, SIZE: tl.constexpr, RANKS: tl.constexpr):
    """The flags of a unit in the memory of a rank; SIZE is that of an element."""
    at = tl.load(places + peer) + 2 * RANKS * room.to(tl.int64) * SIZE
    return at.to(tl.pointer_type(tl.int32), bitcast=True) + unit * RANKS


@triton.jit
def announce(places, room, unit, turn, rank, SIZE: tl.constexpr, RANKS: tl.constexpr):
    """Tell every other rank that this one has written all of the unit's turn."""
    tl.debug_barrier()  # the flag is behind what all threads have written
    for peer in tl.static_range(RANKS):
        if peer != rank:
            theirs = flags_of(places, peer, room, unit, SIZE, RANKS)
            tl.atomic_xchg(theirs + rank, turn, sem="release", scope="sys")


@triton.jit
def await_peer(flags, peer, turn):
    """Wait until a rank has announced the turn. Whether it has, which it has: what reads its part must
    use the answer, or the compiler drops the load that orders the two."""
    while tl.atomic_add(flags + peer, 0, sem="relaxed", scope="sys") - turn < 0:
        pass  # one that is ahead may be in its next turn already
    return tl.atomic_add(flags + peer, 0, sem="acquire", scope="sys") - turn >= 0


@triton.jit
def exchange(value, at, inside, unit, places, counts, room, rank, RANKS: tl.constexpr):
    """The sum over the ranks of a unit's ``value``, float32, alike on all of them.

    ``at`` is where its elements are in a part; they are the unit's, whatever is summed.
    """
    KIND: tl.constexpr = value.dtype
    SIZE: tl.constexpr = KIND.primitive_bitwidth // 8
    turn = tl.load(counts + unit) + 1
    half = (turn & 1).to(tl.int64) * RANKS
    for peer in tl.static_range(RANKS):
        if peer != rank:
            theirs = place_of(places, peer, KIND) + (half + rank) * room
            tl.store(theirs + at, value, mask=inside)
    announce(places, room, unit, turn, rank, SIZE, RANKS)
    flags = flags_of(places, rank, room, unit, SIZE, RANKS)
    parts = place_of(places, rank, KIND) + half * room
    total = tl.zeros(value.shape, tl.float32)
    for peer in tl.static_range(RANKS):  # in the order of ranks: all get the same sum
        part = value
        if peer != rank:
            come = await_peer(flags, peer, turn)
            found = parts + peer * room + at
            part = tl.load(found, mask=inside & come, other=0.0, cache_modifier=".cg")
        total += part.to(tl.float32)
    tl.store(counts + unit, turn)
    return total


@triton.jit
def all_reduce_kernel(
    x,  # [numel], contiguous
    out,  # like x
    places,  # int64 [RANKS]
    counts,  # int32 [chunks]
    numel,
    room,
    rank,
    RANKS: tl.constexpr,
    BLOCK: tl.constexpr,  # elements of a chunk
    EARLY: tl.constexpr,
):
    """Program (chunk)."""
    start_next(EARLY)
    chunk = tl.program_id(0)
    at = chunk * BLOCK + tl.arange(0, BLOCK)
    inside = at < numel
    await_results(EARLY)
    value = tl.load(x + at, mask=inside, other=0.0)
    total = exchange(value, at, inside, chunk, places, counts, room, rank, RANKS)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def sum_norm_kernel(
    x,  # [rows, SIZE], contiguous
    residual,  # like x; replaced by the sum of x over the ranks + residual
    weight,  # [SIZE]
    out,  # like x
    places,  # int64 [RANKS]
    counts,  # int32 [rows of a part]
    room,
    rank,
    eps,
    offset,
    RANKS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,  # the power of two that holds SIZE
    EARLY: tl.constexpr,
):
    """Program (row). Rounds where ``all_reduce_kernel`` and ``norm_kernel`` do, one after the other."""
    start_next(EARLY)
    row = tl.program_id(0)
    each = tl.arange(0, BLOCK)
    inside = each < SIZE
    gain = tl.load(weight + each, mask=inside, other=0.0).to(tl.float32) + offset
    at = row * SIZE + each
    await_results(EARLY)
    value = tl.load(x + at, mask=inside, other=0.0)
    before = tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
    kind: tl.constexpr = x.dtype.element_ty
    total = exchange(value, at, inside, row, places, counts, room, rank, RANKS)
    total = (total.to(kind).to(tl.float32) + before).to(kind)
    tl.store(residual + at, total, mask=inside)
    tl.store(out + at, normalised(total.to(tl.float32), gain, eps, SIZE).to(kind), mask=inside)


def all_reduce(x: Tensor, places: Tensor, counts: Tensor, rank: int, *, early: bool) -> Tensor:
    """The operation ``all_reduce`` of ``weft.layers.kernels``."""
    out = torch.empty_like(x)
    block = CHUNK // x.element_size()
    all_reduce_kernel[(triton.cdiv(x.numel(), block),)](
        x, out, places, counts, x.numel(), counts.numel() * block, rank,
        RANKS=places.numel(), BLOCK=block, EARLY=early, num_warps=4, launch_pdl=early,
    )  # fmt: skip
    return out


def all_reduce_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    offset: float,
    places: Tensor,
    counts: Tensor,
    rank: int,
    *,
    early: bool,
) -> tuple[Tensor, Tensor]:
    """The operation ``all_reduce_norm`` of ``weft.layers.kernels``; overwrites ``residual``."""
    out, size = torch.empty_like(x), x.shape[-1]
    block = triton.next_power_of_2(size)
    sum_norm_kernel[(x.numel() // size,)](
        x, residual, weight, out, places, counts, counts.numel() * size, rank, eps, offset,
        RANKS=places.numel(), SIZE=size, BLOCK=block, EARLY=early,
        num_warps=min(16, max(1, block // 512)), launch_pdl=early,
    )  # fmt: skip
    return out, residual
