"""Rows in the order of the experts that they chose, in tiles of one expert each."""

# Kernels are compiled from their source: their arguments are pointers and constants without types.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from treadle_triton_kit.compile_ahead import is_collecting
from treadle_triton_kit.pdl import launch_dependents, wait_for_previous_kernel

__all__ = ("plan", "plan_kernel")

FEW = 4096
BLOCKS = ((1024, 4), (8192, 16))
"""Choices that a program looks at at a time, and its warps: up to ``FEW``, and for more."""


@triton.jit
def _first_tile(before, expert, BLOCK_M: tl.constexpr):
    """Of an expert, if ``before`` choices are those of the experts before it: room for the tiles of all of them."""
    return tl.minimum(before // BLOCK_M + expert, before)


@triton.jit(do_not_specialize=("num_choices", "num_tiles"))
def plan_kernel(
    topk_ids,  # int64 [num_choices]
    order,  # int32 [num_choices]
    tiles,  # int32 [3, num_tiles]
    num_choices, num_tiles,
    BLOCK_M: tl.constexpr, BLOCK: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """A program writes the choices of one expert to ``order``, after those of the experts before it, and its tiles."""
    launch_dependents(USE_PDL)
    expert = tl.program_id(0)
    offs = tl.arange(0, BLOCK)
    before = tl.zeros([BLOCK], tl.int32)
    wait_for_previous_kernel(USE_PDL)
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
    first_tile = _first_tile(first, expert, BLOCK_M)
    end_tile = _first_tile(end, expert + 1, BLOCK_M)
    if expert == tl.num_programs(0) - 1:
        end_tile = num_tiles
    for tile in range(first_tile, end_tile):
        begin = first + (tile - first_tile) * BLOCK_M
        tl.store(tiles + tile, tl.where(begin < end, expert, -1))
        tl.store(tiles + num_tiles + tile, begin)
        tl.store(tiles + 2 * num_tiles + tile, end)


def plan(
    topk_ids: Tensor, experts: int, block_m: int, *, use_pdl: bool = False
) -> tuple[Tensor, Tensor]:
    """Return choices int64 ``[tokens, k]`` in the order of their experts, int32 ``[tokens * k]``, and tiles of them.

    Tiles are int32 ``[3, n]``: an expert or a negative number, the first of ``order``, and the end of its expert's.
    A tile has up to ``block_m`` choices of one expert; ``n`` depends on the sizes alone.
    """
    num_choices = topk_ids.numel()
    num_tiles = min(num_choices // block_m + experts, num_choices)
    order = torch.empty(num_choices, dtype=torch.int32, device=topk_ids.device)
    tiles = torch.empty((3, num_tiles), dtype=torch.int32, device=topk_ids.device)
    if is_collecting():
        # This kernel may not run while others are compiled, but a product that is compiled already does.
        tiles.fill_(-1)
    block, num_warps = BLOCKS[num_choices > FEW]
    plan_kernel[(experts,)](
        topk_ids.contiguous(), order, tiles, num_choices, num_tiles,
        BLOCK_M=block_m, BLOCK=block, USE_PDL=use_pdl, num_warps=num_warps, launch_pdl=use_pdl,
    )  # fmt: skip
    return order, tiles
