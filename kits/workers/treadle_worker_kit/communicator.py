"""The ranks of one model over torch.distributed, and the choice of a faster communicator."""

from __future__ import annotations

import logging
import os
import zlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from treadle.api.communicators import Communicator, CommunicatorRequest
from treadle.api.devices import device_info
from treadle.api.kinds import COMMUNICATORS
from treadle.plugins import PluginManager

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

__all__ = ("START_TIMEOUT", "TorchCommunicator", "choose_communicator", "forbid_multicast")

log = logging.getLogger("treadle.workers")

# Loading a large checkpoint may take one rank much longer than another.
START_TIMEOUT = timedelta(minutes=30)
# Of a rendezvous on the host: whoever supervises the ranks knows how long each may take.
NO_TIMEOUT = timedelta(days=30)


def forbid_multicast() -> None:
    """Keep torch's symmetric memory from creating NVLink multicast objects.

    They are not used, and some machines crash. Call it before the first rendezvous.
    """
    os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"


class TorchCommunicator:
    """See ``Communicator``: gloo on CPUs, NCCL on CUDA devices. One per process; ``close`` it.

    ``store`` is where the ranks meet. It decides who can reach them until they have, and stays where they
    agree: a sum of NCCL's would be a kernel that waits for ranks which still compile. ``on_wait`` is told
    when this rank begins and ends to wait there.
    """

    memory_bytes = 0

    def __init__(
        self,
        rank: int,
        world_size: int,
        device: torch.device,
        store: Store,
        on_wait: Callable[[bool], None] | None = None,
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self._agreements = PrefixStore("agreements", store)
        self._agreements.set_timeout(NO_TIMEOUT)
        self._num_agreements = 0
        self._dry_run = False
        self._on_wait = on_wait or (lambda is_waiting: None)
        # torch 2.13 gives the operation a new name and warns about the old one.
        self._gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
        cuda = device.type == "cuda"
        if cuda:
            forbid_multicast()  # a rendezvous of symmetric memory would create multicast objects
        dist.init_process_group(
            "nccl" if cuda else "gloo",
            store=store,
            rank=rank,
            world_size=world_size,
            timeout=START_TIMEOUT,
            device_id=device if cuda else None,
        )

    def all_reduce(self, x: Tensor) -> Tensor:
        if not self._dry_run:
            dist.all_reduce(x)
        return x

    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor:
        dim %= x.dim()
        if self._dry_run:
            return torch.cat([x] * self.world_size, dim)
        shape = (self.world_size * len(x), *x.shape[1:])
        gathered = torch.empty(shape, dtype=x.dtype, device=x.device)
        self._gather(gathered, x.contiguous())
        # [ranks, …, n, …] -> […, ranks · n, …]
        return gathered.view(self.world_size, *x.shape).movedim(0, dim).flatten(dim, dim + 1)

    def all_reduce_min(self, values: Sequence[int]) -> list[int]:
        self._num_agreements += 1
        number, store = self._num_agreements, self._agreements
        store.set(f"{number}/{self.rank}", " ".join(map(str, values)))
        self._on_wait(True)
        of_ranks = [store.get(f"{number}/{rank}").split() for rank in range(self.world_size)]
        self._on_wait(False)
        return [min(map(int, column)) for column in zip(*of_ranks, strict=True)]

    def set_dry_run(self, enabled: bool) -> None:
        self._dry_run = enabled

    def close(self) -> None:
        dist.destroy_process_group()


def choose_communicator(
    plugins: PluginManager, base: Communicator, device: torch.device
) -> Communicator:
    """Return the best communicator that is offered, or ``base`` if it fails on any rank.

    Collective. The log of the rank that failed has the reason.
    """
    offer = None
    if base.world_size > 1:
        request = CommunicatorRequest(device_info(device), base.world_size)
        offer = plugins.best_offer(COMMUNICATORS, request=request)
    name = zlib.crc32(offer.name.encode()) if offer else 0
    min_name, negated_max = base.all_reduce_min([name, -name])
    if offer is None or min_name != -negated_max:
        return base
    communicator = None
    try:
        communicator = offer.create(base, device)
    except Exception as error:  # a plugin's, or of a private part of torch
        log.info("communicator %s is not used: %s", offer.name, error)
    if not base.all_reduce_min([int(communicator is not None)])[0] or communicator is None:
        return base
    return communicator
