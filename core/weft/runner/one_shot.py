"""All-reduce of small messages in one kernel, over memory that GPUs of one host share.

A decode step all-reduces a few hundred kilobytes twice a layer: NCCL's latency, not its bandwidth,
is what that costs. Here every rank writes its part into memory that the others have mapped, waits
for them, and sums all parts itself: torch's symmetric memory and ``symm_mem::one_shot_all_reduce_copy``
(torch 2.11 to 2.13). It can be captured in CUDA graphs. NVLink multicast is never used.
"""

from __future__ import annotations

import logging
import socket
import zlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from weft.api.models import Collective
from weft.config import forbid_multicast

__all__ = ("LIMIT", "OneShot", "one_shot")

log = logging.getLogger("weft.runner")

LIMIT = 256 << 10
"""Bytes up to which one kernel is taken to beat NCCL: the traffic grows with the square of the
ranks. ``benchmarks/collectives.py`` measures where they cross."""
ALIGNMENT = 16
DTYPES = (torch.bfloat16, torch.float32)
"""What torch's kernel adds."""


class OneShot:
    """The sum over the ranks of a group for what ``fits``. Every rank must call it alike.

    ``buffer`` is symmetric memory of ``uint8``; the operation waits for all ranks before it returns
    it to the next call, so that one buffer is enough.
    """

    def __init__(self, buffer: Tensor, group: str) -> None:
        self._buffer = buffer
        self._views = {dtype: buffer.view(dtype) for dtype in DTYPES}
        self._group = group
        self._sum: Callable[..., Tensor] = torch.ops.symm_mem.one_shot_all_reduce_copy

    def fits(self, x: Tensor) -> bool:
        """The same on every rank: it depends on type, size and layout only, and addresses of
        whole tensors are aligned."""
        size = x.numel() * x.element_size()
        return (
            x.dtype in DTYPES
            and 0 < size <= self._buffer.numel()
            and size % ALIGNMENT == 0
            and x.is_contiguous()
            and x.storage_offset() * x.element_size() % ALIGNMENT == 0
        )

    def __call__(self, x: Tensor) -> Tensor:
        """A new tensor; ``x`` is kept."""
        place = self._views[x.dtype][: x.numel()].view(x.shape)
        return self._sum(place, x, "sum", self._group)


def one_shot(
    ranks: Collective, device: torch.device, group: Any, limit: int = LIMIT
) -> OneShot | None:
    """Set it up on every rank of ``group`` (a process group), or on none.

    ``limit`` is in bytes. ``ranks`` is how the ranks agree; its ``smallest`` must not need what is made here. Whatever fails,
    one line in the log says why, and NCCL does the work.
    """
    try:
        reason = _obstacle(device)
    except Exception as error:  # a private part of torch may fail in any way
        reason = f"{type(error).__name__}: {error}"
    host = zlib.crc32(socket.gethostname().encode())
    fine, first, last = ranks.smallest([int(reason is None), host, -host])
    if not fine or first != -last:
        _without(ranks, reason or ("the ranks are on several hosts" if fine else "of another rank"))
        return None
    made = None
    try:
        made = _make(ranks, device, group, limit)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
    if not ranks.smallest([int(made is not None)])[0]:
        _without(ranks, reason or "of another rank")
        return None
    if ranks.rank == 0:
        log.info("all-reduce: one kernel up to %d KiB, NCCL beyond", limit >> 10)
    return made


def _without(ranks: Collective, reason: str) -> None:
    if ranks.rank == 0:
        log.info("all-reduce: NCCL for every size (no shared memory between GPUs: %s)", reason)


def _obstacle(device: torch.device) -> str | None:
    """What this rank lacks, before anything that all ranks must do together."""
    if device.type != "cuda":
        return f"the device is {device.type}"
    if torch.version.hip is not None:
        return "not tried on ROCm"
    import torch.distributed._symmetric_memory as shared

    missing = [name for name in ("empty", "rendezvous") if not hasattr(shared, name)]
    if missing or not hasattr(torch.ops.symm_mem, "one_shot_all_reduce_copy"):
        return f"torch {torch.__version__} does not have it"
    return None


def _make(ranks: Collective, device: torch.device, group: Any, limit: int) -> OneShot:
    """Raises whatever torch raises, and ``RuntimeError`` if a sum is wrong."""
    import torch.distributed._symmetric_memory as shared

    forbid_multicast()  # a rendezvous would make multicast objects, used or not
    buffer = shared.empty(limit, dtype=torch.uint8, device=device)
    shared.rendezvous(buffer, group.group_name)
    made = OneShot(buffer, group.group_name)
    total = ranks.size * (ranks.size + 1) / 2
    for dtype in DTYPES:
        for size in (ALIGNMENT, limit // 2, limit):
            count = size // dtype.itemsize
            x = torch.full((count,), ranks.rank + 1, dtype=dtype, device=device)
            if not made.fits(x) or not bool((made(x) == total).all()):
                raise RuntimeError(f"a sum of {count} {dtype} over {ranks.size} ranks is wrong")
    return made
