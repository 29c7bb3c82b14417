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
def peer_buffer(buffer_ptrs, peer, DTYPE: tl.constexpr):
    """Return the memory of a rank as a pointer to DTYPE. Its alignment lets threads move 16 bytes at
    once."""
    return tl.multiple_of(tl.load(buffer_ptrs + peer).to(tl.pointer_type(DTYPE), bitcast=True), 16)


@triton.jit
def part_offset(buffer_index, rank, elements_per_rank, WORLD_SIZE: tl.constexpr):
    """Return where a rank's part of a buffer begins."""
    return (buffer_index * WORLD_SIZE + rank).to(tl.int64) * elements_per_rank


@triton.jit
def next_buffer(buffer_index):
    """Return the next of three buffers. A count of rounds would overflow int32 within a day."""
    return (buffer_index + 1) % 3


@triton.jit
def encode_zero(value):
    """Return ``value`` with -0.0 for +0.0, as integers of its size."""
    NUM_BITS: tl.constexpr = value.dtype.primitive_bitwidth
    INT_DTYPE: tl.constexpr = tl.int16 if NUM_BITS == 16 else tl.int32
    NEGATIVE_ZERO: tl.constexpr = -(1 << (NUM_BITS - 1))
    bits = value.to(INT_DTYPE, bitcast=True)
    return tl.where(bits == 0, NEGATIVE_ZERO, bits).to(INT_DTYPE)


@triton.jit
def send(
    bits,
    offs,
    mask,
    buffer_index,
    buffer_ptrs,
    elements_per_rank,
    rank: tl.constexpr,
    WORLD_SIZE: tl.constexpr,
):
    """Write encoded ``bits`` to all other ranks, at ``offs`` of this rank's part, and clear what they
    sent in the previous round."""
    DTYPE: tl.constexpr = bits.dtype
    local_buffer, prev_buffer = peer_buffer(buffer_ptrs, rank, DTYPE), (buffer_index + 2) % 3
    for peer in tl.static_range(WORLD_SIZE):
        if peer != rank:
            peer_ptr = peer_buffer(buffer_ptrs, peer, DTYPE) + part_offset(
                buffer_index, rank, elements_per_rank, WORLD_SIZE
            )
            tl.store(peer_ptr + offs, bits, mask=mask)
    for peer in tl.static_range(WORLD_SIZE):
        if peer != rank:
            tl.store(
                local_buffer + part_offset(prev_buffer, peer, elements_per_rank, WORLD_SIZE) + offs,
                tl.zeros_like(bits),
            )


@triton.jit
def receive(
    peer, offs, mask, buffer_index, buffer_ptrs, elements_per_rank, rank: tl.constexpr,
    DTYPE: tl.constexpr, WORLD_SIZE: tl.constexpr,
):  # fmt: skip
    """Wait for the part of a rank, and return it as integers of DTYPE."""
    ptrs = (
        peer_buffer(buffer_ptrs, rank, DTYPE)
        + part_offset(buffer_index, peer, elements_per_rank, WORLD_SIZE)
        + offs
    )
    bits = tl.load(ptrs, mask=mask, other=1, volatile=True)
    while tl.min((bits != 0).to(tl.int32), axis=0) == 0:
        bits = tl.load(ptrs, mask=mask, other=1, volatile=True)
    return bits


@triton.jit
def finish_round(buffer_indices, program, buffer_index, SEVERAL_ROUNDS: tl.constexpr):
    """Store the index of the buffer, once all threads of the program have loaded the previous one. Call
    this after ``send`` and before ``receive``. In a kernel of SEVERAL_ROUNDS, all ranks see what was cleared
    before anything of the next round is sent."""
    # A warp that starts late would otherwise load what another has stored, and wait in the wrong buffer;
    # and all threads have cleared before one says so.
    tl.debug_barrier()
    if SEVERAL_ROUNDS:
        tl.atomic_xchg(buffer_indices + program, buffer_index, sem="acq_rel", scope="sys")
    else:
        tl.store(buffer_indices + program, buffer_index)


@triton.jit
def lamport_all_reduce(
    value, offs, mask, program, buffer_index, buffer_ptrs, buffer_indices, elements_per_rank, rank: tl.constexpr,
    WORLD_SIZE: tl.constexpr, SEVERAL_ROUNDS: tl.constexpr,
):  # fmt: skip
    """Return the sum over the ranks of a program's ``value``: float32, the same on all ranks."""
    bits = encode_zero(value)
    send(bits, offs, mask, buffer_index, buffer_ptrs, elements_per_rank, rank, WORLD_SIZE)
    finish_round(buffer_indices, program, buffer_index, SEVERAL_ROUNDS)
    acc = tl.zeros(value.shape, tl.float32)
    for peer in tl.static_range(WORLD_SIZE):  # in rank order: all ranks get the same sum
        peer_bits = bits
        if peer != rank:
            peer_bits = receive(
                peer,
                offs,
                mask,
                buffer_index,
                buffer_ptrs,
                elements_per_rank,
                rank,
                bits.dtype,
                WORLD_SIZE,
            )
        acc += tl.where(mask, peer_bits.to(value.dtype, bitcast=True).to(tl.float32), 0.0)
    return acc
