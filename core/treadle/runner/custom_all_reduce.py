"""All-reduce in one kernel, over memory that GPUs of one host share: of small messages, or of all.

A decode step all-reduces a few hundred kilobytes twice a layer: NCCL's latency, not its bandwidth, is
what that costs, and two ranks have nothing to gain from NCCL's rings. Here every rank has the parts of all in memory that they share (torch's symmetric
memory), and sums them itself: with a plugin's kernel, the operation ``all_reduce`` of
``treadle.layers.kernels``, or with ``symm_mem::one_shot_all_reduce_copy`` (torch 2.11 to 2.13). It can be
captured in CUDA graphs. NVLink multicast is never used.
"""

from __future__ import annotations

import logging
import socket
import sys
import zlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from treadle.api.attention import KernelOffer
from treadle.api.models import Collective
from treadle.config import forbid_multicast

__all__ = ("OneShot", "most", "one_shot")

log = logging.getLogger("treadle.runner")

ALIGNMENT = 16
DTYPES = (torch.bfloat16, torch.float32)
"""What both kernels add."""
PIECE = 4096
"""Bytes that a plugin's kernel counts the sums of."""

Kernel = Callable[[Tensor, Tensor, Tensor, int], Tensor]


def most(ranks: int) -> int:
    """Bytes up to which one kernel beats NCCL; a plugin's between two ranks always does.

    ``benchmarks/collectives.py`` on H200: with two ranks torch's kernel and NCCL cross between 4 and
    8 MiB, with four a plugin's kernel and NCCL between 512 KiB and 1 MiB. It falls with the cube of the
    ranks between them; for more it is taken to go on so, not measured.
    """
    return (32 << 20) // ranks**3 // PIECE * PIECE


class OneShot:
    """The sum over the ranks of a group for what ``fits``. Every rank must call it alike.

    ``add`` returns the sum of up to ``limit`` bytes as a new tensor, ``name`` is whose kernel it is.
    """

    def __init__(self, add: Callable[[Tensor], Tensor], limit: int, name: str) -> None:
        self._add = add
        self.limit = limit
        self.name = name

    def fits(self, x: Tensor) -> bool:
        """The same on every rank: it depends on type, size and layout only, and addresses of
        whole tensors are aligned."""
        size = x.numel() * x.element_size()
        return (
            x.dtype in DTYPES
            and 0 < size <= self.limit
            and size % ALIGNMENT == 0
            and x.is_contiguous()
            and x.storage_offset() * x.element_size() % ALIGNMENT == 0
        )

    def __call__(self, x: Tensor) -> Tensor:
        """A new tensor; ``x`` is kept."""
        return self._add(x)


def one_shot(
    ranks: Collective,
    device: torch.device,
    group: Any,
    limit: int,
    offer: KernelOffer | None = None,
) -> OneShot | None:
    """Set it up on every rank of ``group`` (a process group), or on none.

    ``limit`` is in bytes, whole pieces, and what a plugin's kernel has of memory. ``ranks`` is how the
    ranks agree; its ``smallest`` must not need what is made here. ``offer`` is that of ``all_reduce``,
    the same on every rank. Whatever fails, one line in the log says why, and NCCL does the work.
    """
    kernel = None
    try:
        reason = _obstacle(device)
        if reason is None and offer is not None:
            kernel = offer.load()
    except Exception as error:  # a private part of torch may fail in any way
        reason = f"{type(error).__name__}: {error}"
    host = zlib.crc32(socket.gethostname().encode())
    fine, first, last = ranks.smallest([int(reason is None), host, -host])
    if not fine or first != -last:
        _without(ranks, reason or ("the ranks are on several hosts" if fine else "of another rank"))
        return None
    made = None
    try:
        name = "torch's kernel" if offer is None else f"kernel {offer.name}"
        made = _make(ranks, device, group, limit, name, kernel)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
    agreed = ranks.smallest([int(made is not None)])[0]
    if made is None or not agreed:
        _without(ranks, reason or "of another rank")
        return None
    if ranks.rank == 0:
        beyond = "" if made.limit > limit else f" up to {limit >> 10} KiB, NCCL beyond"
        log.info("all-reduce: %s%s", made.name, beyond)
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


def _make(
    ranks: Collective,
    device: torch.device,
    group: Any,
    limit: int,
    name: str,
    kernel: Kernel | None,
) -> OneShot:
    """Raises whatever torch or the kernel raises, and ``RuntimeError`` if a sum is wrong."""
    if kernel is None:
        made = OneShot(_by_torch(device, group, limit), limit, name)
    else:
        largest = sys.maxsize if ranks.size == 2 else limit
        made = OneShot(_by_kernel(ranks, limit, kernel), largest, name)
    sizes = [n for n in (ALIGNMENT, limit // 2, limit, 2 * limit + PIECE) if n <= made.limit]
    total = ranks.size * (ranks.size + 1) / 2
    sums = []
    for dtype in DTYPES:
        for size in sizes:
            x = torch.full((size // dtype.itemsize,), ranks.rank + 1, dtype=dtype, device=device)
            sums.append(made(x))
    for y in sums:  # after all of them: a rank that stopped before would be waited for
        if not bool((y == total).all()):
            raise RuntimeError(f"a sum of {len(y)} {y.dtype} over {ranks.size} ranks is wrong")
    return made


def _by_torch(device: torch.device, group: Any, limit: int) -> Callable[[Tensor], Tensor]:
    """It waits for all ranks before it returns the memory to the next call: one buffer is enough."""
    forbid_multicast()  # a rendezvous would make multicast objects, used or not
    import torch.distributed._symmetric_memory as shared

    buffer = shared.empty(limit, dtype=torch.uint8, device=device)
    shared.rendezvous(buffer, group.group_name)
    views = {dtype: buffer.view(dtype) for dtype in DTYPES}

    def add(x: Tensor) -> Tensor:
        place = views[x.dtype][: x.numel()].view(x.shape)
        y: Tensor = torch.ops.symm_mem.one_shot_all_reduce_copy(place, x, "sum", group.group_name)
        return y

    return add


def _by_kernel(ranks: Collective, limit: int, kernel: Kernel) -> Callable[[Tensor], Tensor]:
    memory = ranks.share(limit, limit // PIECE)
    if memory is None:
        raise RuntimeError("a rank cannot share its memory")

    def add(x: Tensor) -> Tensor:
        return kernel(x, memory.places, memory.counts, memory.rank)

    return add
