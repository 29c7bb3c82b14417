"""Buffers of the size of the logits that a step overwrites."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ("Scratch",)


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
