"""The operation ``packed_experts``: the matrices of the chosen experts, each multiplied by the rows that chose it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from treadle.api.types import KernelRequest
from treadle_kernels_triton.int4.linear import NUM_TILE_COUNTERS, num_sms
from treadle_kernels_triton.int4.tile_counters import TileCounters
from treadle_kernels_triton.packed import kernel
from treadle_kernels_triton.packed.linear import works
from treadle_kernels_triton.packed.tiles import choose_experts_tile
from treadle_layers_kit.packed_experts import packed_experts
from treadle_layers_kit.packed_layout import Levels
from treadle_triton_kit.expert_tiles import plan

__all__ = ("PackedExperts", "load")


class PackedExperts:
    """For matrices of one shape, on one stream at a time: products count in the same tile counters."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.tile_counters = TileCounters(NUM_TILE_COUNTERS)

    def __call__(
        self,
        x: Tensor,
        topk_ids: Tensor,
        codes: Tensor,
        scales: Tensor | None,
        offsets: Tensor | None,
        factors: Tensor | None,
        levels: Levels,
        inputs: int,
        group: int,
        bias: Tensor | None = None,
    ) -> Tensor:
        """See ``treadle_layers_kit.kernel_ops``."""
        weight = (codes, scales, offsets, factors, levels)
        counters = self.tile_counters.for_device(x.device)
        if x.dtype != self.dtype or counters is None or not len(x):
            return packed_experts(x, topk_ids, *weight, inputs, group, bias)
        folds = kernel.folds(scales, offsets, levels, x.dtype)
        tile = choose_experts_tile(topk_ids.numel(), len(codes), folds=folds)
        x = x if x.stride(1) == 1 else x.contiguous()
        order, tiles = plan(topk_ids, len(codes), tile.block_m)
        grouping = order, tiles, len(order) // len(x)
        return kernel.multiply(
            x, *weight, group, tile, counters, num_sms(x.device), bias=bias, grouping=grouping
        )


def load(op: str, request: KernelRequest) -> Callable[..., Tensor]:
    """The kernels if they work here, else the operation in plain torch."""
    dtype = getattr(torch, request.dtype)
    return PackedExperts(dtype) if works(request.shape["bits"], dtype) else packed_experts
