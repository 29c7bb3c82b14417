"""Memory that GPUs of one host share, from torch's symmetric memory. NVLink multicast is never used."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor

from treadle.api.models import Collective, Shared
from treadle.config import forbid_multicast

__all__ = ("memory_size", "share")

log = logging.getLogger("treadle.runner")

THIRDS = 3
"""One is written to while the one before is read and the one before that is cleared."""


def memory_size(ranks: int, limit: int) -> int:
    """Bytes that each rank takes from its device."""
    return THIRDS * ranks * limit


def share(
    ranks: Collective, device: torch.device, group: Any, limit: int, units: int
) -> Shared | None:
    """``Collective.share`` over ``group``, a process group; every rank must call it alike.

    The ranks agree after each step that can fail, so that none waits for one that gave up. What
    failed, the log of that rank says.
    """
    forbid_multicast()  # a rendezvous would make multicast objects, used or not
    import torch.distributed._symmetric_memory as symmetric

    size = memory_size(ranks.size, limit)
    buffer: Tensor | None = None
    try:
        buffer = symmetric.empty(size, dtype=torch.uint8, device=device).zero_()
    except Exception as error:  # a private part of torch may fail in any way
        log.info("no memory of %d bytes to share: %s: %s", size, type(error).__name__, error)
    if not ranks.smallest([int(buffer is not None)])[0] or buffer is None:
        return None
    made = None
    try:
        handle = symmetric.rendezvous(buffer, group.group_name)
        places = torch.tensor(list(handle.buffer_ptrs), dtype=torch.int64, device=device)
        counts = torch.zeros(units, dtype=torch.int32, device=device)
        torch.cuda.synchronize(device)
        made = Shared(places, counts, handle.rank, limit, (buffer, handle))
    except Exception as error:
        log.info("GPUs do not share memory: %s: %s", type(error).__name__, error)
    # Nor may anybody write before all have their zeros.
    return made if ranks.smallest([int(made is not None)])[0] else None
