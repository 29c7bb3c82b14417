"""Kernels in the place of the sampler's own operations."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor

from treadle.api.attention import KernelRequest
from treadle.api.cache import DeviceInfo
from treadle.api.kinds import KERNEL_OPS
from treadle.plugins import PluginManager
from treadle.sampling.sampler import Sampler

__all__ = ("SAMPLER_OPS", "install_sampler_kernels", "sampling_in_vain")

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


@contextmanager
def sampling_in_vain(sampler: Sampler) -> Iterator[None]:
    """Let kernels that are only compiled choose the first token: others read what is at the place of one."""
    ops = sampler.sample_op, sampler.argmax_op

    def first_token(
        op: Callable[..., tuple[Tensor, Tensor]],
    ) -> Callable[..., tuple[Tensor, Tensor]]:
        def choose(*args: object) -> tuple[Tensor, Tensor]:
            tokens, invalid = op(*args)
            return tokens.zero_(), invalid.zero_()

        return choose

    sampler.sample_op, sampler.argmax_op = (op and first_token(op) for op in ops)
    try:
        yield
    finally:
        sampler.sample_op, sampler.argmax_op = ops
