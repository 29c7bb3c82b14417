"""Sums over the ranks of one host in one kernel: see ``treadle_kernels_triton.exchange``.

The parts travel once and nobody asks for them; torch's kernel reads those of the others, which is a way
there and back.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from treadle_kernels_triton.exchange import REGISTERS, exchange, next_third
from treadle_kernels_triton.norm import normalised
from treadle_triton_kit.pdl import launch_dependents, wait_for_previous_kernel

__all__ = ("CHUNK", "all_reduce", "all_reduce_add_rms_norm", "all_reduce_kernel", "sum_norm_kernel")

CHUNK = 4096
"""Bytes of a unit's turn. Of 8 and 16 KiB a sum of 8 KiB takes 8 and 13 % longer, and one of 2 MiB as
long."""
FEW = 264
"""Rows up to which each has twice the threads, two for each multiprocessor of an H200: 226 of 4096 take
9.3 us in place of 10.0, 512 then 19.3 in place of 17.3."""


@triton.jit
def all_reduce_kernel(
    x,  # [numel], contiguous
    out,  # like x
    places,  # int64 [RANKS]
    counts,  # int32 [units]
    numel,
    room,
    rank: tl.constexpr,
    RANKS: tl.constexpr,
    BLOCK: tl.constexpr,  # elements of a chunk
    TURNS: tl.constexpr,  # there are more chunks than programs
    EARLY: tl.constexpr,
):
    """Program (unit): every so many chunks."""
    launch_dependents(EARLY)
    unit, step = tl.program_id(0), tl.num_programs(0)
    each, long_block = tl.arange(0, BLOCK), tl.full((), BLOCK, tl.int64)
    slot = unit * BLOCK + each
    wait_for_previous_kernel(EARLY)
    third = tl.load(counts + unit)
    for chunk in range(unit, tl.cdiv(numel, BLOCK), step):
        third = next_third(third)
        at = chunk * long_block + each
        inside = at < numel
        value = tl.load(x + at, mask=inside, other=0.0)
        total = exchange(value, slot, inside, unit, third, places, counts, room, rank, RANKS, TURNS)
        tl.store(out + at, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def sum_norm_kernel(
    x,  # [rows, SIZE], contiguous
    residual,  # like x; replaced by the sum of x over the ranks + residual
    weight,  # [SIZE]
    out,  # like x
    places,  # int64 [RANKS]
    counts,  # int32 [units]
    rows,
    room,
    eps,
    offset,
    rank: tl.constexpr,
    RANKS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,  # the power of two that holds SIZE
    TURNS: tl.constexpr,  # there are more rows than programs
    EARLY: tl.constexpr,
):
    """Program (unit): every so many rows. Rounds where ``all_reduce_kernel`` and ``norm_kernel`` do, one
    after the other."""
    launch_dependents(EARLY)
    unit, step = tl.program_id(0), tl.num_programs(0)
    each, long_size = tl.arange(0, BLOCK), tl.full((), SIZE, tl.int64)
    inside, slot = each < SIZE, unit * BLOCK + each
    gain = tl.load(weight + each, mask=inside, other=0.0).to(tl.float32) + offset
    kind: tl.constexpr = x.dtype.element_ty
    wait_for_previous_kernel(EARLY)
    third = tl.load(counts + unit)
    for row in range(unit, rows, step):
        third = next_third(third)
        at = row * long_size + each
        value = tl.load(x + at, mask=inside, other=0.0)
        before = tl.load(residual + at, mask=inside, other=0.0)
        total = exchange(value, slot, inside, unit, third, places, counts, room, rank, RANKS, TURNS)
        total = (total.to(kind).to(tl.float32) + before.to(tl.float32)).to(kind)
        tl.store(residual + at, total, mask=inside)
        tl.store(out + at, normalised(total.to(tl.float32), gain, eps, SIZE).to(kind), mask=inside)


def _registers(ranks: int) -> int | None:
    """More ranks need more; their sums are small (``treadle.runner.custom_all_reduce.most``), so programs are few."""
    return REGISTERS if ranks == 2 else None


def all_reduce(x: Tensor, places: Tensor, counts: Tensor, rank: int, *, early: bool) -> Tensor:
    """The operation ``all_reduce`` of ``treadle.layers.kernels``."""
    out, units, ranks = torch.empty_like(x), counts.numel(), places.numel()
    block = CHUNK // x.element_size()
    chunks = triton.cdiv(x.numel(), block)
    all_reduce_kernel[(min(chunks, units),)](
        x, out, places, counts, x.numel(), units * block,
        rank=rank, RANKS=ranks, BLOCK=block, TURNS=chunks > units, EARLY=early,
        num_warps=4, maxnreg=_registers(ranks), launch_pdl=early,
    )  # fmt: skip
    return out


def all_reduce_add_rms_norm(
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
    """The operation ``all_reduce_add_rms_norm`` of ``treadle.layers.kernels``; overwrites ``residual``."""
    out, size = torch.empty_like(x), x.shape[-1]
    units, ranks = counts.numel(), places.numel()
    block, rows = triton.next_power_of_2(size), x.numel() // size
    wide = 256 if rows <= FEW else 512
    sum_norm_kernel[(min(rows, units),)](
        x, residual, weight, out, places, counts, rows, units * block, eps, offset,
        rank=rank, RANKS=ranks, SIZE=size, BLOCK=block, TURNS=rows > units, EARLY=early,
        num_warps=min(16, max(1, block // wide)), maxnreg=_registers(ranks), launch_pdl=early,
    )  # fmt: skip
    return out, residual
