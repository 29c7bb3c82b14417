"""Lamport's protocol, which the kernels share: every rank writes its part to all others, unasked.

No separate flag signals arrival: an element is +0.0 until it has been written. Senders therefore send
zeros as -0.0. A flag behind the data would have to wait until all of it has arrived, which is a third of
the time of a sum of 64 rows (``benchmarks/collectives.py``). TensorRT-LLM's all-reduces work so, after
L. Lamport, "Concurrent Reading and Writing", 1977.

A rank's memory (``buffer_ptrs`` has the address of each rank's) is three buffers of RANKS parts of
``elements_per_rank`` elements. A program has its own place in each part, and uses the buffers in turn. In
a round it writes to one buffer of all other ranks, reads from its own, and clears the previous buffer,
which it read in the last round. Nobody writes there before the round after the next, that is, before
having read the next one, which was sent after the clearing: by the border between two kernels, or by the
fence of ``finish_round`` in a kernel of several rounds.

All programs of a kernel should fit on the device at once, so they take several rounds instead of being
many. If they do not fit, those that run wait only for the same programs on other ranks, which have started
too if programs start in order, as they do, although nothing guarantees it.

``buffer_indices`` int32 ``[num_programs]`` is which buffer each program wrote to last. ``rank`` is a
constant: a variable would cost registers.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = (
    "REGISTERS",
    "encode_zero",
    "finish_round",
    "lamport_all_reduce",
    "next_buffer",
    "receive",
    "send",
)

REGISTERS = 64
"""Of a thread at most, where programs are many: four of 256 threads then fit on a multiprocessor."""


@triton.jit
def peer_buffer(buffer_ptrs, peer, KIND: tl.constexpr):
    """Return the memory of a rank as a pointer to KIND. Its alignment lets threads move 16 bytes at
    once."""
    return tl.multiple_of(tl.load(buffer_ptrs + peer).to(tl.pointer_type(KIND), bitcast=True), 16)


@triton.jit
def part_offset(buffer_index, rank, elements_per_rank, RANKS: tl.constexpr):
    """Return where a rank's part of a buffer begins."""
    return (buffer_index * RANKS + rank).to(tl.int64) * elements_per_rank


@triton.jit
def next_buffer(buffer_index):
    """Return the next of three buffers. A count of rounds would overflow int32 within a day."""
    return (buffer_index + 1) % 3


@triton.jit
def encode_zero(value):
    """Return ``value`` with -0.0 for +0.0, as integers of its size."""
    WIDTH: tl.constexpr = value.dtype.primitive_bitwidth
    KIND: tl.constexpr = tl.int16 if WIDTH == 16 else tl.int32
    MINUS: tl.constexpr = -(1 << (WIDTH - 1))
    bits = value.to(KIND, bitcast=True)
    return tl.where(bits == 0, MINUS, bits).to(KIND)


@triton.jit
def send(
    bits,
    at,
    inside,
    buffer_index,
    buffer_ptrs,
    elements_per_rank,
    rank: tl.constexpr,
    RANKS: tl.constexpr,
):
    """Write encoded ``bits`` to all other ranks, at ``at`` of this rank's part, and clear what they
    sent in the previous round."""
    KIND: tl.constexpr = bits.dtype
    own, before = peer_buffer(buffer_ptrs, rank, KIND), (buffer_index + 2) % 3
    for peer in tl.static_range(RANKS):
        if peer != rank:
            theirs = peer_buffer(buffer_ptrs, peer, KIND) + part_offset(
                buffer_index, rank, elements_per_rank, RANKS
            )
            tl.store(theirs + at, bits, mask=inside)
    for peer in tl.static_range(RANKS):
        if peer != rank:
            tl.store(
                own + part_offset(before, peer, elements_per_rank, RANKS) + at, tl.zeros_like(bits)
            )


@triton.jit
def receive(
    peer, at, inside, buffer_index, buffer_ptrs, elements_per_rank, rank: tl.constexpr,
    KIND: tl.constexpr, RANKS: tl.constexpr,
):  # fmt: skip
    """Wait for the part of a rank, and return it as integers of KIND."""
    found = (
        peer_buffer(buffer_ptrs, rank, KIND)
        + part_offset(buffer_index, peer, elements_per_rank, RANKS)
        + at
    )
    bits = tl.load(found, mask=inside, other=1, volatile=True)
    while tl.min((bits != 0).to(tl.int32), axis=0) == 0:
        bits = tl.load(found, mask=inside, other=1, volatile=True)
    return bits


@triton.jit
def finish_round(buffer_indices, program, buffer_index, SEVERAL_ROUNDS: tl.constexpr):
    """Call this after ``send`` and before ``receive``. In a kernel of SEVERAL_ROUNDS, all ranks see what
    was cleared before anything of the next round is sent."""
    if SEVERAL_ROUNDS:
        tl.debug_barrier()  # until all threads have cleared
        tl.atomic_xchg(buffer_indices + program, buffer_index, sem="acq_rel", scope="sys")
    else:
        tl.store(buffer_indices + program, buffer_index)


@triton.jit
def lamport_all_reduce(
    value, at, inside, program, buffer_index, buffer_ptrs, buffer_indices, elements_per_rank, rank: tl.constexpr,
    RANKS: tl.constexpr, SEVERAL_ROUNDS: tl.constexpr,
):  # fmt: skip
    """Return the sum over the ranks of a program's ``value``: float32, the same on all ranks."""
    bits = encode_zero(value)
    send(bits, at, inside, buffer_index, buffer_ptrs, elements_per_rank, rank, RANKS)
    finish_round(buffer_indices, program, buffer_index, SEVERAL_ROUNDS)
    total = tl.zeros(value.shape, tl.float32)
    for peer in tl.static_range(RANKS):  # in rank order: all ranks get the same sum
        part = bits
        if peer != rank:
            part = receive(
                peer,
                at,
                inside,
                buffer_index,
                buffer_ptrs,
                elements_per_rank,
                rank,
                bits.dtype,
                RANKS,
            )
        total += tl.where(inside, part.to(value.dtype, bitcast=True).to(tl.float32), 0.0)
    return total
