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
from treadle_triton_kit.launch import launch
from treadle_triton_kit.pdl import launch_dependents, wait_for_previous_kernel

__all__ = ("all_gather", "gather_kernel")


@triton.jit
def gather_kernel(
    x,  # [rows, n], rows x_stride elements apart
    y,  # [rows, WORLD_SIZE * n]
    buffer_ptrs,  # int64 [WORLD_SIZE]
    buffer_indices,  # int32 [num_programs]
    rows,
    n,
    x_stride,
    elements_per_rank,
    rank: tl.constexpr,
    WORLD_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,  # elements of a chunk, which is a row or a part of one
    SEVERAL_ROUNDS: tl.constexpr,  # there are more chunks than programs
    USE_PDL: tl.constexpr,
):
    """A program sends every ``num_programs``-th chunk."""
    launch_dependents(USE_PDL)
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    offs_block = tl.arange(0, BLOCK_SIZE)
    slot, chunks_per_row = program * BLOCK_SIZE + offs_block, tl.cdiv(n, BLOCK_SIZE)
    dtype: tl.constexpr = x.dtype.element_ty
    wait_for_previous_kernel(USE_PDL)
    buffer_index = tl.load(buffer_indices + program)
    for chunk in range(program, rows * chunks_per_row, num_programs):
        buffer_index = next_buffer(buffer_index)
        row = (chunk // chunks_per_row).to(tl.int64)
        cols = chunk % chunks_per_row * BLOCK_SIZE + offs_block
        mask = cols < n
        out_row = y + row * WORLD_SIZE * n + cols
        bits = encode_zero(tl.load(x + row * x_stride + cols, mask=mask, other=0.0))
        send(bits, slot, mask, buffer_index, buffer_ptrs, elements_per_rank, rank, WORLD_SIZE)
        finish_round(buffer_indices, program, buffer_index, SEVERAL_ROUNDS)
        tl.store(out_row + rank * n, bits.to(dtype, bitcast=True), mask=mask)
        for peer in tl.static_range(WORLD_SIZE):
            if peer != rank:
                peer_bits = receive(
                    peer,
                    slot,
                    mask,
                    buffer_index,
                    buffer_ptrs,
                    elements_per_rank,
                    rank,
                    bits.dtype,
                    WORLD_SIZE,
                )
                tl.store(out_row + peer * n, peer_bits.to(dtype, bitcast=True), mask=mask)


def all_gather(
    x: Tensor,
    buffer_ptrs: Tensor,
    buffer_indices: Tensor,
    rank: int,
    max_bytes: int,
    *,
    use_pdl: bool,
    compile_only: bool = False,
) -> Tensor:
    """``all_gather`` of ``treadle_layers_kit.kernel_ops``; ``max_bytes``: bytes that the programs have together.

    What is returned is not initialized if the kernel is only compiled.
    """
    (rows, n), world_size, num_programs, itemsize = (
        x.shape,
        buffer_ptrs.numel(),
        buffer_indices.numel(),
        x.element_size(),
    )
    y = torch.empty(rows, world_size * n, dtype=x.dtype, device=x.device)
    block_size = max_bytes // num_programs // itemsize
    num_chunks = rows * triton.cdiv(n, block_size)
    launch(
        gather_kernel, (min(num_programs, num_chunks),),
        x, y, buffer_ptrs, buffer_indices, rows, n, x.stride(0), max_bytes // itemsize,
        rank=rank, WORLD_SIZE=world_size, BLOCK_SIZE=block_size, SEVERAL_ROUNDS=num_chunks > num_programs, USE_PDL=use_pdl,
        num_warps=4, maxnreg=REGISTERS, launch_pdl=use_pdl, compile_only=compile_only,
    )  # fmt: skip
    return y
