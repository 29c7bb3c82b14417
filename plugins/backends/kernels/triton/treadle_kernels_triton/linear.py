"""Linear layers, above all of few rows: the time is that of reading the weight once.

For one to four of them a program multiplies in float32 without tensor cores. The first piece of its share
of the weight is on its way before the kernel waits for its input (see ``treadle_triton_kit.pdl``), and so many programs
are on a multiprocessor that the pieces in flight cover the latency of memory. For up to 256 rows, and for
a thousand and more that are gated, there are kernels of Hopper's own (``hopper``). Where none of them is
faster than torch's own linear (``tiles``, ``hopper.batches``, ``hopper.gated``), that is called.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from treadle.api.types import KernelRequest
from treadle_kernels_triton.activation import gate, silu_and_mul
from treadle_kernels_triton.hopper.batches import (
    MOST_ROWS,
    SmallBatchLinear,
    choose_batch,
    choose_gated_batch,
    create_small_batch_linear,
)
from treadle_kernels_triton.hopper.gated import GatedLinear, create_gated_linear
from treadle_kernels_triton.join import reduce_split_k
from treadle_kernels_triton.norm import fused_add_partials_rms_norm
from treadle_kernels_triton.rows import flat
from treadle_kernels_triton.tiles import Tile, choose, with_bias
from treadle_triton_kit.pdl import launch_dependents, wait_for_previous_kernel

__all__ = (
    "Zeros",
    "few_rows_kernel",
    "linear",
    "linear_silu_and_mul",
    "linear_split_k",
    "load",
    "small_linear",
)

MOST_JOINED = 1 << 17
"""Numbers of a result up to which a kernel that adds its parts costs less than sharing the depth gains:
128 rows of 1024 features, 32 of 4096 (H200; at 256 of 1024 it is 8.0 us in place of torch's 6.4)."""


@triton.jit
def _columns(x, k, depth):
    """float32 ``[1, BLOCK_K]`` of one row; zeros past its end."""
    return tl.load(x + k, mask=k < depth, other=0.0).to(tl.float32)[None, :]


@triton.jit
def _finish(out, n, sums, bias, inside, BIAS: tl.constexpr):
    """Store one row of results from sums ``[BLOCK_N, BLOCK_K]``."""
    y = tl.sum(sums, axis=1)
    if BIAS:
        y += tl.load(bias + n, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + n, y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def few_rows_kernel(  # noqa: C901 (rows are unrolled by hand: a loop cannot carry a list of sums)
    x,  # [ROWS, depth], rows x_stride elements apart
    weight,  # [width, depth], or [2 * width, depth] if GATED
    bias,  # [width], or [2 * width] if GATED
    out,  # [ROWS, width]
    width,
    depth,
    x_stride,
    ROWS: tl.constexpr,  # 1 to 4; 1 if GATED
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ONCE: tl.constexpr,  # depth <= BLOCK_K
    BIAS: tl.constexpr,
    GATED: tl.constexpr,  # out = silu(first half) * second half
    EARLY: tl.constexpr,
):
    """A program computes ``BLOCK_N`` features of all rows."""
    launch_dependents(EARLY)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    inside = n < width
    own = weight + n.to(tl.int64)[:, None] * depth + k[None, :]
    other = own + width.to(tl.int64) * depth
    mask = inside[:, None] & (k < depth)[None, :]
    ahead = tl.load(own, mask=mask, other=0.0, eviction_policy="evict_first")
    up_ahead = ahead
    if GATED:
        up_ahead = tl.load(other, mask=mask, other=0.0, eviction_policy="evict_first")
    wait_for_previous_kernel(EARLY)
    s0 = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    s1, s2, s3, up = s0, s0, s0, s0
    for start in range(0, depth, BLOCK_K):
        piece, up_piece = ahead.to(tl.float32), up_ahead.to(tl.float32)
        if not ONCE:  # the next piece is on its way while this one is multiplied
            mask = inside[:, None] & (start + BLOCK_K + k < depth)[None, :]
            at = start + BLOCK_K
            ahead = tl.load(own + at, mask=mask, other=0.0, eviction_policy="evict_first")
            if GATED:
                up_ahead = tl.load(other + at, mask=mask, other=0.0, eviction_policy="evict_first")
        row = _columns(x, start + k, depth)
        s0 += piece * row
        if GATED:
            up += up_piece * row
        if ROWS > 1:
            s1 += piece * _columns(x + x_stride, start + k, depth)
        if ROWS > 2:
            s2 += piece * _columns(x + 2 * x_stride, start + k, depth)
        if ROWS > 3:
            s3 += piece * _columns(x + 3 * x_stride, start + k, depth)
    if GATED:
        first, second = tl.sum(s0, axis=1), tl.sum(up, axis=1)
        if BIAS:
            first += tl.load(bias + n, mask=inside, other=0.0).to(tl.float32)
            second += tl.load(bias + width + n, mask=inside, other=0.0).to(tl.float32)
        kind: tl.constexpr = out.dtype.element_ty
        tl.store(out + n, gate(first.to(kind).to(tl.float32), second.to(kind)), mask=inside)
    else:
        _finish(out, n, s0, bias, inside, BIAS)
        if ROWS > 1:
            _finish(out + width, n, s1, bias, inside, BIAS)
        if ROWS > 2:
            _finish(out + 2 * width, n, s2, bias, inside, BIAS)
        if ROWS > 3:
            _finish(out + 3 * width, n, s3, bias, inside, BIAS)


def small_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, gated: bool, tile: Tile, early: bool
) -> Tensor:
    """``x [rows, depth]`` times ``weight [features, depth]``; the halves gated if asked for.

    At most four rows, one if gated; ``weight`` is contiguous, so are the rows of ``x``.
    """
    rows, depth = x.shape
    width = weight.shape[0] // 2 if gated else weight.shape[0]
    out = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    few_rows_kernel[(triton.cdiv(width, tile.features),)](
        x, weight, x if bias is None else bias, out, width, depth, x.stride(0),
        ROWS=rows, BLOCK_N=tile.features, BLOCK_K=tile.depth, ONCE=depth <= tile.depth,
        BIAS=bias is not None, GATED=gated, EARLY=early, num_warps=tile.warps, launch_pdl=early,
    )  # fmt: skip
    return out


def _few(x: Tensor, weight: Tensor, bias: Tensor | None, gated: bool, early: bool) -> Tensor | None:
    """The result for ``x [rows, depth]`` without tensor cores; ``None`` where that is slower."""
    tile = choose(len(x), len(weight), x.shape[1], gated)
    if tile is None or not weight.is_contiguous():
        return None
    return small_linear(x, weight, bias, gated, tile, early)


def _batch(
    x: Tensor, weight: Tensor, bias: Tensor | None, early: bool, batches: SmallBatchLinear
) -> Tensor | None:
    """The same on tensor cores."""
    division = batches.division(x, weight)
    if division is None or (division.splits > 1 and len(x) * len(weight) > MOST_JOINED):
        return None
    if division.splits == 1:
        return batches.multiply(x, weight, bias, division)
    return reduce_split_k(batches.multiply(x, weight, None, division), bias, x.dtype, early=early)


class Zeros:
    """Biases that change nothing, one for each width and type; captured graphs keep reading them."""

    def __init__(self) -> None:
        self._found: dict[tuple[int, torch.dtype, torch.device], Tensor] = {}

    def bias(self, weight: Tensor) -> Tensor:
        key = (weight.shape[0], weight.dtype, weight.device)
        if key not in self._found:
            self._found[key] = weight.new_zeros(weight.shape[0])
        return self._found[key]


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    early: bool = False,
    zeros: Zeros | None = None,
    batches: SmallBatchLinear | None = None,
) -> Tensor:
    """The operation ``linear`` of ``treadle_layers_kit.kernel_ops``.

    ``batches``: what multiplies up to 256 rows on Hopper, where there is such a thing.
    """
    count = x.numel() // x.shape[-1]
    if count <= MOST_ROWS:
        rows = flat(x)
        y = _few(rows, weight, bias, False, early)
        if y is None and batches is not None:
            y = _batch(rows, weight, bias, early, batches)
        if y is not None:
            return y.view(*x.shape[:-1], y.shape[1])
    if bias is None and zeros is not None and with_bias(count, *weight.shape):
        bias = zeros.bias(weight)
    return F.linear(x, weight, bias)


