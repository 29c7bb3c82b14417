"""The ranks' columns side by side in one kernel (see ``lamport``)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from treadle_communicator_symmetric.lamport import (
    REGISTERS,
    encode_zero,
    finish_round,
    next_buffer,
    receive,
    send,
)
from treadle_triton_kit.pdl import launch_dependents, wait_for_previous_kernel

__all__ = ("all_gather", "gather_kernel")


@triton.jit
def gather_kernel(
    x,  # [rows, n], rows x_stride elements apart
    y,  # [rows, RANKS * n]
    buffer_ptrs,  # int64 [RANKS]
    buffer_indices,  # int32 [num_programs]
    rows,
    n,
    x_stride,
    elements_per_rank,
    rank: tl.constexpr,
    RANKS: tl.constexpr,
    BLOCK: tl.constexpr,  # elements of a chunk, which is a row or a part of one
    SEVERAL_ROUNDS: tl.constexpr,  # there are more chunks than programs
    USE_PDL: tl.constexpr,
):
    """A program sends every ``num_programs``-th chunk."""
    launch_dependents(USE_PDL)
    program, step = tl.program_id(0), tl.num_programs(0)
    each = tl.arange(0, BLOCK)
    slot, wide = program * BLOCK + each, tl.cdiv(n, BLOCK)
    kind: tl.constexpr = x.dtype.element_ty
    wait_for_previous_kernel(USE_PDL)
    buffer_index = tl.load(buffer_indices + program)
    for chunk in range(program, rows * wide, step):
        buffer_index = next_buffer(buffer_index)
        row = (chunk // wide).to(tl.int64)
        at = chunk % wide * BLOCK + each
        inside = at < n
        own = y + row * RANKS * n + at
        bits = encode_zero(tl.load(x + row * x_stride + at, mask=inside, other=0.0))
        send(bits, slot, inside, buffer_index, buffer_ptrs, elements_per_rank, rank, RANKS)
        finish_round(buffer_indices, program, buffer_index, SEVERAL_ROUNDS)
        tl.store(own + rank * n, bits.to(kind, bitcast=True), mask=inside)
        for peer in tl.static_range(RANKS):
            if peer != rank:
                part = receive(
                    peer,
                    slot,
                    inside,
                    buffer_index,
                    buffer_ptrs,
                    elements_per_rank,
                    rank,
                    bits.dtype,
                    RANKS,
                )
                tl.store(own + peer * n, part.to(kind, bitcast=True), mask=inside)


def all_gather(
    x: Tensor, buffer_ptrs: Tensor, buffer_indices: Tensor, rank: int, limit: int, *, use_pdl: bool
) -> Tensor:
    """``all_gather`` of ``treadle_layers_kit.kernel_ops``; ``limit``: bytes that the programs have together."""
    (rows, n), ranks, num_programs, size = (
        x.shape,
        buffer_ptrs.numel(),
        buffer_indices.numel(),
        x.element_size(),
    )
    y = torch.empty(rows, ranks * n, dtype=x.dtype, device=x.device)
    block = limit // num_programs // size
    chunks = rows * triton.cdiv(n, block)
    gather_kernel[(min(num_programs, chunks),)](
        x, y, buffer_ptrs, buffer_indices, rows, n, x.stride(0), limit // size,
        rank=rank, RANKS=ranks, BLOCK=block, SEVERAL_ROUNDS=chunks > num_programs, USE_PDL=use_pdl,
        num_warps=4, maxnreg=REGISTERS, launch_pdl=use_pdl,
    )  # fmt: skip
    return y
