"""The operation ``fused_experts``: the matrices of the chosen experts, each multiplied by the rows that chose it."""

# Kernels are compiled from their source: their arguments are pointers and constants without types.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from treadle.api.types import KernelRequest
from treadle_triton_kit.expert_tiles import plan
from treadle_triton_kit.launch import shared_bytes
from treadle_triton_kit.pdl import launch_dependents, wait_for_previous_kernel
from treadle_triton_kit.support import supports_pdl

__all__ = (
    "Tile",
    "choose_tile",
    "fused_experts",
    "grouped_linear",
    "grouped_linear_kernel",
    "load",
)


@dataclass(frozen=True, slots=True)
class Tile:
    """One program multiplies ``block_n`` outputs by ``block_m`` rows of one expert, ``block_k`` inputs at a time,
    ``num_stages`` of them on their way. ``group_m`` blocks of rows take turns."""

    block_n: int
    block_m: int
    block_k: int
    num_warps: int
    num_stages: int
    group_m: int = 1

    def fit(self, shared_bytes: int) -> Tile:
        """Return this tile with as many stages as fit into the shared memory of a multiprocessor."""
        most = shared_bytes // (2 * (self.block_n + self.block_m) * self.block_k)
        return replace(self, num_stages=max(1, min(self.num_stages, most)))


FEW_CHOICES = 16
"""So few have programs of their own, and nothing sorts them."""
TILES = (
    Tile(64, 16, 128, 4, 5),
    Tile(128, 32, 64, 4, 5),
    Tile(128, 64, 64, 4, 4, group_m=4),
)
MANY_ROWS = Tile(256, 128, 64, 8, 4, group_m=8)
MAX_FEW_TOKENS = 512
HOPPER_SHARED = 227 << 10
"""Bytes of shared memory that all tiles fit into."""


