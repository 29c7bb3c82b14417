"""The ranks of one model over torch.distributed: gloo on CPUs, NCCL on CUDA devices."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from treadle.api.attention import KernelOffer
from treadle.api.models import Shared
from treadle.runner.custom_all_reduce import OneShot, most, one_shot
from treadle.runner.symmetric import memory_size, share

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

__all__ = ("START_TIMEOUT", "TorchCollective")

# Loading a large checkpoint may take one rank much longer than another.
START_TIMEOUT = timedelta(minutes=30)


class TorchCollective:
    """See ``treadle.api.models.Collective``. One per process; ``close`` it.

    ``store`` is where the ranks meet. It decides who can reach them until they have. On CUDA sums are
    made by ``treadle.runner.custom_all_reduce`` where it works and is faster, with ``small`` bytes of memory for each
    rank; ``kernel`` offers the operation ``all_reduce``, alike on every rank.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        device: torch.device,
        store: Store,
        *,
        small: int | None = None,
        kernel: KernelOffer | None = None,
    ) -> None:
        self.rank = rank
        self.size = size
        self._device = device
        # torch 2.13 gives the operation a new name and warns about the old one.
        self._gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
        cuda = device.type == "cuda"
        dist.init_process_group(
            "nccl" if cuda else "gloo",
            store=store,
            rank=rank,
            world_size=size,
            timeout=START_TIMEOUT,
            device_id=device if cuda else None,
        )
        self.small: OneShot | None = None
        self.sum_limit, self.shared = 0, 0
        limit = most(size) if small is None else small
        if cuda and size > 1 and limit:
            self.small = one_shot(self, device, dist.group.WORLD, limit, kernel)
        if self.small is not None:
            self.sum_limit = self.small.limit

    def all_reduce(self, x: Tensor) -> Tensor:
        if self.small is not None and self.small.fits(x):
            return self.small(x)
        dist.all_reduce(x)
        return x

    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor:
        dim %= x.dim()
        gathered = torch.empty((self.size * len(x), *x.shape[1:]), dtype=x.dtype, device=x.device)
        self._gather(gathered, x.contiguous())
        # [ranks, …, n, …] -> […, ranks · n, …]
        return gathered.view(self.size, *x.shape).movedim(0, dim).flatten(dim, dim + 1)

    def smallest(self, values: Sequence[int]) -> list[int]:
        agreed = torch.tensor(values, dtype=torch.int64, device=self._device)
        dist.all_reduce(agreed, op=dist.ReduceOp.MIN)
        return agreed.tolist()

    def share(self, limit: int, units: int) -> Shared | None:
        made = share(self, self._device, dist.group.WORLD, limit, units)
        if made is not None:
            self.shared += memory_size(self.size, limit)
        return made

    def close(self) -> None:
        self.small, self.sum_limit = None, 0
        dist.destroy_process_group()
