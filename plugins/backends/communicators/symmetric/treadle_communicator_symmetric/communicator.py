"""The communicator: one kernel where it is supported and faster, the base communicator elsewhere."""

from __future__ import annotations

import logging
import socket
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from treadle.api.types import Communicator, FusedOp, SupportsDryRun
from treadle_communicator_symmetric.all_reduce import (
    BLOCK_BYTES,
    CustomAllReduce,
    max_custom_bytes,
    self_check,
    torch_all_reduce,
    triton_all_reduce,
)
from treadle_communicator_symmetric.fused import (
    AllGatherLogits,
    AllReduceRMSNorm,
    DryRun,
    gather_memory,
    norm_memory,
)
from treadle_communicator_symmetric.memory import (
    SymmetricBuffer,
    allocate_symmetric,
    allocated_bytes,
)
from treadle_triton_kit.support import is_triton_installed

__all__ = ("SymmetricCommunicator", "create")

log = logging.getLogger("treadle.communicator_symmetric")

Kernels = dict[str, Callable[..., Any]]
"""The Triton kernels by operation; empty without Triton."""


class SymmetricCommunicator:
    """See ``Communicator``, ``SupportsFusedOps`` and ``SupportsDryRun``. ``create`` makes it, on all ranks or on none."""

    name = "symmetric"

    def __init__(
        self, base: Communicator, device: torch.device, group: Any, kernels: Kernels
    ) -> None:
        self.rank, self.world_size = base.rank, base.world_size
        self.memory_bytes = base.memory_bytes
        self.custom: CustomAllReduce | None = None
        self._base, self._device, self._group, self._kernels = base, device, group, kernels
        self._dry_run = DryRun()

    def set_up(self, max_bytes: int) -> None:
        """Create the all-reduce, with ``max_bytes`` of memory for each rank. Collective.

        Raises whatever torch or a kernel raises, and ``RuntimeError`` if a sum is wrong.
        """
        if "all_reduce" in self._kernels:
            buffer = self._allocate(max_bytes, max_bytes // BLOCK_BYTES)
            if buffer is None:
                raise RuntimeError("a rank cannot share its memory")
            custom = triton_all_reduce(self._base, buffer, self._kernels["all_reduce"])
        else:
            custom = self._torch_all_reduce(max_bytes)
        self.custom = self_check(custom, self._base, self._device, max_bytes)

    def _torch_all_reduce(self, max_bytes: int) -> CustomAllReduce:
        """Return ``torch_all_reduce`` if it works on all ranks. Raises ``RuntimeError`` on all otherwise."""
        custom = None
        reason = "another rank cannot share its memory"
        try:
            custom = torch_all_reduce(self._device, self._group, max_bytes)
        except Exception as error:  # a private part of torch
            reason = f"{type(error).__name__}: {error}"
        if not self._base.all_reduce_min([int(custom is not None)])[0] or custom is None:
            raise RuntimeError(reason)
        return custom

    def all_reduce(self, x: Tensor) -> Tensor:
        if self.custom is None or not self.custom.supports(x):
            return self._base.all_reduce(x)
        if self._dry_run.enabled:
            self.custom.compile_for(x)
            return x
        return self.custom(x)

    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor:
        return self._base.all_gather(x, dim)

    def all_reduce_min(self, values: Sequence[int]) -> list[int]:
        return self._base.all_reduce_min(values)

    def set_dry_run(self, enabled: bool) -> None:
        """See ``SupportsDryRun``."""
        self._dry_run.enabled = enabled
        if isinstance(self._base, SupportsDryRun):
            self._base.set_dry_run(enabled)

    def create_fused_op(self, op: str, size: int, dtype: torch.dtype) -> FusedOp | None:
        """See ``SupportsFusedOps``: ``all_reduce_add_rms_norm`` and ``all_gather``, with Triton."""
        kernel = self._kernels.get(op)
        if kernel is None or self.custom is None:
            return None
        limit = self.custom.max_bytes
        norm = op == "all_reduce_add_rms_norm"
        memory = norm_memory(size, dtype, limit) if norm else gather_memory(size, dtype)
        buffer = self._allocate(*memory) if memory is not None else None
        if buffer is None:
            return None
        if norm:
            return AllReduceRMSNorm(kernel, buffer, size, dtype, limit, self._dry_run)
        return AllGatherLogits(kernel, buffer, size, dtype, self._dry_run)

    def _allocate(self, max_bytes: int, num_programs: int) -> SymmetricBuffer | None:
        buffer = allocate_symmetric(self._base, self._device, self._group, max_bytes, num_programs)
        if buffer is not None:
            self.memory_bytes += allocated_bytes(self.world_size, max_bytes)
        return buffer


def create(
    base: Communicator, device: torch.device, *, triton: bool = True
) -> SymmetricCommunicator:
    """Set the communicator up on every rank. Raises ``RuntimeError`` on all ranks if one cannot.

    The ranks agree after each step that can fail, so that none waits for one that gave up. Without
    ``triton``, or where it is not installed, torch's kernel makes the sums.
    """
    kernels: Kernels = {}
    limit = max_custom_bytes(base.world_size)
    if not limit:
        raise RuntimeError(f"NCCL is faster between {base.world_size} ranks")
    try:
        reason = _unsupported_reason()
        if reason is None and triton:
            kernels = _kernels(device)
    except Exception as error:  # a private part of torch, or a compiler, may fail in any way
        reason = f"{type(error).__name__}: {error}"
    host_hash = zlib.crc32(socket.gethostname().encode())
    setting = host_hash + len(kernels)
    supported, min_setting, negated_max = base.all_reduce_min(
        [int(reason is None), setting, -setting]
    )
    if not supported:
        raise RuntimeError(reason or "another rank cannot share its memory")
    if min_setting != -negated_max:
        raise RuntimeError("the ranks are on several hosts, or some have no Triton")
    communicator = SymmetricCommunicator(base, device, dist.group.WORLD, kernels)
    try:
        communicator.set_up(limit)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
    if not base.all_reduce_min([int(reason is None)])[0]:
        raise RuntimeError(reason or "another rank cannot share its memory")
    custom = communicator.custom
    if base.rank == 0 and custom is not None:
        suffix = "" if custom.max_bytes > limit else f" up to {limit >> 10} KiB, NCCL beyond"
        log.info("all-reduce: %s%s", custom.name, suffix)
    return communicator


def _unsupported_reason() -> str | None:
    """Return what this rank lacks, before anything that all ranks must do together."""
    if torch.version.hip is not None:
        return "not tried on ROCm"
    import torch.distributed._symmetric_memory as symmetric

    missing = [name for name in ("empty", "rendezvous") if not hasattr(symmetric, name)]
    if missing or not hasattr(torch.ops.symm_mem, "one_shot_all_reduce_copy"):
        return f"torch {torch.__version__} does not have symmetric memory"
    return None


def _kernels(device: torch.device) -> Kernels:
    capability = torch.cuda.get_device_capability(device)
    if not is_triton_installed() or capability < (8, 0):
        return {}
    from treadle_communicator_symmetric.gather import all_gather
    from treadle_communicator_symmetric.reduce import all_reduce, all_reduce_add_rms_norm

    operations = (all_reduce, all_reduce_add_rms_norm, all_gather)
    return {op.__name__: partial(op, use_pdl=capability >= (9, 0)) for op in operations}
