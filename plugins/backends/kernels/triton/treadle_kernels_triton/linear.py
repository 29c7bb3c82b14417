"""Linear layers, above all of few rows: the time is that of reading the weight once.

For one to four of them a program multiplies in float32 without tensor cores. The first piece of its share
of the weight is on its way before the kernel waits for its input (see ``treadle_triton_kit.pdl``), and so many programs
are on a multiprocessor that the pieces in flight cover the latency of memory. For up to 256 rows, and for
a thousand and more that are gated, there are kernels of Hopper's own (``hopper``). Where none of them is
faster than torch's own linear (``tiles``, ``hopper.small_batch``, ``hopper.gated_linear``), that is called.
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
from treadle_kernels_triton.flatten import flatten_rows
from treadle_kernels_triton.hopper.gated_linear import GatedLinear, create_gated_linear
from treadle_kernels_triton.hopper.small_batch import (
    MAX_ROWS,
    SmallBatchLinear,
    choose_gated_tile_config,
    choose_tile_config,
    create_small_batch_linear,
)
from treadle_kernels_triton.norm import fused_add_partials_rms_norm
from treadle_kernels_triton.split_k_reduce import reduce_split_k
from treadle_kernels_triton.tiles import Tile, choose_tile, is_bias_faster
from treadle_triton_kit.pdl import launch_dependents, wait_for_previous_kernel

__all__ = (
    "ZeroBiases",
    "linear",
    "linear_silu_and_mul",
    "linear_split_k",
    "load",
    "small_linear",
    "small_linear_kernel",
)

MAX_SPLIT_K_ELEMENTS = 1 << 17
"""Numbers of a result up to which a kernel that adds its parts costs less than sharing the depth gains:
128 rows of 1024 features, 32 of 4096 (H200; at 256 of 1024 it is 8.0 us in place of torch's 6.4)."""


@triton.jit
def _load_row(x, offs_k, K):
    """float32 ``[1, BLOCK_K]`` of one row; zeros past its end."""
    return tl.load(x + offs_k, mask=offs_k < K, other=0.0).to(tl.float32)[None, :]


@triton.jit
def _store_row(out, offs_n, acc, bias, mask_n, HAS_BIAS: tl.constexpr):
    """Store one row of results from sums ``[BLOCK_N, BLOCK_K]``."""
    y = tl.sum(acc, axis=1)
    if HAS_BIAS:
        y += tl.load(bias + offs_n, mask=mask_n, other=0.0).to(tl.float32)
    tl.store(out + offs_n, y.to(out.dtype.element_ty), mask=mask_n)


@triton.jit
def small_linear_kernel(  # noqa: C901 (rows are unrolled by hand: a loop cannot carry a list of sums)
    x,  # [NUM_ROWS, K], rows x_stride elements apart
    weight,  # [N, K], or [2 * N, K] if GATED
    bias,  # [N], or [2 * N] if GATED
    out,  # [NUM_ROWS, N]
    N,
    K,
    x_stride,
    NUM_ROWS: tl.constexpr,  # 1 to 4; 1 if GATED
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SINGLE_K_BLOCK: tl.constexpr,  # depth <= BLOCK_K
    HAS_BIAS: tl.constexpr,
    GATED: tl.constexpr,  # out = silu(first half) * second half
    USE_PDL: tl.constexpr,
):
    """A program computes ``BLOCK_N`` features of all rows."""
    launch_dependents(USE_PDL)
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    mask_n = offs_n < N
    weight_ptrs = weight + offs_n.to(tl.int64)[:, None] * K + offs_k[None, :]
    up_ptrs = weight_ptrs + N.to(tl.int64) * K
    mask = mask_n[:, None] & (offs_k < K)[None, :]
    next_w = tl.load(weight_ptrs, mask=mask, other=0.0, eviction_policy="evict_first")
    next_w_up = next_w
    if GATED:
        next_w_up = tl.load(up_ptrs, mask=mask, other=0.0, eviction_policy="evict_first")
    wait_for_previous_kernel(USE_PDL)
    acc0 = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    acc1, acc2, acc3, acc_up = acc0, acc0, acc0, acc0
    for k_start in range(0, K, BLOCK_K):
        w, w_up = next_w.to(tl.float32), next_w_up.to(tl.float32)
        if not SINGLE_K_BLOCK:  # the next piece is on its way while this one is multiplied
            mask = mask_n[:, None] & (k_start + BLOCK_K + offs_k < K)[None, :]
            k_next = k_start + BLOCK_K
            next_w = tl.load(
                weight_ptrs + k_next, mask=mask, other=0.0, eviction_policy="evict_first"
            )
            if GATED:
                next_w_up = tl.load(
                    up_ptrs + k_next, mask=mask, other=0.0, eviction_policy="evict_first"
                )
        x_row = _load_row(x, k_start + offs_k, K)
        acc0 += w * x_row
        if GATED:
            acc_up += w_up * x_row
        if NUM_ROWS > 1:
            acc1 += w * _load_row(x + x_stride, k_start + offs_k, K)
        if NUM_ROWS > 2:
            acc2 += w * _load_row(x + 2 * x_stride, k_start + offs_k, K)
        if NUM_ROWS > 3:
            acc3 += w * _load_row(x + 3 * x_stride, k_start + offs_k, K)
    if GATED:
        gate_sum, up_sum = tl.sum(acc0, axis=1), tl.sum(acc_up, axis=1)
        if HAS_BIAS:
            gate_sum += tl.load(bias + offs_n, mask=mask_n, other=0.0).to(tl.float32)
            up_sum += tl.load(bias + N + offs_n, mask=mask_n, other=0.0).to(tl.float32)
        dtype: tl.constexpr = out.dtype.element_ty
        tl.store(
            out + offs_n, gate(gate_sum.to(dtype).to(tl.float32), up_sum.to(dtype)), mask=mask_n
        )
    else:
        _store_row(out, offs_n, acc0, bias, mask_n, HAS_BIAS)
        if NUM_ROWS > 1:
            _store_row(out + N, offs_n, acc1, bias, mask_n, HAS_BIAS)
        if NUM_ROWS > 2:
            _store_row(out + 2 * N, offs_n, acc2, bias, mask_n, HAS_BIAS)
        if NUM_ROWS > 3:
            _store_row(out + 3 * N, offs_n, acc3, bias, mask_n, HAS_BIAS)


def small_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, gated: bool, tile: Tile, use_pdl: bool
) -> Tensor:
    """``x [num_rows, in_features]`` times ``weight [features, in_features]``; the halves gated if asked for.

    At most four rows, one if gated; ``weight`` is contiguous, so are the rows of ``x``.
    """
    num_rows, in_features = x.shape
    out_features = weight.shape[0] // 2 if gated else weight.shape[0]
    out = torch.empty((num_rows, out_features), dtype=x.dtype, device=x.device)
    small_linear_kernel[(triton.cdiv(out_features, tile.block_n),)](
        x, weight, x if bias is None else bias, out, out_features, in_features, x.stride(0),
        NUM_ROWS=num_rows, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k, SINGLE_K_BLOCK=in_features <= tile.block_k,
        HAS_BIAS=bias is not None, GATED=gated, USE_PDL=use_pdl, num_warps=tile.num_warps, launch_pdl=use_pdl,
    )  # fmt: skip
    return out


