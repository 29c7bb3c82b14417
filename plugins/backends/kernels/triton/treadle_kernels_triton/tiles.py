"""Which tiles a small linear runs with, and where torch's own linear is the better one.

Measured on one H200 with ``benchmarks/kernels.py --sweep``, in graphs, over cold weights. At one row
every shape of Qwen3-0.6B and 8B gains (1.1 to 6 times torch's speed); at two rows those of up to
4,096 features; at three and four only those of few features, for which cuBLAS has too few
tiles to fill the device. From five rows on tensor cores are the faster ones: see ``hopper.small_batch``.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ("Tile", "choose_tile", "is_bias_faster")

MAX_WEIGHT_ELEMENTS = 1 << 27
"""Elements of a weight from which cuBLAS is at the card's bandwidth: output heads."""


@dataclass(frozen=True, slots=True)
class Tile:
    """What one program takes of the weight: ``block_n`` rows, ``block_k`` columns at a time."""

    block_n: int
    block_k: int
    num_warps: int


def choose_tile(rows: int, out_features: int, in_features: int, gated: bool) -> Tile | None:
    """The tile for ``x [rows, in_features]`` and a weight ``[out_features, in_features]``; ``None``: use torch."""
    is_narrow = out_features <= 2048
    if not 1 <= rows <= (1 if gated else 4) or out_features * in_features > MAX_WEIGHT_ELEMENTS:
        return None
    if gated:
        return Tile(4, 1024, 4) if in_features <= 1024 else Tile(2, 2048, 4)
    if rows == 1:
        if is_narrow:
            return Tile(4, 2048, 4)
        return Tile(2, 2048, 4) if out_features > 4096 and in_features > 1024 else Tile(8, 512, 4)
    if rows == 2 and not is_narrow:
        return Tile(4, 1024, 4) if out_features <= 4096 else None
    if rows == 2:
        return Tile(2, 2048, 4)
    return Tile(4, 1024, 4) if is_narrow else None


def is_bias_faster(rows: int, out_features: int, in_features: int) -> bool:
    """Whether torch multiplies faster if there is something to add, though it be zeros.

    Products with a bias go to cuBLASLt, whose choice of kernels for large, deep weights of few features
    is the faster one. Measured on one H200 (torch 2.11) at every size that is captured, for Qwen3-8B's
    output projection, 4096 x 4096: 18 to 19 % at 96, 112 and 160 rows, 5 to 11 % at 144 and at 176 to 224,
    slower at 128 and 256; for its down projection, 4096 x 12288: 8 to 11 % from 64 to 112 rows, 18 % at
    192, slower elsewhere. For the other shapes of Qwen3-0.6B and 8B the choice is the same, and the bias costs
    0.2 to 1 us.
    """
    if not 2048 <= out_features <= 4096 <= in_features:
        return False
    return 17 <= rows <= 112 or (129 <= rows <= 240 if in_features < 8192 else 177 <= rows <= 192)