def linear_split_k(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    early: bool = False,
    zeros: Zeros | None = None,
    batches: SmallBatchLinear | None = None,
) -> Tensor:
    """The operation ``linear_split_k`` of ``treadle_layers_kit.kernel_ops``; see ``linear``."""
    if batches is not None and bias is None and x.dim() == 2:
        division = batches.division(x, weight)
        few = choose(len(x), len(weight), x.shape[1], False)
        if division is not None and division.splits > 1 and few is None:
            return batches.multiply(x, weight, None, division)
    return linear(x, weight, bias, early=early, zeros=zeros, batches=batches)


def linear_silu_and_mul(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    early: bool = False,
    batches: SmallBatchLinear | None = None,
    gated: GatedLinear | None = None,
) -> Tensor:
    """The operation ``linear_silu_and_mul`` of ``treadle_layers_kit.kernel_ops``.

    ``batches`` and ``gated``: what multiplies and gates up to 256 rows, and many, in one kernel on
    Hopper, where there is such a thing.
    """
    y = None
    if x.numel() <= MOST_ROWS * x.shape[-1]:
        rows = flat(x)
        y = _few(rows, weight, bias, True, early)
        if y is None and batches is not None and bias is None:
            division = batches.division(rows, weight)
            if division is not None:
                y = batches.multiply(rows, weight, None, division)
    elif gated is not None and bias is None:
        y = gated.product(x, weight)
    if y is not None:
        return y.view(*x.shape[:-1], y.shape[-1])
    return silu_and_mul(linear(x, weight, bias, early=early), early=early)


def load(op: str, request: KernelRequest) -> Callable[..., Tensor]:
    """``linear``, ``linear_split_k`` or ``linear_silu_and_mul`` with what the device allows."""
    capability = request.device.capability or (0, 0)
    early, hopper = capability >= (9, 0), capability[0] == 9
    choice = choose_gated_batch if op == "linear_silu_and_mul" else choose_batch
    features, depth = request.shape["out_features"], request.shape["in_features"]
    batches = create_small_batch_linear(request.dtype, features, depth, choice) if hopper else None
    if op == "linear_silu_and_mul":
        gated = create_gated_linear(request.dtype) if hopper else None
        return partial(linear_silu_and_mul, early=early, batches=batches, gated=gated)
    if op == "linear_split_k" and batches is not None:
        _compile_norms(batches, features, early)
    zeros = Zeros() if early else None
    chosen = linear_split_k if op == "linear_split_k" else linear
    return partial(chosen, early=early, zeros=zeros, batches=batches)


def _compile_norms(batches: SmallBatchLinear, size: int, early: bool) -> None:
    """What adds up the parts, before it is captured."""
    for count in batches.splits:
        row = torch.zeros(1, size, dtype=batches.dtype, device="cuda")
        parts = torch.zeros(count, 1, size, device="cuda")
        fused_add_partials_rms_norm(parts, row, row[0], 1.0, early=early)