def _try_small_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, gated: bool, use_pdl: bool
) -> Tensor | None:
    """The result for ``x [rows, depth]`` without tensor cores; ``None`` where that is slower."""
    tile = choose_tile(len(x), len(weight), x.shape[1], gated)
    if tile is None or not weight.is_contiguous():
        return None
    return small_linear(x, weight, bias, gated, tile, use_pdl)


def _try_small_batch(
    x: Tensor, weight: Tensor, bias: Tensor | None, use_pdl: bool, small_batch: SmallBatchLinear
) -> Tensor | None:
    """The same on tensor cores."""
    config = small_batch.tile_config(x, weight)
    if config is None or (config.num_splits > 1 and len(x) * len(weight) > MAX_SPLIT_K_ELEMENTS):
        return None
    if config.num_splits == 1:
        return small_batch.multiply(x, weight, bias, config)
    return reduce_split_k(
        small_batch.multiply(x, weight, None, config), bias, x.dtype, use_pdl=use_pdl
    )


class ZeroBiases:
    """Biases that change nothing, one for each width and type; captured graphs keep reading them."""

    def __init__(self) -> None:
        self._biases: dict[tuple[int, torch.dtype, torch.device], Tensor] = {}

    def bias(self, weight: Tensor) -> Tensor:
        key = (weight.shape[0], weight.dtype, weight.device)
        if key not in self._biases:
            self._biases[key] = weight.new_zeros(weight.shape[0])
        return self._biases[key]


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    use_pdl: bool = False,
    zero_biases: ZeroBiases | None = None,
    small_batch: SmallBatchLinear | None = None,
) -> Tensor:
    """The operation ``linear`` of ``treadle_layers_kit.kernel_ops``.

    ``small_batch``: what multiplies up to 256 rows on Hopper, where there is such a thing.
    """
    num_rows = x.numel() // x.shape[-1]
    if num_rows <= MAX_ROWS:
        rows = flatten_rows(x)
        y = _try_small_linear(rows, weight, bias, False, use_pdl)
        if y is None and small_batch is not None:
            y = _try_small_batch(rows, weight, bias, use_pdl, small_batch)
        if y is not None:
            return y.view(*x.shape[:-1], y.shape[1])
    if bias is None and zero_biases is not None and is_bias_faster(num_rows, *weight.shape):
        bias = zero_biases.bias(weight)
    return F.linear(x, weight, bias)


