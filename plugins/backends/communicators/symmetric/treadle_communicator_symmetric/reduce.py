"""Sums over the ranks of one host in one kernel (see ``lamport``).

A rank pushes its part once; torch's kernel reads the parts of the others, which takes a round trip.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from treadle_communicator_symmetric.lamport import REGISTERS, lamport_all_reduce, next_buffer
from treadle_triton_kit.launch import launch
from treadle_triton_kit.pdl import launch_dependents, wait_for_previous_kernel

__all__ = (
    "BLOCK_BYTES",
    "all_reduce",
    "all_reduce_add_rms_norm",
    "all_reduce_kernel",
    "sum_norm_kernel",
)

BLOCK_BYTES = 4096
"""Bytes that a program sums in a round. With 8 and 16 KiB a sum of 8 KiB takes 8 and 13 % longer, one of
2 MiB the same time."""
SMALL_BATCH_ROWS = 264
"""Rows up to which each has twice the threads, two for each multiprocessor of an H200: 226 of 4096 take
9.3 us instead of 10.0, 512 would take 19.3 instead of 17.3."""


@triton.jit
def all_reduce_kernel(
    x,  # [numel], contiguous
    out,  # like x
    buffer_ptrs,  # int64 [WORLD_SIZE]
    buffer_indices,  # int32 [num_programs]
    numel,
    elements_per_rank,
    rank: tl.constexpr,
    WORLD_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,  # elements of a chunk
    SEVERAL_ROUNDS: tl.constexpr,  # there are more chunks than programs
    USE_PDL: tl.constexpr,
):
    """A program sums every ``num_programs``-th chunk."""
    launch_dependents(USE_PDL)
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    offs_block, block_size_i64 = tl.arange(0, BLOCK_SIZE), tl.full((), BLOCK_SIZE, tl.int64)
    slot = program * BLOCK_SIZE + offs_block
    wait_for_previous_kernel(USE_PDL)
    buffer_index = tl.load(buffer_indices + program)
    for chunk in range(program, tl.cdiv(numel, BLOCK_SIZE), num_programs):
        buffer_index = next_buffer(buffer_index)
        offs = chunk * block_size_i64 + offs_block
        mask = offs < numel
        value = tl.load(x + offs, mask=mask, other=0.0)
        acc = lamport_all_reduce(
            value,
            slot,
            mask,
            program,
            buffer_index,
            buffer_ptrs,
            buffer_indices,
            elements_per_rank,
            rank,
            WORLD_SIZE,
            SEVERAL_ROUNDS,
        )
        tl.store(out + offs, acc.to(out.dtype.element_ty), mask=mask)


@triton.jit
def sum_norm_kernel(
    x,  # [rows, HIDDEN_SIZE], contiguous
    residual,  # like x; replaced by the sum of x over the ranks + residual
    weight,  # [HIDDEN_SIZE]
    out,  # like x
    buffer_ptrs,  # int64 [WORLD_SIZE]
    buffer_indices,  # int32 [num_programs]
    rows,
    elements_per_rank,
    eps,
    offset,
    rank: tl.constexpr,
    WORLD_SIZE: tl.constexpr,
    HIDDEN_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,  # the power of two that holds HIDDEN_SIZE
    SEVERAL_ROUNDS: tl.constexpr,  # there are more rows than programs
    USE_PDL: tl.constexpr,
):
    """A program serves every ``num_programs``-th row. It rounds where an all-reduce and a norm would."""
    launch_dependents(USE_PDL)
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    cols, hidden_size_i64 = tl.arange(0, BLOCK_SIZE), tl.full((), HIDDEN_SIZE, tl.int64)
    mask, slot = cols < HIDDEN_SIZE, program * BLOCK_SIZE + cols
    gain = tl.load(weight + cols, mask=mask, other=0.0).to(tl.float32) + offset
    dtype: tl.constexpr = x.dtype.element_ty
    wait_for_previous_kernel(USE_PDL)
    buffer_index = tl.load(buffer_indices + program)
    for row in range(program, rows, num_programs):
        buffer_index = next_buffer(buffer_index)
        offs = row * hidden_size_i64 + cols
        value = tl.load(x + offs, mask=mask, other=0.0)
        residual_value = tl.load(residual + offs, mask=mask, other=0.0)
        acc = lamport_all_reduce(
            value,
            slot,
            mask,
            program,
            buffer_index,
            buffer_ptrs,
            buffer_indices,
            elements_per_rank,
            rank,
            WORLD_SIZE,
            SEVERAL_ROUNDS,
        )
        acc = (acc.to(dtype).to(tl.float32) + residual_value.to(tl.float32)).to(dtype)
        tl.store(residual + offs, acc, mask=mask)
        acc = acc.to(tl.float32)
        scale = tl.rsqrt(tl.sum(acc * acc, axis=0) / HIDDEN_SIZE + eps)
        tl.store(out + offs, (acc * scale * gain).to(dtype), mask=mask)


def _registers(world_size: int) -> int | None:
    """More ranks need more registers; their sums are small (``max_custom_bytes``), so programs are few."""
    return REGISTERS if world_size == 2 else None


def all_reduce(
    x: Tensor,
    buffer_ptrs: Tensor,
    buffer_indices: Tensor,
    rank: int,
    *,
    use_pdl: bool,
    compile_only: bool = False,
) -> Tensor:
    """Return the sum of ``x`` over the ranks; ``x`` is contiguous, bfloat16 or float32.

    What is returned is not initialized if the kernel is only compiled.
    """
    out, num_programs, world_size = torch.empty_like(x), buffer_indices.numel(), buffer_ptrs.numel()
    block_size = BLOCK_BYTES // x.element_size()
    num_chunks = triton.cdiv(x.numel(), block_size)
    launch(
        all_reduce_kernel, (min(num_chunks, num_programs),),
        x, out, buffer_ptrs, buffer_indices, x.numel(), num_programs * block_size,
        rank=rank, WORLD_SIZE=world_size, BLOCK_SIZE=block_size, SEVERAL_ROUNDS=num_chunks > num_programs, USE_PDL=use_pdl,
        num_warps=4, maxnreg=_registers(world_size), launch_pdl=use_pdl, compile_only=compile_only,
    )  # fmt: skip
    return out


def all_reduce_add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    offset: float,
    buffer_ptrs: Tensor,
    buffer_indices: Tensor,
    rank: int,
    *,
    use_pdl: bool,
    compile_only: bool = False,
) -> tuple[Tensor, Tensor]:
    """``all_reduce_add_rms_norm`` of ``treadle_layers_kit.kernel_ops``; overwrites ``residual``.

    The norm is not initialized if the kernel is only compiled.
    """
    out, hidden_size = torch.empty_like(x), x.shape[-1]
    num_programs, world_size = buffer_indices.numel(), buffer_ptrs.numel()
    block_size, num_rows = triton.next_power_of_2(hidden_size), x.numel() // hidden_size
    elements_per_warp = 256 if num_rows <= SMALL_BATCH_ROWS else 512
    launch(
        sum_norm_kernel, (min(num_rows, num_programs),),
        x, residual, weight, out, buffer_ptrs, buffer_indices, num_rows, num_programs * block_size, eps, offset,
        rank=rank, WORLD_SIZE=world_size, HIDDEN_SIZE=hidden_size, BLOCK_SIZE=block_size, SEVERAL_ROUNDS=num_rows > num_programs, USE_PDL=use_pdl,
        num_warps=min(16, max(1, block_size // elements_per_warp)), maxnreg=_registers(world_size), launch_pdl=use_pdl,
        compile_only=compile_only,
    )  # fmt: skip
    return out, residual
