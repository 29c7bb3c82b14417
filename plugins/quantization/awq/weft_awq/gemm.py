"""When the Triton kernel is used: on CUDA devices, for few rows."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec

import torch
from torch import Tensor

from weft.api.cache import DeviceInfo

__all__ = ("Gemm", "find_gemm")

# Beyond, every tile of rows would unpack the weight again, and to unpack it once and multiply by the
# vendor's GEMM is faster: on an H200 the kernel took half as long for 256 rows of Qwen3-8B's shapes,
# at twice the time for each doubling (benchmarks/quantized.py).
MOST_ROWS = 256
# The kernel's tiles are that deep, and a tile has one scale for each column.
TILE = 32

Kernel = Callable[[Tensor, Tensor, Tensor, Tensor, int], Tensor]


class Gemm:
    """The kernel, and which products it takes."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel

    def fits(self, x: Tensor, group: int) -> bool:
        rows = x.numel() // x.shape[-1]
        half = x.dtype in (torch.float16, torch.bfloat16)
        return half and 0 < rows <= MOST_ROWS and group % TILE == 0

    def __call__(
        self, x: Tensor, qweight: Tensor, scales: Tensor, zeros: Tensor, group: int
    ) -> Tensor:
        """``x`` ``[..., in]`` to ``[..., out]``; the others are those of ``packing.dequantize``."""
        y = self._kernel(x.reshape(-1, x.shape[-1]), qweight, scales, zeros, group)
        return y.view(*x.shape[:-1], y.shape[-1])


def find_gemm(device: DeviceInfo) -> Gemm | None:
    """The kernel on CUDA devices from Ampere on, where Triton is installed."""
    if device.kind != "cuda" or (device.capability or (0, 0)) < (8, 0):
        return None
    if find_spec("triton") is None:
        return None
    from weft_awq.kernel import awq_gemm

    return Gemm(awq_gemm)
