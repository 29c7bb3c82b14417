"""Sums and gathers between GPUs of one host, in one kernel each, over symmetric memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from treadle.api import impl
from treadle.api.types import CommunicatorOffer, CommunicatorRequest, Refusal

if TYPE_CHECKING:
    import torch

    from treadle.api.types import Communicator

__all__ = ("treadle_communicator",)

NAME = "symmetric"
MAX_RANKS = 2
"""With four ranks the fused sums of small steps can wait for one another for ever: starts hung on four H200."""


@impl
def treadle_communicator(request: CommunicatorRequest) -> CommunicatorOffer | Refusal:
    if request.device.type != "cuda":
        return Refusal(NAME, (f"needs CUDA devices, this is {request.device.type}",))
    if request.world_size < 2:
        return Refusal(NAME, ("there is only one rank",))
    if request.world_size > MAX_RANKS:
        return Refusal(NAME, (f"serves {MAX_RANKS} ranks, these are {request.world_size}",))
    return CommunicatorOffer(NAME, 80, _create)


def _create(base: Communicator, device: torch.device) -> Communicator:
    from treadle_communicator_symmetric.communicator import create

    return create(base, device)
