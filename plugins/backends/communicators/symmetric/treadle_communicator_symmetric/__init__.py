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


@impl
def treadle_communicator(request: CommunicatorRequest) -> CommunicatorOffer | Refusal:
    if request.device.type != "cuda":
        return Refusal(NAME, (f"needs CUDA devices, this is {request.device.type}",))
    if request.world_size < 2:
        return Refusal(NAME, ("there is only one rank",))
    return CommunicatorOffer(NAME, 80, _create)


def _create(base: Communicator, device: torch.device) -> Communicator:
    from treadle_communicator_symmetric.communicator import create

    return create(base, device)
