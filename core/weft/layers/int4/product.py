"""``x @ W`` on CUDA devices for four-bit ``W``: when the kernels are used, and with what."""

from __future__ import annotations

import logging
from collections.abc import Callable
from importlib.util import find_spec

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.api.cache import DeviceInfo
from weft.layers.int4.packing import BIAS, CHUNK, RUN, pack_codes, pack_steps
from weft.layers.int4.tiles import Tile, choose

__all__ = ("TiledInt4", "TilingInt4", "find_tiling")

log = logging.getLogger(__name__)

COLUMNS = 1024
"""Outputs that are repacked at a time: a code takes up to eight times its size meanwhile."""
TICKETS = 4096
"""Tiles that can be shared out; more of them fill any device."""
TRIED = (3, 12, 20, 40, 100, 200, 300)
"""Rows of the trials: one for each tile, and for the unpacked weight."""


class TiledInt4:
    """One weight, repacked; called like ``CpuInt4``.

    The product sums the shares of the inputs in one order, so it is the same in every run. Two
    products with the same weight must not run at the same time: they count in the same ``tickets``.
    """

    def __init__(self, codes: Tensor, scales: Tensor, inputs: int, group: int) -> None:
        """``codes`` and ``scales`` are those of ``packing``, the latter its steps."""
        from weft.layers.int4.kernel import multiply, unpack

        self.codes, self.scales, self.group = codes, scales, group
        self._multiply, self._unpack = multiply, unpack
        self._inputs, self._outputs = inputs, codes.shape[1]
        device = codes.device
        self._tickets = torch.zeros(TICKETS, dtype=torch.int32, device=device)
        cuda = device.type == "cuda"
        self._processors = (
            torch.cuda.get_device_properties(device).multi_processor_count if cuda else 1
        )

    def __call__(self, x: Tensor) -> Tensor:
        """``[..., in]`` to ``[..., out]``, in the type that the weight was packed for."""
        rows = x.reshape(-1, x.shape[-1])
        tile = choose(len(rows), self._outputs)
        if tile is None:
            return F.linear(x, self.unpack(x.dtype))
        return self.product(rows, tile).view(*x.shape[:-1], self._outputs)

    def product(self, x: Tensor, tile: Tile) -> Tensor:
        """``[rows, in]`` to ``[rows, out]`` with that tile."""
        if x.stride(1) != 1:
            x = x.contiguous()
        return self._multiply(
            x, self.codes, self.scales, self.group, tile,
            self._tickets, self._processors,
        )  # fmt: skip

    def unpack(self, dtype: torch.dtype) -> Tensor:
        """The weight ``[out, in]``."""
        return self._unpack(self.codes, self.scales, self._inputs, self.group, dtype)


class TilingInt4:
    """Makes ``TiledInt4`` of the weights that the kernel can read."""

    def __init__(self) -> None:
        self._tried: dict[tuple[torch.dtype, int], bool] = {}

    def pack(
        self,
        columns: Callable[[int, int], Tensor],  # first and last + 1 -> codes int [in, columns]
        scales: Tensor,  # [in / group, out]
        zeros: Tensor,  # [in / group, out]
        inputs: int,
        group: int,
        dtype: torch.dtype,
    ) -> TiledInt4 | None:
        """``None`` where a run of inputs in a word would cross groups, for other types, and where the
        kernels do not work."""
        if dtype not in BIAS or group % RUN or inputs != group * len(scales):
            return None
        if scales.is_cuda and not self._works(dtype, group, scales.device):
            return None
        out = scales.shape[1]
        shape = (-(-inputs // CHUNK), out, RUN)
        codes = torch.empty(shape, dtype=torch.int16, device=scales.device)
        for first in range(0, out, COLUMNS):
            last = min(first + COLUMNS, out)
            codes[:, first:last] = pack_codes(columns(first, last))
        return TiledInt4(codes, pack_steps(scales, zeros, dtype), inputs, group)

    def _works(self, dtype: torch.dtype, group: int, device: torch.device) -> bool:
        """Whether the kernels are right on this device, which nothing but a trial can tell."""
        key = dtype, RUN if group % CHUNK else CHUNK
        if key not in self._tried:
            try:
                right, reason = self._right(*key, device), "its results are wrong"
            except Exception as error:  # Triton raises whatever it likes
                right, reason = False, f"{type(error).__name__}: {error}"
            if not right:
                log.warning("no kernel for four-bit weights here (%s): torch unpacks them", reason)
            self._tried[key] = right
        return self._tried[key]

    def _right(self, dtype: torch.dtype, group: int, device: torch.device) -> bool:
        made = torch.Generator(device).manual_seed(0)
        inputs, outputs = 4 * CHUNK, 192
        codes = torch.randint(16, (inputs, outputs), generator=made, device=device)
        shape = (inputs // group, outputs)
        scales = torch.rand(shape, generator=made, device=device).half()
        zeros = torch.randint(16, shape, generator=made, device=device)
        steps = pack_steps(scales, zeros, dtype)
        product = TiledInt4(pack_codes(codes), steps, inputs, group)
        zeros, scales = (each.repeat_interleave(group, 0) for each in (zeros, scales.float()))
        weight = (codes - zeros) * scales
        for rows in TRIED:
            x = torch.randn(rows, inputs, generator=made, device=device).to(dtype)
            want = x.float() @ weight
            if not (product(x).float() - want).norm() < 0.02 * want.norm():
                return False
        return True


def find_tiling(device: DeviceInfo) -> TilingInt4 | None:
    """On CUDA devices from Ampere on, where Triton is installed."""
    capability = device.capability or (0, 0)
    if device.kind != "cuda" or capability < (8, 0) or find_spec("triton") is None:
        return None
    return TilingInt4()
