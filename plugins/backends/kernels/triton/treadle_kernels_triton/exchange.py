"""What the kernels between ranks have in common: every rank writes its part to all others, unasked.

Data announces itself: a place is zero until a number has come, and a zero is sent as minus zero. A flag
behind the data would have to wait until all of it is there, which is a third of what a sum of 64 rows
takes (``benchmarks/collectives.py``). TensorRT-LLM's all-reduces work so, after L. Lamport, "Concurrent
Reading and Writing", 1977.

A program serves a unit, which has a place in each of three thirds of a rank's memory and takes turns
with them. In a turn it writes to one third of all others, reads from its own, and clears the third before,
which it read in the last turn. Nobody writes there before the turn after the next, that is, before he has
seen the next one, which follows what was cleared: by the border of two kernels, or by the fence of
``took_turn`` in one that takes several.

All programs of a kernel should fit on the device at once, so they take turns instead of being many. Where
they do not, those that run wait only for their like on other ranks, which have started too if programs start
in their order, as they do, though nobody promises it.

A rank's memory (``places``, the address of each rank's) is 3 thirds of RANKS parts of ``room`` elements.
``counts`` int32 [units] is which third each unit wrote to last. ``rank`` is a constant: what every program
decides by it would cost registers.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ("REGISTERS", "exchange", "next_third", "receive", "send", "sendable", "took_turn")

REGISTERS = 64
"""Of a thread at most where programs are many: four of 256 threads fit on a multiprocessor."""


@triton.jit
def place_of(places, peer, KIND: tl.constexpr):
    """The memory of a rank as a pointer to KIND. Its pages are aligned, which lets threads move 16
    bytes at once."""
    return tl.multiple_of(tl.load(places + peer).to(tl.pointer_type(KIND), bitcast=True), 16)


@triton.jit
def part_of(third, rank, room, RANKS: tl.constexpr):
    """Where a rank's part of a third begins."""
    return (third * RANKS + rank).to(tl.int64) * room


@triton.jit
def next_third(third):
    """Not a number of turns: those of a day may be more than an int32 holds."""
    return (third + 1) % 3


@triton.jit
def sendable(value):
    """``value`` with minus zeros for zeros, as whole numbers of its size."""
    WIDTH: tl.constexpr = value.dtype.primitive_bitwidth
    KIND: tl.constexpr = tl.int16 if WIDTH == 16 else tl.int32
    MINUS: tl.constexpr = -(1 << (WIDTH - 1))
    bits = value.to(KIND, bitcast=True)
    return tl.where(bits == 0, MINUS, bits).to(KIND)


@triton.jit
def send(bits, at, inside, third, places, room, rank: tl.constexpr, RANKS: tl.constexpr):
    """Write what is ``sendable`` to all other ranks, to place ``at`` of this rank's part, and clear there
    what came from them in the turn before."""
    KIND: tl.constexpr = bits.dtype
    own, before = place_of(places, rank, KIND), (third + 2) % 3
    for peer in tl.static_range(RANKS):
        if peer != rank:
            theirs = place_of(places, peer, KIND) + part_of(third, rank, room, RANKS)
            tl.store(theirs + at, bits, mask=inside)
    for peer in tl.static_range(RANKS):
        if peer != rank:
            tl.store(own + part_of(before, peer, room, RANKS) + at, tl.zeros_like(bits))


@triton.jit
def receive(
    peer, at, inside, third, places, room, rank: tl.constexpr,
    KIND: tl.constexpr, RANKS: tl.constexpr,
):  # fmt: skip
    """What a rank has sent, whole numbers of KIND, once all of it is there."""
    found = place_of(places, rank, KIND) + part_of(third, peer, room, RANKS) + at
    bits = tl.load(found, mask=inside, other=1, volatile=True)
    while tl.min((bits != 0).to(tl.int32), axis=0) == 0:
        bits = tl.load(found, mask=inside, other=1, volatile=True)
    return bits


@triton.jit
def took_turn(counts, unit, third, TURNS: tl.constexpr):
    """To be called after ``send`` and before ``receive``. If a kernel has several TURNS, what was cleared
    is so for all ranks before anything of the next turn is sent."""
    if TURNS:
        tl.debug_barrier()  # what all threads have cleared
        tl.atomic_xchg(counts + unit, third, sem="acq_rel", scope="sys")
    else:
        tl.store(counts + unit, third)


@triton.jit
def exchange(
    value, at, inside, unit, third, places, counts, room, rank: tl.constexpr,
    RANKS: tl.constexpr, TURNS: tl.constexpr,
):  # fmt: skip
    """The sum over the ranks of a unit's ``value``, float32, alike on all of them."""
    bits = sendable(value)
    send(bits, at, inside, third, places, room, rank, RANKS)
    took_turn(counts, unit, third, TURNS)
    total = tl.zeros(value.shape, tl.float32)
    for peer in tl.static_range(RANKS):  # in the order of ranks: all get the same sum
        part = bits
        if peer != rank:
            part = receive(peer, at, inside, third, places, room, rank, bits.dtype, RANKS)
        total += tl.where(inside, part.to(value.dtype, bitcast=True).to(tl.float32), 0.0)
    return total
