"""Sums over the ranks of one host in one kernel: every rank sends its part to all, each adds them up.

The parts travel once and nobody asks for them (torch's kernel reads those of the others, which is a way
there and back). A program serves a chunk: it writes it into every other rank's memory, then a flag
behind it, and waits for the flags of the others. What it writes to changes between two halves, and it
writes to one only after all ranks have been seen in the other, that is, after they have read the first.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft_kernels_triton.overlap import await_results, start_next

__all__ = ("CHUNK", "all_reduce", "all_reduce_kernel")

CHUNK = 4096
"""Bytes of one program, and of one count. The place of a chunk must not depend on what is summed. Of
8 and 16 KiB a sum of 8 KiB takes 8 and 13 % longer, and one of 2 MiB as long."""


@triton.jit
def all_reduce_kernel(
    x,  # [numel], contiguous
    out,  # like x
    places,  # int64 [RANKS]: addresses of 2 halves of RANKS parts of ``room`` elements, then flags
    counts,  # int32 [chunks]: how many sums each chunk has taken part in
    numel,
    room,
    rank,
    RANKS: tl.constexpr,
    BLOCK: tl.constexpr,  # elements of a chunk
    EARLY: tl.constexpr,
):
    """Program (chunk). All programs must fit on the device at once, which 4 MiB do."""
    start_next(EARLY)
    chunk = tl.program_id(0)
    at = chunk * BLOCK + tl.arange(0, BLOCK)
    inside = at < numel
    kind: tl.constexpr = x.dtype.element_ty
    SIZE: tl.constexpr = kind.primitive_bitwidth // 8
    flags_at = 2 * RANKS * room.to(tl.int64) * SIZE
    await_results(EARLY)
    turn = tl.load(counts + chunk) + 1
    half = (turn & 1).to(tl.int64) * RANKS
    value = tl.load(x + at, mask=inside, other=0.0)
    for peer in tl.static_range(RANKS):
        if peer != rank:
            theirs = tl.load(places + peer).to(tl.pointer_type(kind), bitcast=True)
            tl.store(theirs + (half + rank) * room + at, value, mask=inside)
    tl.debug_barrier()  # the flag is behind what all threads have written
    for peer in tl.static_range(RANKS):
        if peer != rank:
            theirs = (tl.load(places + peer) + flags_at).to(tl.pointer_type(tl.int32), bitcast=True)
            tl.atomic_xchg(theirs + chunk * RANKS + rank, turn, sem="release", scope="sys")
    place = tl.load(places + rank)
    flags = (place + flags_at).to(tl.pointer_type(tl.int32), bitcast=True) + chunk * RANKS
    parts = place.to(tl.pointer_type(kind), bitcast=True) + half * room
    total = tl.zeros([BLOCK], tl.float32)
    for peer in tl.static_range(RANKS):  # in the order of ranks: all get the same sum
        part = value
        if peer != rank:
            while tl.atomic_add(flags + peer, 0, sem="relaxed", scope="sys") - turn < 0:
                pass  # one that is ahead may be in its next turn already
            tl.atomic_add(flags + peer, 0, sem="acquire", scope="sys")
            part = tl.load(parts + peer * room + at, mask=inside, other=0.0, cache_modifier=".cg")
        total += part.to(tl.float32)
    tl.store(out + at, total.to(kind), mask=inside)
    tl.store(counts + chunk, turn)


def all_reduce(x: Tensor, places: Tensor, counts: Tensor, rank: int, *, early: bool) -> Tensor:
    """The operation ``all_reduce`` of ``weft.layers.kernels``."""
    out = torch.empty_like(x)
    block = CHUNK // x.element_size()
    all_reduce_kernel[(triton.cdiv(x.numel(), block),)](
        x, out, places, counts, x.numel(), counts.numel() * block, rank,
        RANKS=places.numel(), BLOCK=block, EARLY=early, num_warps=4, launch_pdl=early,
    )  # fmt: skip
    return out