def choose_tile(tokens: int, k: int, experts: int) -> Tile:
    """For ``tokens`` that choose ``k`` of ``experts``: room for twice the mean of an expert.

    Of more than ``MAX_FEW_TOKENS`` all have the same tile, because a start does not run each number of them.
    """
    room = 2 * -(-tokens * k // experts)
    few = (tile for tile in TILES if room <= tile.block_m)
    return MANY_ROWS if tokens > MAX_FEW_TOKENS else next(few, MANY_ROWS)


@triton.jit(do_not_specialize=("shared",))
def grouped_linear_kernel(
    x,  # [rows, K]
    weight,  # [experts, N, K]
    bias,  # [experts, N] if HAS_BIAS
    out,  # [choices, N]
    order,  # int32, rows of out by their experts; those of x are as many divided by shared. If DIRECT: int64, their experts
    tiles,  # unless DIRECT: int32 [3, tiles]: expert (negative: none), first in order, and end
    shared, N, K,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    DIRECT: tl.constexpr,  # a row for each program
    HAS_BIAS: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Program: a block of outputs of a tile of rows, in the order of ``GROUP_M`` tiles that take turns."""
    launch_dependents(USE_PDL)
    ROWS_LEFT: tl.constexpr = BLOCK_M >= 128
    pid, num_n = tl.program_id(0), tl.cdiv(N, BLOCK_N)
    num_tiles = tl.num_programs(0) // num_n
    first_m = pid // (GROUP_M * num_n) * GROUP_M
    group_m = tl.minimum(num_tiles - first_m, GROUP_M)
    place = pid % (GROUP_M * num_n)
    pid_n, pid_m = place // group_m, first_m + place % group_m
    offs_n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    wait_for_previous_kernel(USE_PDL)
    if DIRECT:
        expert = tl.load(order + pid_m)
        mask_m = tl.arange(0, BLOCK_M) < 1
        rows = pid_m + tl.zeros([BLOCK_M], tl.int32)
    else:
        expert = tl.load(tiles + pid_m).to(tl.int64)
        if expert < 0:
            return
        places = tl.load(tiles + num_tiles + pid_m) + tl.arange(0, BLOCK_M)
        mask_m = places < tl.load(tiles + 2 * num_tiles + pid_m)
        rows = tl.load(order + places, mask=mask_m, other=0)
    mask_n = offs_n < N
    w_ptrs = weight + expert * N * K + offs_n.to(tl.int64)[:, None] * K + offs_k[None, :]
    x_ptrs = x + (rows // shared).to(tl.int64)[None, :] * K + offs_k[:, None]
    acc = tl.zeros([BLOCK_M, BLOCK_N] if ROWS_LEFT else [BLOCK_N, BLOCK_M], tl.float32)
    for start in range(0, K, BLOCK_K):
        mask_k = start + offs_k < K
        w_tile = tl.load(w_ptrs + start, mask=mask_n[:, None] & mask_k[None, :], other=0.0)
        x_tile = tl.load(x_ptrs + start, mask=mask_m[None, :] & mask_k[:, None], other=0.0)
        acc = tl.dot(x_tile.T, w_tile.T, acc) if ROWS_LEFT else tl.dot(w_tile, x_tile, acc)
    acc = acc.T if ROWS_LEFT else acc
    if HAS_BIAS:
        acc += tl.load(bias + expert * N + offs_n, mask=mask_n, other=0.0).to(tl.float32)[:, None]
    out_ptrs = out + rows.to(tl.int64)[None, :] * N + offs_n[:, None]
    tl.store(out_ptrs, acc.to(out.dtype.element_ty), mask=mask_n[:, None] & mask_m[None, :])


def grouped_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    tile: Tile,
    order: Tensor,
    tiles: Tensor | None,
    *,
    use_pdl: bool,
) -> Tensor:
    """``[choices, out]`` of ``weight [experts, out, in]`` and ``x``, which has a row for each choice or for each token.

    ``order`` and ``tiles`` are as from ``expert_tiles.plan``; without ``tiles``, ``order`` holds the expert of each choice.
    """
    _, out_features, in_features = weight.shape
    out = torch.empty((len(order), out_features), dtype=x.dtype, device=x.device)
    num_tiles = len(order) if tiles is None else tiles.shape[1]
    grouped_linear_kernel[(num_tiles * triton.cdiv(out_features, tile.block_n),)](
        x, weight, weight if bias is None else bias, out, order, order if tiles is None else tiles, len(order) // len(x),
        out_features, in_features, BLOCK_N=tile.block_n, BLOCK_M=tile.block_m, BLOCK_K=tile.block_k, GROUP_M=tile.group_m,
        DIRECT=tiles is None, HAS_BIAS=bias is not None, USE_PDL=use_pdl,
        num_warps=tile.num_warps, num_stages=tile.num_stages, launch_pdl=use_pdl,
    )  # fmt: skip
    return out


def fused_experts(
    x: Tensor,
    topk_ids: Tensor,
    gate_up: Tensor,
    down: Tensor,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    activation: Callable[[Tensor], Tensor],
    *,
    use_pdl: bool = False,
    max_shared: int = HOPPER_SHARED,
) -> Tensor:
    """See ``treadle_layers_kit.kernel_ops``."""
    if not len(x):
        return x.new_empty(0, down.shape[1])
    tokens, k = topk_ids.shape
    tile = choose_tile(tokens, k, len(down)).fit(max_shared)
    order, tiles = topk_ids.reshape(-1), None
    if tokens * k > FEW_CHOICES:
        order, tiles = plan(topk_ids, len(down), tile.block_m, use_pdl=use_pdl)
    y = grouped_linear(x, gate_up, gate_up_bias, tile, order, tiles, use_pdl=use_pdl)
    return grouped_linear(activation(y), down, down_bias, tile, order, tiles, use_pdl=use_pdl)


def load(op: str, request: KernelRequest) -> Callable[..., Tensor]:
    """The operation for the current device."""
    return partial(fused_experts, use_pdl=supports_pdl(request.device), max_shared=shared_bytes())
