"""Reusable buffers of the size of the logits."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ("Scratch", "spans")

CPU_ELEMENTS = 1 << 19  # 2 MB of float32: two such buffers stay in a core's cache
DEVICE_ELEMENTS = 1 << 26


def spans(values: Tensor, *, bounded: bool = False) -> list[slice]:
    """Split the rows of ``values`` (``[rows, vocab]``) into pieces for several passes.

    On a CPU a piece fits its cache. On a GPU all rows are one piece, as CUDA graphs need, unless
    ``bounded``: then a piece has the maximum size of a temporary copy.
    """
    rows, vocab_size = values.shape
    if not (bounded or values.is_cpu):
        return [slice(0, rows)]
    size = max(1, (CPU_ELEMENTS if values.is_cpu else DEVICE_ELEMENTS) // vocab_size)
    return [slice(first, min(rows, first + size)) for first in range(0, rows, size)]


class Scratch:
    """Uninitialised buffers by name; requesting a name again invalidates its earlier buffer.

    On a CPU the buffers are reused: the allocator returns large blocks to the system, and the page
    faults of new ones cost several times the arithmetic. On CUDA they are not: its allocator
    caches, and a CUDA graph must not share buffers with other work.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def get(self, name: str, like: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return a contiguous buffer of ``like``'s shape on its device."""
        if not like.is_cpu:
            return torch.empty(like.shape, dtype=dtype, device=like.device)
        size = like.numel() * dtype.itemsize
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < size:
            self._buffers[name] = buffer = torch.empty(size, dtype=torch.uint8)
        return buffer[:size].view(dtype).view(like.shape)
