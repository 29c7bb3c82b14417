"""Linear layers of two to 64 rows on tensor cores: the weight is the left side of the product.

The left side of a product on Hopper has 64 rows whatever happens, the right one as few as eight columns.
So ``weight · xᵀ`` reads the weight in full tiles and pads only ``x``, where ``x · weightᵀ`` would pad it to
64 rows. Where there are fewer tiles of features than multiprocessors, programs share the depth of a tile; the
one that is done last adds up what they have found, always in the same order, so that results do not
depend on who was last.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft_kernels_triton.activation import gate
from weft_kernels_triton.overlap import await_results, start_next
from weft_kernels_triton.tiles import Block

__all__ = ("Tickets", "swapped_kernel", "swapped_linear")


@triton.jit
def _write(total, out, bias, f, n, r, rows, width, BIAS: tl.constexpr, GATED: tl.constexpr):
    """Store the results from sums ``[BLOCK_N, BLOCK_R]`` of the weight's features ``n``."""
    kind: tl.constexpr = out.dtype.element_ty
    if BIAS:
        total += tl.load(bias + n, mask=f < width, other=0.0).to(tl.float32)[:, None]
    if GATED:
        own: tl.constexpr = total.shape[0] // 2
        halves = tl.reshape(total, (2, own, total.shape[1]))
        first, second = tl.split(tl.permute(halves, (1, 2, 0)))
        y = gate(first.to(kind).to(tl.float32), second.to(kind))
        f = tl.program_id(0) * own + tl.arange(0, own)
    else:
        y = total.to(kind)
    keep = (f < width)[:, None] & (r < rows)[None, :]
    tl.store(out + r[None, :] * width + f[:, None], y, mask=keep)


# Not specialized: one kernel for all numbers of rows up to BLOCK_R.
@triton.jit(do_not_specialize=("rows", "share", "splits"))
def swapped_kernel(
    x,  # [rows, depth], rows x_stride elements apart; rows <= BLOCK_R
    weight,  # [width, depth], or [2 * width, depth] if GATED
    bias,  # [width], or [2 * width] if GATED
    out,  # [rows, width]
    parts,  # float32 [splits, rows, features of weight] if SPLIT
    tickets,  # int32 [tiles] if SPLIT, zeros; left as they were
    rows,
    width,
    depth,
    share,  # pieces of BLOCK_K that a program multiplies
    splits,
    x_stride,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN: tl.constexpr,  # depth is a multiple of BLOCK_K
    SPLIT: tl.constexpr,  # splits > 1
    BIAS: tl.constexpr,
    GATED: tl.constexpr,  # out = silu(first half) * second half
    EARLY: tl.constexpr,
):
    """Program (tile of features, share of the depth) multiplies for all rows."""
    start_next(EARLY)
    i = tl.arange(0, BLOCK_N)
    if GATED:  # of both halves as many features, those that are multiplied with each other
        f = tl.program_id(0) * (BLOCK_N // 2) + i % (BLOCK_N // 2)
        n = f + i // (BLOCK_N // 2) * width
        features = 2 * width
    else:
        f = tl.program_id(0) * BLOCK_N + i
        n = f
        features = width
    r = tl.arange(0, BLOCK_R)
    k = tl.arange(0, BLOCK_K)
    inside, real = f < width, r < rows
    begin = tl.program_id(1) * share * BLOCK_K
    end = tl.minimum(begin + share * BLOCK_K, depth)
    await_results(EARLY)
    total = tl.zeros((BLOCK_N, BLOCK_R), tl.float32)
    left_at = weight + n.to(tl.int64)[:, None] * depth + k[None, :]
    right_at = x + r[None, :] * x_stride + k[:, None]
    for start in range(begin, end, BLOCK_K):
        left_mask, right_mask = inside[:, None], real[None, :]
        if not EVEN:
            left_mask = left_mask & (start + k < depth)[None, :]
            right_mask = right_mask & (start + k < depth)[:, None]
        left = tl.load(left_at + start, mask=left_mask, other=0.0)
        right = tl.load(right_at + start, mask=right_mask, other=0.0)
        total = tl.dot(left, right, total)
    if not SPLIT:
        _write(total, out, bias, f, n, r, rows, width, BIAS, GATED)
    else:
        keep = inside[:, None] & real[None, :]
        spot = r[None, :] * features + n[:, None]
        size = rows.to(tl.int64) * features
        tl.store(parts + tl.program_id(1) * size + spot, total, mask=keep)
        tl.debug_barrier()  # all threads have stored before one says so
        ticket = tickets + tl.program_id(0)
        if tl.atomic_add(ticket, 1, sem="acq_rel") == splits - 1:
            tl.debug_barrier()
            y = tl.zeros((BLOCK_N, BLOCK_R), tl.float32)
            for part in range(splits):
                # From L2, where other multiprocessors' stores are.
                y += tl.load(parts + part * size + spot, mask=keep, other=0.0, cache_modifier=".cg")
            _write(y, out, bias, f, n, r, rows, width, BIAS, GATED)
            tl.store(ticket, 0)


class Tickets:
    """Counters for tiles whose depth is shared: zeros whenever no kernel runs that counts in them.

    Captured graphs keep reading the same ones. Two products must not count in them at the same time, so
    whoever loads an operation has tickets of its own, and calls it on one stream at a time, as models call
    their layers. That the next kernel starts early is no harm: it does not count before this one has
    finished.
    """

    def __init__(self, processors: int | None = None) -> None:
        """``processors``: multiprocessors; by default as many as the device has."""
        self._processors = processors
        self._found: dict[torch.device, Tensor] = {}

    def on(self, device: torch.device) -> Tensor | None:
        """int32, one for each multiprocessor: no more tiles than that are shared.

        ``None`` if they would have to be made in a capture, whose replays alone would make them zeros.
        """
        found = self._found.get(device)
        if found is None:
            if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                return None
            found = torch.zeros(self._count(device), dtype=torch.int32, device=device)
            self._found[device] = found
        return found

    def _count(self, device: torch.device) -> int:
        if self._processors is not None or device.type != "cuda":
            return self._processors or 1
        return int(torch.cuda.get_device_properties(device).multi_processor_count)


def swapped_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    gated: bool,
    block: Block,
    tickets: Tensor,
    early: bool,
) -> Tensor:
    """``x [rows, depth]`` times ``weight [features, depth]``; the halves gated if asked for.

    At most ``block.rows`` rows; ``weight`` is contiguous, so are the rows of ``x``.
    """
    rows, depth = x.shape
    features = weight.shape[0]
    width, own = (n // 2 if gated else n for n in (features, block.features))
    tiles, pieces = triton.cdiv(width, own), triton.cdiv(depth, block.depth)
    share = triton.cdiv(pieces, block.splits) if tiles <= len(tickets) else pieces
    splits = triton.cdiv(pieces, share)
    out = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    parts = out
    if splits > 1:
        parts = torch.empty((splits, rows, features), dtype=torch.float32, device=x.device)
    swapped_kernel[(tiles, splits)](
        x, weight, x if bias is None else bias, out, parts, tickets,
        rows, width, depth, share, splits, x.stride(0),
        BLOCK_N=block.features, BLOCK_R=block.rows, BLOCK_K=block.depth,
        EVEN=depth % block.depth == 0, SPLIT=splits > 1, BIAS=bias is not None, GATED=gated,
        EARLY=early, num_warps=block.warps, num_stages=block.stages, launch_pdl=early,
    )  # fmt: skip
    return out