def linear_split_k(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    use_pdl: bool = False,
    zero_biases: ZeroBiases | None = None,
    small_batch: SmallBatchLinear | None = None,
) -> Tensor:
    """The operation ``linear_split_k`` of ``treadle_layers_kit.kernel_ops``; see ``linear``."""
    if small_batch is not None and bias is None and x.dim() == 2:
        config = small_batch.tile_config(x, weight)
        small_tile = choose_tile(len(x), len(weight), x.shape[1], False)
        if config is not None and config.num_splits > 1 and small_tile is None:
            return small_batch.multiply(x, weight, None, config)
    return linear(
        x, weight, bias, use_pdl=use_pdl, zero_biases=zero_biases, small_batch=small_batch
    )


def linear_silu_and_mul(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    use_pdl: bool = False,
    small_batch: SmallBatchLinear | None = None,
    gated_linear: GatedLinear | None = None,
) -> Tensor:
    """The operation ``linear_silu_and_mul`` of ``treadle_layers_kit.kernel_ops``.

    ``small_batch`` and ``gated_linear``: what multiplies and gates up to 256 rows, and many, in one kernel on
    Hopper, where there is such a thing.
    """
    y = None
    if x.numel() <= MAX_ROWS * x.shape[-1]:
        rows = flatten_rows(x)
        y = _try_small_linear(rows, weight, bias, True, use_pdl)
        if y is None and small_batch is not None and bias is None:
            config = small_batch.tile_config(rows, weight)
            if config is not None:
                y = small_batch.multiply(rows, weight, None, config)
    elif gated_linear is not None and bias is None:
        y = gated_linear.try_forward(x, weight)
    if y is not None:
        return y.view(*x.shape[:-1], y.shape[-1])
    return silu_and_mul(linear(x, weight, bias, use_pdl=use_pdl), use_pdl=use_pdl)


def load(op: str, request: KernelRequest) -> Callable[..., Tensor]:
    """``linear``, ``linear_split_k`` or ``linear_silu_and_mul`` with what the device allows."""
    capability = request.device.capability or (0, 0)
    use_pdl, is_hopper = capability >= (9, 0), capability[0] == 9
    choose_config = choose_gated_tile_config if op == "linear_silu_and_mul" else choose_tile_config
    out_features, in_features = request.shape["out_features"], request.shape["in_features"]
    small_batch = (
        create_small_batch_linear(request.dtype, out_features, in_features, choose_config)
        if is_hopper
        else None
    )
    if op == "linear_silu_and_mul":
        gated_linear = create_gated_linear(request.dtype) if is_hopper else None
        return partial(
            linear_silu_and_mul, use_pdl=use_pdl, small_batch=small_batch, gated_linear=gated_linear
        )
    if op == "linear_split_k" and small_batch is not None:
        _compile_split_k_norms(small_batch, out_features, use_pdl)
    zero_biases = ZeroBiases() if use_pdl else None
    function = linear_split_k if op == "linear_split_k" else linear
    return partial(function, use_pdl=use_pdl, zero_biases=zero_biases, small_batch=small_batch)


def _compile_split_k_norms(small_batch: SmallBatchLinear, hidden_size: int, use_pdl: bool) -> None:
    """What adds up the parts, before it is captured."""
    for num_splits in small_batch.split_counts:
        row = torch.zeros(1, hidden_size, dtype=small_batch.dtype, device="cuda")
        partials = torch.zeros(num_splits, 1, hidden_size, device="cuda")
        fused_add_partials_rms_norm(partials, row, row[0], 1.0, use_pdl=use_pdl)
