"""The all-reduce of one kernel: of small messages, or of all.

A decode step all-reduces a few hundred kilobytes twice a layer: that costs NCCL's latency, not its
bandwidth, and two ranks gain nothing from NCCL's rings. Here every rank gets the parts of all in
symmetric memory and sums them itself: with a Triton kernel (``reduce``), or with
``symm_mem::one_shot_all_reduce_copy`` (torch 2.11 to 2.13). Both can be captured in CUDA graphs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from treadle.api.types import Communicator
from treadle_communicator_symmetric.memory import SymmetricBuffer

__all__ = (
    "BLOCK_BYTES",
    "CustomAllReduce",
    "max_custom_bytes",
    "self_check",
    "torch_all_reduce",
    "triton_all_reduce",
)

ALIGNMENT = 16
DTYPES = (torch.bfloat16, torch.float32)
"""What both kernels add."""
BLOCK_BYTES = 4096
"""Bytes that a program of the Triton kernel sums at once."""

Kernel = Callable[..., Tensor]


def max_custom_bytes(world_size: int) -> int:
    """Return up to how many bytes one kernel beats NCCL; between two ranks the Triton kernel always does.

    ``benchmarks/collectives.py`` on H200: with two ranks torch's kernel and NCCL cross between 4 and
    8 MiB, with four the Triton kernel and NCCL between 512 KiB and 1 MiB. It falls with the cube of the
    ranks between them; for more ranks that is extrapolated, not measured.
    """
    return (32 << 20) // world_size**3 // BLOCK_BYTES * BLOCK_BYTES


class CustomAllReduce:
    """The sum over the ranks of a group for what it ``supports``. Every rank must call it alike.

    ``add`` returns the sum of up to ``max_bytes`` as a new tensor, ``compile_for`` compiles and loads its
    kernel for a tensor; ``name`` is whose kernel it is.
    """

    def __init__(
        self,
        add: Callable[[Tensor], Tensor],
        max_bytes: int,
        name: str,
        compile_for: Callable[[Tensor], object] | None = None,
    ) -> None:
        self._add = add
        self._compile_for = compile_for
        self.max_bytes = max_bytes
        self.name = name

    def supports(self, x: Tensor) -> bool:
        """The same on every rank: it depends on type, size and layout only, and the addresses of
        whole tensors are aligned."""
        size = x.numel() * x.element_size()
        return (
            x.dtype in DTYPES
            and 0 < size <= self.max_bytes
            and size % ALIGNMENT == 0
            and x.is_contiguous()
            and x.storage_offset() * x.element_size() % ALIGNMENT == 0
        )

    def __call__(self, x: Tensor) -> Tensor:
        """Return a new tensor; ``x`` is kept."""
        return self._add(x)

    def compile_for(self, x: Tensor) -> None:
        """Compile and load what a sum of ``x`` launches, on this rank alone."""
        if self._compile_for is not None:
            self._compile_for(x)


def triton_all_reduce(
    base: Communicator, buffer: SymmetricBuffer, kernel: Kernel
) -> CustomAllReduce:
    """All-reduce with the Triton kernel."""

    def add(x: Tensor, **options: Any) -> Tensor:
        return kernel(x, buffer.buffer_ptrs, buffer.buffer_indices, buffer.rank, **options)

    max_bytes = sys.maxsize if base.world_size == 2 else buffer.max_bytes
    return CustomAllReduce(add, max_bytes, "a Triton kernel", partial(add, compile_only=True))


def torch_all_reduce(device: torch.device, group: Any, max_bytes: int) -> CustomAllReduce:
    """All-reduce with torch's kernel. It waits for all ranks before it returns the memory to the next
    call, so one buffer is enough."""
    import torch.distributed._symmetric_memory as symmetric

    buffer = symmetric.empty(max_bytes, dtype=torch.uint8, device=device)
    symmetric.rendezvous(buffer, group.group_name)
    views = {dtype: buffer.view(dtype) for dtype in DTYPES}

    def add(x: Tensor) -> Tensor:
        buffer_view = views[x.dtype][: x.numel()].view(x.shape)
        y: Tensor = torch.ops.symm_mem.one_shot_all_reduce_copy(
            buffer_view, x, "sum", group.group_name
        )
        return y

    return CustomAllReduce(add, max_bytes, "torch's kernel")


def self_check(
    all_reduce: CustomAllReduce, base: Communicator, device: torch.device, limit: int
) -> CustomAllReduce:
    """Return ``all_reduce`` after sums of several sizes. Raises ``RuntimeError`` if one is wrong, and
    whatever torch or the kernel raises.

    No rank adds before all have compiled the kernel: whoever cannot would be waited for.
    """
    sizes = (ALIGNMENT, limit // 2, limit, 2 * limit + BLOCK_BYTES)
    expected = base.world_size * (base.world_size + 1) / 2
    parts = [
        torch.full((size // dtype.itemsize,), base.rank + 1, dtype=dtype, device=device)
        for dtype in DTYPES
        for size in sizes
        if size <= all_reduce.max_bytes
    ]
    reason = None
    try:
        for x in parts:
            all_reduce.compile_for(x)
    except Exception as error:  # compilers and drivers raise errors of any type
        reason = f"{type(error).__name__}: {error}"
    if not base.all_reduce_min([int(reason is None)])[0]:
        raise RuntimeError(reason or "another rank cannot compile the kernel")
    sums = [all_reduce(x) for x in parts]
    for y in sums:  # after all of them: other ranks would wait for one that stopped earlier
        if not bool((y == expected).all()):
            raise RuntimeError(f"a sum of {len(y)} {y.dtype} over {base.world_size} ranks is wrong")
    return all_reduce
