"""Replacing the sampler's operations with kernels of plugins."""

from __future__ import annotations

from typing import TYPE_CHECKING

from treadle.api.attention import KernelRequest
from treadle.api.cache import DeviceInfo
from treadle.sampling.sampler import Sampler

if TYPE_CHECKING:
    from treadle.layers.kernels import Kernels

__all__ = ("SAMPLER_OPS", "install_sampler_kernels")

SAMPLER_OPS = ("sample", "argmax")
"""Kernel ops of the sampler, described in ``treadle.layers.kernels``."""


def install_sampler_kernels(
    sampler: Sampler, host: Kernels, device: DeviceInfo, dtype: str
) -> dict[str, str]:
    """Install the best offered kernel of each kernel op. Return backend names by kernel op."""
    request = KernelRequest(device, dtype, {"vocab_size": sampler.vocab_size})
    serving = {}
    for op in SAMPLER_OPS:
        offer = host.kernel(op, request)
        if offer is not None:
            setattr(sampler, f"{op}_op", offer.load())
            serving[op] = offer.name
    return serving
