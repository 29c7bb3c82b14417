"""Buffers of the size of the logits that a step overwrites."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ("Scratch", "spans")

CPU_ELEMENTS = 1 << 19  # 2 MB of float32: two such buffers stay in a core's cache
DEVICE_ELEMENTS = 1 << 26


def spans(values: Tensor, *, bounded: bool = False) -> list[slice]:
    """Rows of ``values`` (``[rows, vocab]``) in pieces that are worth passing over several times.

    A CPU gets as much as its cache holds. A device gets everything in one piece, which a graph
    needs, or, if ``bounded``, as much as a temporary copy should take.
    """
    rows, vocab_size = values.shape
    if not (bounded or values.is_cpu):
        return [slice(0, rows)]
    size = max(1, (CPU_ELEMENTS if values.is_cpu else DEVICE_ELEMENTS) // vocab_size)
    return [slice(first, min(rows, first + size)) for first in range(0, rows, size)]


class Scratch:
    """Uninitialised buffers by name; a buffer is lost when its name is taken again.

    On a CPU they are kept: the allocator gives large blocks back to the system, and faulting their
    pages in again costs several times the arithmetic. CUDA's caching allocator needs no help, and
    a captured graph must have buffers of its own.
    """

    def __init__(self) -> None:
        self._kept: dict[str, Tensor] = {}

    def take(self, name: str, like: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """A contiguous buffer of ``like``'s shape and device."""
        if not like.is_cpu:
            return torch.empty(like.shape, dtype=dtype, device=like.device)
        size = like.numel() * dtype.itemsize
        kept = self._kept.get(name)
        if kept is None or kept.numel() < size:
            self._kept[name] = kept = torch.empty(size, dtype=torch.uint8)
        return kept[:size].view(dtype).view(like.shape)
