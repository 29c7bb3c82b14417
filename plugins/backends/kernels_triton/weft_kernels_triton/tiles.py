"""Which tiles a small linear runs with, and where torch's own linear is the better one.

Measured on one H200 with ``benchmarks/kernels.py --sweep``, in graphs, over cold weights. At one row
every shape of Qwen3-0.6B and 8B gains (1.1 to 6 times torch's speed); at two rows those of up to
4,096 features; at three and four only those of few features, for which cuBLAS has too few
tiles to fill the device. From five rows on tensor cores are the faster ones: see ``choose_block``, and
``swapped`` for what they do.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ("MOST_ROWS", "Block", "Tile", "block_of", "choose", "choose_block", "with_bias")

LARGEST = 1 << 27
"""Elements of a weight from which cuBLAS is at the card's bandwidth: output heads."""
LEAST = 1024
"""Features, and depth, of the smallest weight for which tensor cores were measured."""
WIDE = 64
"""Features of a block: the rows of one instruction of Hopper's tensor cores."""
MOST_ROWS = 64
"""The most that were measured on tensor cores."""


@dataclass(frozen=True, slots=True)
class Tile:
    """What one program takes of the weight: ``features`` rows, ``depth`` columns at a time."""

    features: int
    depth: int
    warps: int


@dataclass(frozen=True, slots=True)
class Block:
    """What one program multiplies on tensor cores: ``features`` of the weight by up to ``rows`` of ``x``,
    ``depth`` columns at a time, ``stages`` pieces on their way; ``splits`` programs share the depth."""

    features: int
    rows: int
    depth: int
    warps: int
    stages: int
    splits: int


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


def choose_block(
    rows: int, features: int, depth: int, gated: bool, processors: int
) -> Block | None:
    """The block for ``x [rows, depth]`` and a weight ``[features, depth]`` where ``choose`` has no tile.

    ``None``: use torch.

    From a sweep on one H200 (132 multiprocessors, torch 2.11) over the shapes of Qwen3-0.6B and 8B at 2
    to 64 rows, in graphs, over cold weights, beside the faster of torch's linears with a bias and
    without. Chosen where it took at least 3 % less time, and where it is even in shapes beside those:

    * up to 16 rows for every shape: 4 to 8 % for large weights (15.7 us in place of 16.8 for 6144 x 4096),
      7 to 33 % for small ones and 4096 x 4096 (11.4 in place of 13.6; 5.1 of 7.6 for 1024 x 3072); it is
      even with torch for 24576 x 4096;
    * up to 32 up to 2048 features (16 and 22 %), for 6144 x 1024 (10 %) and 4096 x 4096 (4 %); slower for
      4096 x 1024 and, than a bias of zeros, for 4096 x 12288;
    * up to 64 for 1024 x 3072 (6 %) and 6144 x 1024 (11 %).

    With the gate in it no kernel of 1 to 2 us follows, so up to 32 rows a block is chosen for every shape:
    26 to 33 % for 6144 x 1024, 3 to 11 % for 24576 x 4096. A piece of 256 columns, three on their way, is
    best where there is one program for a multiprocessor, and small ones where there are several;
    sharing the depth among more programs than multiprocessors was never the best.
    """
    small, large = min(features, depth) < LEAST, features * depth > LARGEST
    if not 2 <= rows <= MOST_ROWS or small or large:
        return None
    block = block_of(rows, features, depth, processors)
    narrow = features <= 2048
    whole = depth <= 1024 and block.splits == 1 and _tiles(features) <= processors
    if rows <= 16:
        gains = True
    elif rows <= 32:
        gains = gated or whole or narrow or (features <= 4096 and 2048 <= depth <= 4096)
    else:
        gains = whole or (narrow and depth >= 3072)
    return block if gains else None


def block_of(rows: int, features: int, depth: int, processors: int) -> Block:
    """The best block, whether or not it is better than torch: one program for a multiprocessor."""
    tiles = _tiles(features)
    splits = max(1, min(depth // 512, round(processors / tiles)))
    across = 16 if rows <= 16 else 32 if rows <= 32 else 64
    if splits == 1 and rows > 32:
        return Block(WIDE, across, 128, 4, 4, splits)
    if tiles > processors:
        return Block(WIDE, across, 64, 4, 6, splits)
    return Block(WIDE, across, 256, 4, 3, splits)


def _tiles(features: int) -> int:
    return -(-features // WIDE)


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
