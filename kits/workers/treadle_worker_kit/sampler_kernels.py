"""Kernels in the place of the sampler's own operations."""

from __future__ import annotations

from treadle.api.attention import KernelRequest
from treadle.api.cache import DeviceInfo
from treadle.api.kinds import KERNEL_OPS
from treadle.plugins import PluginManager
from treadle.sampling.sampler import Sampler

__all__ = ("SAMPLER_OPS", "install_sampler_kernels")

SAMPLER_OPS = ("sample", "argmax", "apply_bitmask")
"""Operations that kernel plugins may offer; ``treadle.testing.kernel_ops`` declares them."""


def install_sampler_kernels(
    sampler: Sampler, plugins: PluginManager, device: DeviceInfo, dtype: str
) -> dict[str, str]:
    """Give the sampler the best kernel that is offered for each operation.

    Returns the plugin's name by operation.
    """
    request = KernelRequest(device, dtype, {"vocab_size": sampler.vocab_size})
    offers = {op: plugins.best_offer(KERNEL_OPS, op=op, request=request) for op in SAMPLER_OPS}
    if (offer := offers["sample"]) is not None:
        sampler.sample_op = offer.load()
    if (offer := offers["argmax"]) is not None:
        sampler.argmax_op = offer.load()
    if (offer := offers["apply_bitmask"]) is not None:
        sampler.bitmask_op = offer.load()
    return {op: offer.name for op, offer in offers.items() if offer is not None}
