"""Which tiles a small linear runs with, and where torch's own linear is the better one.

Measured on one H200 with ``benchmarks/kernels.py --sweep``, in graphs, over cold weights. At one row
every shape of Qwen3-0.6B and 8B gains (1.1 to 6 times torch's speed); at two rows those of up to
4,096 features; at three and four only those of few features, for which cuBLAS has too few
tiles to fill the device. Tensor cores on 16 padded rows (tiles of 8 to 32 features, with the weight
announced to L2) were slower than cuBLAS from five rows on.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ("Tile", "choose", "with_bias")

LARGEST = 1 << 27
"""Elements of a weight from which cuBLAS is at the card's bandwidth: output heads."""


@dataclass(frozen=True, slots=True)
class Tile:
    """What one program takes of the weight: ``features`` rows, ``depth`` columns at a time."""

    features: int
    depth: int
    warps: int


def choose(rows: int, features: int, depth: int, gated: bool) -> Tile | None:
    """The tile for ``x [rows, depth]`` and a weight ``[features, depth]``; ``None``: use torch."""
    narrow = features <= 2048
    if not 1 <= rows <= (1 if gated else 4) or features * depth > LARGEST:
        return None
    if gated:
        return Tile(4, 1024, 4) if depth <= 1024 else Tile(2, 2048, 4)
    if rows == 1:
        if narrow:
            return Tile(4, 2048, 4)
        return Tile(2, 2048, 4) if features > 4096 and depth > 1024 else Tile(8, 512, 4)
    if rows == 2 and not narrow:
        return Tile(4, 1024, 4) if features <= 4096 else None
    if rows == 2:
        return Tile(2, 2048, 4)
    return Tile(4, 1024, 4) if narrow else None


def with_bias(rows: int, features: int, depth: int) -> bool:
    """Whether torch multiplies faster if there is something to add, though it be zeros.

    Products with a bias go to cuBLASLt, whose choice of kernels for large, deep weights of few features
    is the faster one: measured for 4096 features of a depth of 4096 and 12288 (Qwen3-8B's output and down
    projections, one H200, torch 2.11), by 7 to 15 % at 32 and 96 rows, 10 % in sum at 192, 4 % at 224, 2 %
    at 256; at 128 it is slower. For the other shapes of Qwen3-0.6B and 8B the choice is the same, and the
    bias costs 0.2 to 1 us.
    """
    deep = 2048 <= features <= 4096 <= depth
    return deep and (17 <= rows <= 112 or 161 <= rows <= 256)
