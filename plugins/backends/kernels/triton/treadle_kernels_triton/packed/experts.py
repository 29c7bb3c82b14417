"""The operation ``packed_experts``: the matrices of the chosen experts, each multiplied by the rows that chose it."""

# Kernels are compiled from their source: their arguments are pointers and constants without types.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from treadle.api.types import KernelRequest
from treadle_kernels_triton.int4.linear import NUM_TILE_COUNTERS, num_sms
from treadle_kernels_triton.int4.tile_counters import TileCounters
from treadle_kernels_triton.packed import kernel
from treadle_kernels_triton.packed.linear import works
from treadle_kernels_triton.packed.tiles import choose_experts_tile
from treadle_layers_kit.packed_experts import packed_experts
from treadle_layers_kit.packed_layout import Levels

__all__ = ("PackedExperts", "load", "plan", "plan_kernel")

BLOCK = 1024
"""Choices that are looked at at a time."""


@triton.jit(do_not_specialize=("num_choices", "tiles_per_expert"))
def plan_kernel(
    topk_ids,  # int64 [num_choices]
    order,  # int32 [num_choices]
    tiles,  # int32 [3, experts * tiles_per_expert]
    num_choices, tiles_per_expert,
    BLOCK_M: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A program writes the choices of one expert to ``order``, after those of the experts before it, and its tiles."""
    expert = tl.program_id(0)
    num_tiles = tl.num_programs(0) * tiles_per_expert
    offs = tl.arange(0, BLOCK)
    before = tl.zeros([BLOCK], tl.int32)
    for start in range(0, num_choices, BLOCK):
        chosen = tl.load(topk_ids + start + offs, mask=start + offs < num_choices, other=1 << 30)
        before += (chosen < expert).to(tl.int32)
    first = tl.sum(before, 0)
    end = first
    for start in range(0, num_choices, BLOCK):
        chosen = tl.load(topk_ids + start + offs, mask=start + offs < num_choices, other=1 << 30)
        mine = (chosen == expert).to(tl.int32)
        tl.store(order + end + tl.cumsum(mine, 0) - 1, start + offs, mask=mine > 0)
        end += tl.sum(mine, 0)
    for tile in range(tiles_per_expert):
        begin = first + tile * BLOCK_M
        place = tiles + expert * tiles_per_expert + tile
        tl.store(place, tl.where(begin < end, expert, -1))
        tl.store(place + num_tiles, begin)
        tl.store(place + 2 * num_tiles, end)


def plan(topk_ids: Tensor, experts: int, block_m: int) -> tuple[Tensor, Tensor]:
    """Choices ``[tokens, k]``, of which no two of a token are the same, in the order of their experts, and tiles of
    ``block_m`` of them."""
    tokens_per_tile = -(-len(topk_ids) // block_m)
    order = torch.empty(topk_ids.numel(), dtype=torch.int32, device=topk_ids.device)
    tiles = torch.empty((3, experts * tokens_per_tile), dtype=torch.int32, device=topk_ids.device)
    plan_kernel[(experts,)](
        topk_ids, order, tiles, topk_ids.numel(), tokens_per_tile,
        BLOCK_M=block_m, BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip
    return order, tiles


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
        topk_ids, x = topk_ids.contiguous(), x if x.stride(1) == 1 else x.contiguous()
        order, tiles = plan(topk_ids, len(codes), tile.block_m)
        grouping = order, tiles, len(order) // len(x)
        return kernel.multiply(
            x, *weight, group, tile, counters, num_sms(x.device), bias=bias, grouping=grouping
        )


def load(op: str, request: KernelRequest) -> Callable[..., Tensor]:
    """The kernels if they work here, else the operation in plain torch."""
    dtype = getattr(torch, request.dtype)
    return PackedExperts(dtype) if works(request.shape["bits"], dtype) else packed_experts
