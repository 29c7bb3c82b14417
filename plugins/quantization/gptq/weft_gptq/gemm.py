"""When the Triton kernel is used: on CUDA devices, for few rows."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec

import torch
from torch import Tensor

from weft.api.cache import DeviceInfo

__all__ = ("Gemm", "find_gemm")

# Beyond, every tile of rows would unpack the weight again, and to unpack it once and multiply by the
# vendor's GEMM is faster: on an H200 the kernel took 0.75 of that for 128 rows of Qwen3-8B's shapes,
# 1.5 times as long for 256 (benchmarks/quantized.py).
MOST_ROWS = 128

Kernel = Callable[[Tensor, Tensor, Tensor, Tensor, int, int, "Tensor | None"], Tensor]


class Gemm:
    """The kernel, and which products it takes."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel

    def fits(self, x: Tensor, bits: int, group: int, index: Tensor | None) -> bool:
        rows = x.numel() // x.shape[-1]
        half = x.dtype in (torch.float16, torch.bfloat16)
        # All codes of one word must be of one group, unless each has its own index.
        whole = index is not None or group % (32 // bits) == 0
        return half and 0 < rows <= MOST_ROWS and whole

    def __call__(
        self,
        x: Tensor,
        qweight: Tensor,
        scales: Tensor,
        zeros: Tensor,
        bits: int,
        group: int,
        index: Tensor | None,
    ) -> Tensor:
        """``x`` ``[..., in]`` to ``[..., out]``; the others are those of ``packing.dequantize``."""
        rows = x.reshape(-1, x.shape[-1])
        y = self._kernel(rows, qweight, scales, zeros, bits, group, index)
        return y.view(*x.shape[:-1], y.shape[-1])


def find_gemm(device: DeviceInfo) -> Gemm | None:
    """The kernel on CUDA devices from Ampere on, where Triton is installed."""
    if device.kind != "cuda" or (device.capability or (0, 0)) < (8, 0):
        return None
    if find_spec("triton") is None:
        return None
    from weft_gptq.kernel import gptq_gemm

    return Gemm(gptq_gemm)
