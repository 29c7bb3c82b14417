"""The operation ``int4_linear``: which kernel multiplies how many rows, and what replaces one."""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from treadle.api.types import KernelRequest
from treadle_kernels_triton.gated_product import GatedProduct
from treadle_kernels_triton.hopper import packed_product
from treadle_kernels_triton.int4 import kernel
from treadle_kernels_triton.int4.self_check import kernel_works
from treadle_kernels_triton.int4.tile_counters import TileCounters
from treadle_kernels_triton.int4.tiles import choose_tile
from treadle_layers_kit.int4_layout import CHUNK, RUN, unpack

__all__ = ("Int4Linear", "load")

NUM_TILE_COUNTERS = 4096
"""Tiles that can be shared out: Hopper's kernel needs four for each multiprocessor, and more tiles of
the other one fill any device."""


class Int4Linear:
    """For weights of one shape, on one stream at a time: products count in the same tile counters.

    The product sums the shares of the inputs in one order, so it is the same in every run.
    """

    def __init__(
        self, dtype: torch.dtype, *, use_hopper: bool, use_small_m: bool, use_unpack: bool
    ) -> None:
        """``dtype``: of the activations that the kernels were tried with. What may be used: ``use_hopper``
        Hopper's kernel, ``use_small_m`` Triton's for few rows, ``use_unpack`` its kernel that unpacks."""
        self.dtype, self.use_hopper, self.use_small_m, self.use_unpack = (
            dtype,
            use_hopper,
            use_small_m,
            use_unpack,
        )
        self.tile_counters = TileCounters(NUM_TILE_COUNTERS)

    def __call__(self, x: Tensor, codes: Tensor, steps: Tensor, inputs: int, group: int) -> Tensor:
        """``[..., inputs]`` to ``[..., out]``; see ``treadle_layers_kit.packed_ops``."""
        y = self.try_kernels(x, codes, steps, inputs, group)
        if y is None:
            return F.linear(x, self.unpack(x, codes, steps, inputs, group))
        return y

    def try_kernels(
        self, x: Tensor, codes: Tensor, steps: Tensor, inputs: int, group: int
    ) -> Tensor | None:
        """The product; ``None``: the weight has to be unpacked."""
        if x.dtype != self.dtype:
            return None
        y = self._try_kernels(x.reshape(-1, inputs), codes, steps, group)
        return None if y is None else y.view(*x.shape[:-1], y.shape[1])

    def unpack(self, x: Tensor, codes: Tensor, steps: Tensor, inputs: int, group: int) -> Tensor:
        """The weight ``[out, inputs]`` in the type of ``x``."""
        may_use = self.use_unpack and x.dtype == self.dtype
        return (kernel.unpack if may_use else unpack)(codes, steps, inputs, group, x.dtype)

    def _try_kernels(
        self, x: Tensor, codes: Tensor, scales_and_zeros: Tensor, group_size: int
    ) -> Tensor | None:
        """``None``: it has to be unpacked."""
        tile_counters = self.tile_counters.for_device(x.device)
        if tile_counters is None:
            return None
        num_rows, out_features = len(x), codes.shape[1]
        if self.use_hopper:
            levels = packed_product.biased_levels(x.dtype)
            block_m = packed_product.choose_block_m(
                num_rows, x.shape[1], out_features, levels, scales_and_zeros.dtype
            )
            if block_m is not None:
                return packed_product.multiply_int4(
                    x, codes, scales_and_zeros, group_size, block_m, tile_counters, num_sms(x.device)
                )  # fmt: skip
        tile = choose_tile(num_rows, out_features)
        if tile is None or not self.use_small_m:
            return None
        if x.stride(1) != 1:
            x = x.contiguous()
        return kernel.multiply(
            x, codes, scales_and_zeros, group_size, tile, tile_counters, num_sms(x.device)
        )


@cache
def num_sms(device: torch.device) -> int:
    """Multiprocessors; 1 for Triton's interpreter."""
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def load(op: str, request: KernelRequest) -> Int4Linear | GatedProduct:
    """With those kernels that work here, of those that this shape needs."""
    dtype = getattr(torch, request.dtype)
    check_group = RUN if request.shape["group"] % CHUNK else CHUNK
    is_supported = packed_product.supports(request.device.capability, request.shape)
    use_hopper = is_supported and kernel_works("hopper", dtype, check_group)
    # What Hopper's kernel takes is left to nobody else.
    use_small_m = kernel_works("triton with hopper" if use_hopper else "triton", dtype, check_group)
    product = Int4Linear(
        dtype,
        use_hopper=use_hopper,
        use_small_m=use_small_m,
        use_unpack=kernel_works("unpack", dtype, check_group),
    )
    return GatedProduct.load(product, request) if op == "int4_linear_silu_and_mul" else product
