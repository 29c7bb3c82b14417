"""Where kernels of plugins take the place of the sampler's own operations."""

from __future__ import annotations

from typing import TYPE_CHECKING

from treadle.api.attention import KernelRequest
from treadle.api.cache import DeviceInfo
from treadle.sampling.sampler import Sampler

if TYPE_CHECKING:
    from treadle.layers.kernels import Kernels

__all__ = ("SAMPLER_OPS", "install_sampler_kernels")

SAMPLER_OPS = ("sample", "argmax")
"""Described in ``treadle.layers.kernels``."""


def install_sampler_kernels(
    sampler: Sampler, host: Kernels, device: DeviceInfo, dtype: str
) -> dict[str, str]:
    """Give the sampler the best kernel that is offered for each operation.

    Returns which backend serves which operation.
    """
    request = KernelRequest(device, dtype, {"vocab_size": sampler.vocab_size})
    serving = {}
    for op in SAMPLER_OPS:
        offer = host.kernel(op, request)
        if offer is not None:
            setattr(sampler, f"{op}_op", offer.load())
            serving[op] = offer.name
    return serving
