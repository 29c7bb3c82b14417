"""The operation ``int4_linear``: which kernel multiplies how many rows, and what replaces one."""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from treadle.api.types import KernelRequest
from treadle_kernels_triton.int4 import hopper, kernel
from treadle_kernels_triton.int4.tickets import TileCounters
from treadle_kernels_triton.int4.tiles import choose, choose_wide
from treadle_kernels_triton.int4.trial import works
from treadle_layers_kit.int4_layout import CHUNK, RUN, int4_linear

__all__ = ("Int4Linear", "load")

TICKETS = 4096
"""Tiles that can be shared out: Hopper's kernel needs four for each multiprocessor, and more tiles of
the other one fill any device."""


class Int4Linear:
    """For weights of one shape, on one stream at a time: products count in the same tickets.

    The product sums the shares of the inputs in one order, so it is the same in every run.
    """

    def __init__(
        self, dtype: torch.dtype, *, use_hopper: bool, use_small_m: bool, unpacks: bool
    ) -> None:
        """``dtype``: of the activations that the kernels were tried with. What may be used: ``use_hopper``
        Hopper's kernel, ``use_small_m`` Triton's for few rows, ``unpacks`` its kernel that unpacks."""
        self.dtype, self.use_hopper, self.use_small_m, self.unpacks = (
            dtype,
            use_hopper,
            use_small_m,
            unpacks,
        )
        self.tile_counters = TileCounters(TICKETS)

    def __call__(self, x: Tensor, codes: Tensor, steps: Tensor, inputs: int, group: int) -> Tensor:
        """``[..., inputs]`` to ``[..., out]``; see ``treadle_layers_kit.kernel_ops``."""
        if x.dtype != self.dtype:
            return int4_linear(x, codes, steps, inputs, group)
        y = self._product(x.reshape(-1, inputs), codes, steps, group)
        if y is not None:
            return y.view(*x.shape[:-1], y.shape[1])
        if self.unpacks:
            return F.linear(x, kernel.unpack(codes, steps, inputs, group, x.dtype))
        return int4_linear(x, codes, steps, inputs, group)

    def _product(self, x: Tensor, codes: Tensor, steps: Tensor, group: int) -> Tensor | None:
        """``None``: it has to be unpacked."""
        tickets = self.tile_counters.on(x.device)
        if tickets is None:
            return None
        rows, outputs = len(x), codes.shape[1]
        if self.use_hopper:
            wide = choose_wide(rows, x.shape[1], outputs)
            if wide is not None:
                return hopper.multiply(
                    x, codes, steps, group, wide, tickets, num_sms(x.device)
                )  # fmt: skip
        tile = choose(rows, outputs)
        if tile is None or not self.use_small_m:
            return None
        if x.stride(1) != 1:
            x = x.contiguous()
        return kernel.multiply(x, codes, steps, group, tile, tickets, num_sms(x.device))


@cache
def num_sms(device: torch.device) -> int:
    """Multiprocessors; 1 for Triton's interpreter."""
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def load(op: str, request: KernelRequest) -> Int4Linear:
    """With those kernels that work here, of those that this shape needs."""
    dtype = getattr(torch, request.dtype)
    outputs, group = request.shape["out_features"], request.shape["group"]
    wide = hopper.serves(request.device.capability, outputs, group) and works("wide", dtype)
    kind = RUN if group % CHUNK else CHUNK
    # What Hopper's kernel takes is left to nobody else.
    few = works("few with wide" if wide else "few", dtype, kind)
    return Int4Linear(dtype, use_hopper=wide, use_small_m=few, unpacks=works("unpack", dtype, kind))
