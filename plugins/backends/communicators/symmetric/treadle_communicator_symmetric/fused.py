"""Fused operations over symmetric memory: which arguments they support, and how much memory they need."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from treadle_communicator_symmetric.memory import SymmetricBuffer

__all__ = ("AllGatherLogits", "AllReduceRMSNorm", "DryRun", "gather_memory", "norm_memory")

Kernel = Callable[..., Any]
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
ALIGNMENT = 16
"""Rows of whole multiples of it are moved at full speed."""
NORM_BYTES, GATHER_BYTES = 4 << 20, 8 << 20
"""Bytes that the programs of a kernel have together: so many programs fit on an H200 at once."""
BLOCK_BYTES = 8192
"""Bytes that a program of a gather sends at once."""


@dataclass(slots=True)
class DryRun:
    """Whether kernels are only compiled, for all operations of a communicator."""

    enabled: bool = False


def norm_memory(size: int, dtype: torch.dtype, limit: int) -> tuple[int, int] | None:
    """Return ``(max_bytes, num_programs)`` for rows of ``size``; ``None`` if they are not supported.

    A program has the power of two that holds a row. ``limit``: bytes of the largest sum.
    """
    padded = (1 << (size - 1).bit_length()) * dtype.itemsize
    programs = min(limit, NORM_BYTES) // padded
    aligned = size * dtype.itemsize % ALIGNMENT == 0 and dtype in DTYPES
    return (programs * padded, programs) if programs and aligned else None


def gather_memory(size: int, dtype: torch.dtype) -> tuple[int, int] | None:
    """Return the same for a gather of rows of ``size``."""
    if size * dtype.itemsize % ALIGNMENT or dtype not in DTYPES:
        return None
    return GATHER_BYTES, GATHER_BYTES // BLOCK_BYTES


class AllReduceRMSNorm:
    """``all_reduce_add_rms_norm`` for rows of ``size``, together up to ``limit`` bytes."""

    def __init__(
        self,
        kernel: Kernel,
        buffer: SymmetricBuffer,
        size: int,
        dtype: torch.dtype,
        limit: int,
        dry_run: DryRun,
    ) -> None:
        self._kernel, self._buffer, self._dry_run = kernel, buffer, dry_run
        self._size, self._dtype = size, dtype
        self._max_elements = limit // dtype.itemsize

    def run(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float
    ) -> tuple[Tensor, Tensor] | None:
        supported = (
            0 < x.numel() <= self._max_elements
            and x.shape == residual.shape
            and x.shape[-1] == self._size
            and x.dtype == residual.dtype == self._dtype
            and x.is_contiguous()
            and residual.is_contiguous()
        )
        if not supported:
            return None
        buffer = self._buffer
        y, total = self._kernel(
            x, residual, weight, eps, offset,
            buffer.buffer_ptrs, buffer.buffer_indices, buffer.rank,
            compile_only=self._dry_run.enabled,
        )  # fmt: skip
        return (torch.zeros_like(y) if self._dry_run.enabled else y), total


class AllGatherLogits:
    """``all_gather`` for rows of ``size``."""

    def __init__(
        self,
        kernel: Kernel,
        buffer: SymmetricBuffer,
        size: int,
        dtype: torch.dtype,
        dry_run: DryRun,
    ) -> None:
        self._kernel, self._buffer, self._dry_run = kernel, buffer, dry_run
        self._size, self._dtype = size, dtype

    def run(self, x: Tensor) -> Tensor | None:
        supported = (
            x.dim() == 2
            and x.numel() > 0
            and x.shape[1] == self._size
            and x.dtype == self._dtype
            and x.stride(1) == 1
        )
        if not supported:
            return None
        buffer = self._buffer
        y: Tensor = self._kernel(
            x, buffer.buffer_ptrs, buffer.buffer_indices, buffer.rank, buffer.max_bytes,
            compile_only=self._dry_run.enabled,
        )  # fmt: skip
        return torch.zeros_like(y) if self._dry_run.enabled else y
