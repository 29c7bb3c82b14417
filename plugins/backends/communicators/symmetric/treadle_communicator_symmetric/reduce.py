"""Sums over the ranks of one host in one kernel (see ``lamport``).

A rank pushes its part once; torch's kernel reads the parts of the others, which takes a round trip.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from treadle_communicator_symmetric.lamport import REGISTERS, lamport_all_reduce, next_buffer
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
FEW_ROWS = 264
"""Rows up to which each has twice the threads, two for each multiprocessor of an H200: 226 of 4096 take
9.3 us instead of 10.0, 512 would take 19.3 instead of 17.3."""


@triton.jit
def all_reduce_kernel(
    x,  # [numel], contiguous
    out,  # like x
    buffer_ptrs,  # int64 [RANKS]
    buffer_indices,  # int32 [num_programs]
    numel,
    elements_per_rank,
    rank: tl.constexpr,
    RANKS: tl.constexpr,
    BLOCK: tl.constexpr,  # elements of a chunk
    SEVERAL_ROUNDS: tl.constexpr,  # there are more chunks than programs
    USE_PDL: tl.constexpr,
):
    """A program sums every ``num_programs``-th chunk."""
    launch_dependents(USE_PDL)
    program, step = tl.program_id(0), tl.num_programs(0)
    each, long_block = tl.arange(0, BLOCK), tl.full((), BLOCK, tl.int64)
    slot = program * BLOCK + each
    wait_for_previous_kernel(USE_PDL)
    buffer_index = tl.load(buffer_indices + program)
    for chunk in range(program, tl.cdiv(numel, BLOCK), step):
        buffer_index = next_buffer(buffer_index)
        at = chunk * long_block + each
        inside = at < numel
        value = tl.load(x + at, mask=inside, other=0.0)
        total = lamport_all_reduce(
            value,
            slot,
            inside,
            program,
            buffer_index,
            buffer_ptrs,
            buffer_indices,
            elements_per_rank,
            rank,
            RANKS,
            SEVERAL_ROUNDS,
        )
        tl.store(out + at, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def sum_norm_kernel(
    x,  # [rows, SIZE], contiguous
    residual,  # like x; replaced by the sum of x over the ranks + residual
    weight,  # [SIZE]
    out,  # like x
    buffer_ptrs,  # int64 [RANKS]
    buffer_indices,  # int32 [num_programs]
    rows,
    elements_per_rank,
    eps,
    offset,
    rank: tl.constexpr,
    RANKS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,  # the power of two that holds SIZE
    SEVERAL_ROUNDS: tl.constexpr,  # there are more rows than programs
    USE_PDL: tl.constexpr,
):
    """A program serves every ``num_programs``-th row. It rounds where an all-reduce and a norm would."""
    launch_dependents(USE_PDL)
    program, step = tl.program_id(0), tl.num_programs(0)
    each, long_size = tl.arange(0, BLOCK), tl.full((), SIZE, tl.int64)
    inside, slot = each < SIZE, program * BLOCK + each
    gain = tl.load(weight + each, mask=inside, other=0.0).to(tl.float32) + offset
    kind: tl.constexpr = x.dtype.element_ty
    wait_for_previous_kernel(USE_PDL)
    buffer_index = tl.load(buffer_indices + program)
    for row in range(program, rows, step):
        buffer_index = next_buffer(buffer_index)
        at = row * long_size + each
        value = tl.load(x + at, mask=inside, other=0.0)
        before = tl.load(residual + at, mask=inside, other=0.0)
        total = lamport_all_reduce(
            value,
            slot,
            inside,
            program,
            buffer_index,
            buffer_ptrs,
            buffer_indices,
            elements_per_rank,
            rank,
            RANKS,
            SEVERAL_ROUNDS,
        )
        total = (total.to(kind).to(tl.float32) + before.to(tl.float32)).to(kind)
        tl.store(residual + at, total, mask=inside)
        total = total.to(tl.float32)
        scale = tl.rsqrt(tl.sum(total * total, axis=0) / SIZE + eps)
        tl.store(out + at, (total * scale * gain).to(kind), mask=inside)


def _registers(ranks: int) -> int | None:
    """More ranks need more registers; their sums are small (``max_custom_bytes``), so programs are few."""
    return REGISTERS if ranks == 2 else None


def all_reduce(
    x: Tensor, buffer_ptrs: Tensor, buffer_indices: Tensor, rank: int, *, use_pdl: bool
) -> Tensor:
    """Return the sum of ``x`` over the ranks; ``x`` is contiguous, bfloat16 or float32."""
    out, num_programs, ranks = torch.empty_like(x), buffer_indices.numel(), buffer_ptrs.numel()
    block = BLOCK_BYTES // x.element_size()
    chunks = triton.cdiv(x.numel(), block)
    all_reduce_kernel[(min(chunks, num_programs),)](
        x, out, buffer_ptrs, buffer_indices, x.numel(), num_programs * block,
        rank=rank, RANKS=ranks, BLOCK=block, SEVERAL_ROUNDS=chunks > num_programs, USE_PDL=use_pdl,
        num_warps=4, maxnreg=_registers(ranks), launch_pdl=use_pdl,
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
) -> tuple[Tensor, Tensor]:
    """``all_reduce_add_rms_norm`` of ``treadle_layers_kit.kernel_ops``; overwrites ``residual``."""
    out, size = torch.empty_like(x), x.shape[-1]
    num_programs, ranks = buffer_indices.numel(), buffer_ptrs.numel()
    block, rows = triton.next_power_of_2(size), x.numel() // size
    wide = 256 if rows <= FEW_ROWS else 512
    sum_norm_kernel[(min(rows, num_programs),)](
        x, residual, weight, out, buffer_ptrs, buffer_indices, rows, num_programs * block, eps, offset,
        rank=rank, RANKS=ranks, SIZE=size, BLOCK=block, SEVERAL_ROUNDS=rows > num_programs, USE_PDL=use_pdl,
        num_warps=min(16, max(1, block // wide)), maxnreg=_registers(ranks), launch_pdl=use_pdl,
    )  # fmt: skip
    return out, residual
