"""The operation ``packed_linear``: which kernel multiplies how many rows, and what replaces one."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from treadle.api.types import KernelRequest
from treadle_kernels_triton.gated_product import GatedProduct
from treadle_kernels_triton.hopper import packed_product
from treadle_kernels_triton.int4.linear import NUM_TILE_COUNTERS, num_sms
from treadle_kernels_triton.int4.tile_counters import TileCounters
from treadle_kernels_triton.packed import kernel
from treadle_kernels_triton.packed.self_check import check_hopper_kernel, check_kernels
from treadle_kernels_triton.packed.tiles import choose_packed_tile
from treadle_kernels_triton.packed.unpack import unpack
from treadle_layers_kit import packed_layout
from treadle_layers_kit.packed_layout import Levels
from treadle_layers_kit.packed_ops import PACKED_OPS
from treadle_triton_kit.self_check import checked_once, self_check

__all__ = ("PackedLinear", "load", "works")

log = logging.getLogger(__name__)

FAILED = "no kernel multiplies by weights of %d bits here (%%s): torch unpacks them"
FAILED_ON_HOPPER = "no kernel of Hopper's for weights of %d bits here (%%s): Triton's serves them"


class PackedLinear:
    """For weights of one shape, on one stream at a time: products count in the same tile counters."""

    def __init__(self, dtype: torch.dtype, *, use_hopper: bool = False) -> None:
        """``dtype``: of the activations that the kernels were tried with; ``use_hopper``: whether Hopper's may be used."""
        self.dtype, self.use_hopper = dtype, use_hopper
        self.tile_counters = TileCounters(NUM_TILE_COUNTERS)

    def __call__(self, x: Tensor, *weight: Any) -> Tensor:
        """``[..., inputs]`` to ``[..., out]``; see ``treadle_layers_kit.packed_ops``."""
        y = self.try_kernels(x, *weight)
        return F.linear(x, self.unpack(x, *weight)) if y is None else y

    def try_kernels(
        self,
        x: Tensor,
        codes: Tensor,
        scales: Tensor | None,
        offsets: Tensor | None,
        factors: Tensor | None,
        levels: Levels,
        inputs: int,
        group: int,
    ) -> Tensor | None:
        """The product; ``None``: the weight has to be unpacked."""
        if x.dtype != self.dtype:
            return None
        rows = x.reshape(-1, inputs)
        counters = self.tile_counters.for_device(x.device)
        if not len(rows) or counters is None:
            return None
        weight = (codes, scales, offsets, factors, levels, group)
        sms, scale_type = num_sms(x.device), None if scales is None else scales.dtype
        block_m = None
        if self.use_hopper and (scales is not None or offsets is None):
            block_m = packed_product.choose_block_m(
                len(rows), inputs, codes.shape[1], levels, scale_type
            )
        if block_m is not None:
            y = packed_product.multiply(rows, *weight, block_m, counters, sms)
            return y.view(*x.shape[:-1], y.shape[1])
        folds = kernel.folds(scales, offsets, levels, x.dtype)
        tile = choose_packed_tile(
            len(rows),
            levels,
            has_offsets=offsets is not None,
            folds=folds,
            has_scales=scales is not None,
        )
        if tile is None:
            return None
        rows = rows if rows.stride(1) == 1 else rows.contiguous()
        y = kernel.multiply(rows, *weight, tile, counters, sms)
        return y.view(*x.shape[:-1], y.shape[1])

    def unpack(self, x: Tensor, *weight: Any) -> Tensor:
        """The weight ``[out, inputs]`` in the type of ``x``."""
        if x.dtype == self.dtype:
            return unpack(*(*weight, x.dtype))
        return packed_layout.unpack(*weight).to(x.dtype)


@checked_once
def works(bits: int, dtype: torch.dtype) -> bool:
    """Whether the kernels do, tried once on the device that is current; if not, the log says so."""
    device = torch.device("cuda", torch.cuda.current_device())
    return self_check(lambda: check_kernels(bits, dtype, device), log, FAILED % bits)


@checked_once
def works_on_hopper(bits: int, dtype: torch.dtype) -> bool:
    """The same of Hopper's kernel."""
    device = torch.device("cuda", torch.cuda.current_device())
    return self_check(
        lambda: check_hopper_kernel(bits, dtype, device), log, FAILED_ON_HOPPER % bits
    )


def load(op: str, request: KernelRequest) -> Callable[..., Tensor]:
    """The kernels if they work here, else the operation in plain torch."""
    dtype = getattr(torch, request.dtype)
    bits = request.shape["bits"]
    if not works(bits, dtype):
        return next(declared.reference for declared in PACKED_OPS if declared.name == op)
    is_supported = packed_product.supports(request.device.capability, request.shape)
    use_hopper = is_supported and works_on_hopper(bits, dtype)
    product = PackedLinear(dtype, use_hopper=use_hopper)
    is_gated = op == "packed_linear_silu_and_mul"
    return GatedProduct.load(product, request) if is_gated else product
