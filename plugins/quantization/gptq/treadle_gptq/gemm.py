"""When the Triton kernels are used: on CUDA devices, for 16-bit activations."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from treadle.api.cache import DeviceInfo
from treadle_triton_kit.support import triton_refusals

__all__ = ("Gemm", "create_gemm")

# Beyond, every tile of rows would unpack the weight again, and to unpack it once and multiply by the
# vendor's GEMM should be faster: on an H200 (benchmarks/quantized.py, Qwen3-8B's shapes) the kernel
# takes 50 to 92 us for 16 rows and 144 to 268 us for 32; reading the codes, writing the weight and
# multiplying are worth 67 to 130 us.
MAX_ROWS = 16

Product = Callable[[Tensor, Tensor, Tensor, Tensor, int, int, "Tensor | None"], Tensor]
Unpack = Callable[[Tensor, Tensor, Tensor, int, int, "Tensor | None", torch.dtype], Tensor]


class Gemm:
    """The kernels, and which products they take."""

    def __init__(self, product: Product, unpack: Unpack) -> None:
        self._product, self._unpack = product, unpack

    def supports(self, x: Tensor, bits: int, group_size: int, g_idx: Tensor | None) -> bool:
        is_half = x.dtype in (torch.float16, torch.bfloat16)
        # All codes of one word must be of one group, unless each has its own index.
        is_word_aligned = g_idx is not None or group_size % (32 // bits) == 0
        return is_half and x.numel() > 0 and is_word_aligned and bits != 3

    def __call__(
        self,
        x: Tensor,
        qweight: Tensor,
        scales: Tensor,
        zeros: Tensor,
        bits: int,
        group_size: int,
        g_idx: Tensor | None,
    ) -> Tensor:
        """``x`` ``[..., in]`` to ``[..., out]``; the others are those of ``packing.dequantize``."""
        rows = x.reshape(-1, x.shape[-1])
        weight_args = (qweight, scales, zeros, bits, group_size, g_idx)
        if len(rows) > MAX_ROWS:
            return x @ self._unpack(*weight_args, x.dtype)
        y = self._product(rows, *weight_args)
        return y.view(*x.shape[:-1], y.shape[-1])


def create_gemm(device: DeviceInfo) -> Gemm | None:
    """The kernels on CUDA devices from Ampere on, where Triton is installed."""
    if triton_refusals(device):
        return None
    from treadle_gptq.kernel import gptq_gemm, gptq_unpack

    return Gemm(gptq_gemm, gptq_unpack)
