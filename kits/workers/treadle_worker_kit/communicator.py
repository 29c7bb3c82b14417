"""The ranks of one model over torch.distributed, and the choice of a faster communicator."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from treadle.api.communicators import Communicator, CommunicatorOffer, CommunicatorRequest
from treadle.config import forbid_multicast
from treadle.layers import device_info

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

__all__ = ("START_TIMEOUT", "TorchCommunicator", "choose_communicator")

log = logging.getLogger("treadle.workers")

# Loading a large checkpoint may take one rank much longer than another.
START_TIMEOUT = timedelta(minutes=30)


class TorchCommunicator:
    """See ``Communicator``: gloo on CPUs, NCCL on CUDA devices. One per process; ``close`` it.

    ``store`` is where the ranks meet. It decides who can reach them until they have.
    """

    memory_bytes = 0

    def __init__(self, rank: int, world_size: int, device: torch.device, store: Store) -> None:
        self.rank = rank
        self.world_size = world_size
        self._device = device
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
        dist.all_reduce(x)
        return x

    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor:
        dim %= x.dim()
        shape = (self.world_size * len(x), *x.shape[1:])
        gathered = torch.empty(shape, dtype=x.dtype, device=x.device)
        self._gather(gathered, x.contiguous())
        # [ranks, …, n, …] -> […, ranks · n, …]
        return gathered.view(self.world_size, *x.shape).movedim(0, dim).flatten(dim, dim + 1)

    def all_reduce_min(self, values: Sequence[int]) -> list[int]:
        least = torch.tensor(values, dtype=torch.int64, device=self._device)
        dist.all_reduce(least, op=dist.ReduceOp.MIN)
        return least.tolist()

    def close(self) -> None:
        dist.destroy_process_group()


class Communicators(Protocol):
    """The part of the plugin host that is used here."""

    def communicator(self, request: CommunicatorRequest) -> CommunicatorOffer | None: ...


def choose_communicator(
    plugins: Communicators, base: Communicator, device: torch.device
) -> Communicator:
    """Return the best communicator that is offered, or ``base`` if it fails on any rank.

    Collective. The log of the rank that failed has the reason.
    """
    offer = None
    if base.world_size > 1:
        offer = plugins.communicator(CommunicatorRequest(device_info(device), base.world_size))
    name = zlib.crc32(offer.name.encode()) if offer else 0
    least, greatest = base.all_reduce_min([name, -name])
    if offer is None or least != -greatest:
        return base
    communicator = None
    try:
        communicator = offer.create(base, device)
    except Exception as error:  # a plugin's, or of a private part of torch
        log.info("communicator %s is not used: %s", offer.name, error)
    if not base.all_reduce_min([int(communicator is not None)])[0] or communicator is None:
        return base
    return communicator
