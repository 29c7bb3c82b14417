"""Symmetric memory: buffers that all GPUs of one host can write to. NVLink multicast is never used."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from treadle.api.types import Communicator

__all__ = ("NUM_BUFFERS", "SymmetricBuffer", "allocate_symmetric", "allocated_bytes")

log = logging.getLogger("treadle.communicator_symmetric")

NUM_BUFFERS = 3
"""One is written to while the previous one is read and the one before that is cleared."""


@dataclass(frozen=True, slots=True)
class SymmetricBuffer:
    """A buffer of each rank that all ranks can write to, and how to reach it."""

    buffer_ptrs: Tensor
    """int64 ``[world_size]``: the address of each rank's buffer, a multiple of 16."""
    buffer_indices: Tensor
    """int32 ``[num_programs]``, this rank's own: which of three buffers a program wrote to last."""
    rank: int
    max_bytes: int
    """Bytes that one rank can send at once."""
    keepalive: object = None


def allocated_bytes(world_size: int, max_bytes: int) -> int:
    """Return how many bytes each rank allocates for a buffer."""
    return NUM_BUFFERS * world_size * max_bytes


def allocate_symmetric(
    base: Communicator, device: torch.device, group: Any, max_bytes: int, num_programs: int
) -> SymmetricBuffer | None:
    """Allocate a zeroed buffer of ``3 · world_size · max_bytes`` on every rank of ``group``.

    Collective: call it on every rank. Returns ``None`` on all ranks if it fails on one, whose log has the
    reason; the ranks agree after each step that can fail, so that none waits for one that gave up.
    """
    import torch.distributed._symmetric_memory as symmetric

    size = allocated_bytes(base.world_size, max_bytes)
    buffer: Tensor | None = None
    try:
        buffer = symmetric.empty(size, dtype=torch.uint8, device=device).zero_()
    except Exception as error:  # a private part of torch may fail in any way
        log.info("cannot allocate %d bytes: %s: %s", size, type(error).__name__, error)
    if not base.all_reduce_min([int(buffer is not None)])[0] or buffer is None:
        return None
    allocated = None
    try:
        handle = symmetric.rendezvous(buffer, group.group_name)
        pointers = torch.tensor(list(handle.buffer_ptrs), dtype=torch.int64, device=device)
        indices = torch.zeros(num_programs, dtype=torch.int32, device=device)
        torch.cuda.synchronize(device)
        allocated = SymmetricBuffer(pointers, indices, handle.rank, max_bytes, (buffer, handle))
    except Exception as error:
        log.info("GPUs do not share memory: %s: %s", type(error).__name__, error)
    # Nor may any rank write before all buffers are zeroed.
    return allocated if base.all_reduce_min([int(allocated is not None)])[0] else None
