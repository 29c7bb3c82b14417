"""What the kernels between ranks have in common: every rank writes its part to all others, unasked.

Data announces itself: a place is zero until a number has come, and a zero is sent as minus zero. A flag
behind the data would have to wait until all of it is there, which is a third of what a sum of 64 rows
takes (``benchmarks/collectives.py``). TensorRT-LLM's all-reduces work so, after L. Lamport, "Concurrent
Reading and Writing", 1977.

A program serves a unit, which has a place in each of three thirds of a rank's memory. In turn ``t`` it
writes to third ``t mod 3`` of all others, reads from its own, and clears what it read in the turn before.
Nobody writes there before turn ``t + 2``, that is, before he has seen turn ``t + 1``, which follows what
was cleared: by the border of two kernels, or by the fence of ``next_turn`` in one that takes several.

All programs of a kernel must fit on the device at once, or those that run could wait for some that cannot
start. So they take turns instead of being many.

A rank's memory (``places``, the address of each rank's) is 3 thirds of RANKS parts of ``room`` elements.
``counts`` int32 [units] is how many turns each unit has taken. ``rank`` is a constant: what every program
decides by it would cost registers.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ("REGISTERS", "exchange", "next_turn", "receive", "send", "sendable")

REGISTERS = 64
"""Of a thread at most where programs are many: four of 256 threads fit on a multiprocessor."""


@triton.jit
def place_of(places, peer, KIND: tl.constexpr):
    """The memory of a rank as a pointer to KIND. Its pages are aligned, which lets threads move 16
    bytes at once."""
    return tl.multiple_of(tl.load(places + peer).to(tl.pointer_type(KIND), bitcast=True), 16)


@triton.jit
def part_of(turn, rank, room, RANKS: tl.constexpr):
    """Where a rank's part of a turn begins."""
    return (turn % 3 * RANKS + rank).to(tl.int64) * room


@triton.jit
def sendable(value):
    """``value`` with minus zeros for zeros, as whole numbers of its size."""
    WIDTH: tl.constexpr = value.dtype.primitive_bitwidth
    KIND: tl.constexpr = tl.int16 if WIDTH == 16 else tl.int32
    MINUS: tl.constexpr = -(1 << (WIDTH - 1))
    bits = value.to(KIND, bitcast=True)
    return tl.where(bits == 0, MINUS, bits).to(KIND)


@triton.jit
def send(bits, at, inside, turn, places, room, rank: tl.constexpr, RANKS: tl.constexpr):
    """Write what is ``sendable`` to all other ranks, to place ``at`` of this rank's part, and clear there
    what came from them in the turn before."""
    KIND: tl.constexpr = bits.dtype
    own = place_of(places, rank, KIND)
    for peer in tl.static_range(RANKS):
        if peer != rank:
            theirs = place_of(places, peer, KIND) + part_of(turn, rank, room, RANKS)
            tl.store(theirs + at, bits, mask=inside)
    for peer in tl.static_range(RANKS):
        if peer != rank:
            tl.store(own + part_of(turn + 2, peer, room, RANKS) + at, tl.zeros_like(bits))


@triton.jit
def receive(
    peer, at, inside, turn, places, room, rank: tl.constexpr,
    KIND: tl.constexpr, RANKS: tl.constexpr,
):  # fmt: skip
    """What a rank has sent, whole numbers of KIND, once all of it is there."""
    found = place_of(places, rank, KIND) + part_of(turn, peer, room, RANKS) + at
    bits = tl.load(found, mask=inside, other=1, volatile=True)
    while tl.min((bits != 0).to(tl.int32), axis=0) == 0:
        bits = tl.load(found, mask=inside, other=1, volatile=True)
    return bits


@triton.jit
def next_turn(counts, unit, turn, TURNS: tl.constexpr):
    """Count the turn, after its ``send`` and before its ``receive``. If a kernel has several TURNS, what
    was cleared is so for all ranks before anything of the next turn is sent."""
    if TURNS:
        tl.debug_barrier()  # what all threads have cleared
        tl.atomic_xchg(counts + unit, turn, sem="acq_rel", scope="sys")
    else:
        tl.store(counts + unit, turn)


@triton.jit
def exchange(
    value, at, inside, unit, turn, places, counts, room, rank: tl.constexpr,
    RANKS: tl.constexpr, TURNS: tl.constexpr,
):  # fmt: skip
    """The sum over the ranks of a unit's ``value``, float32, alike on all of them."""
    bits = sendable(value)
    send(bits, at, inside, turn, places, room, rank, RANKS)
    next_turn(counts, unit, turn, TURNS)
    total = tl.zeros(value.shape, tl.float32)
    for peer in tl.static_range(RANKS):  # in the order of ranks: all get the same sum
        part = bits
        if peer != rank:
            part = receive(peer, at, inside, turn, places, room, rank, bits.dtype, RANKS)
        total += tl.where(inside, part.to(value.dtype, bitcast=True).to(tl.float32), 0.0)
    return total
