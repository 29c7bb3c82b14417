"""Which tiles products with packed weights run with, and from how many rows on the weight is unpacked.

This is the place to change after a measurement (``benchmarks/packed.py``).
"""

from __future__ import annotations

from treadle_kernels_triton.int4.tiles import LARGE_M_TILE, SMALL_M_TILES, Tile
from treadle_layers_kit.packed_layout import Levels

__all__ = ("choose_experts_tile", "choose_packed_tile", "max_rows", "tile_of")

FEW_ROWS_TILES = (Tile(128, 8, 4, 3, 6), Tile(128, 16, 4, 3, 6))
"""For up to as many rows as the tile has. Many programs for each multiprocessor hide that looking up numbers takes
many instructions, one after the other: two in place of six take up to 1.5 times as long."""
FOLDED_TILES = (*FEW_ROWS_TILES, Tile(128, 32, 4, 3, 4), Tile(128, 64, 8, 3, 2))
FOLDED_LAST = Tile(128, 64, 4, 3, 2)
TILES = (*FEW_ROWS_TILES, *SMALL_M_TILES[2:])
EXPERTS_TILES = (*FOLDED_TILES[:3], FOLDED_LAST)
EXPERTS_LAST = Tile(128, 128, 4, 3, 1)


def max_rows(
    levels: Levels, *, has_offsets: bool, folds: bool = False, has_scales: bool = False
) -> int:
    """Beyond, the weight is unpacked and multiplied by the vendor's product.

    Measured on one H100 over the shapes of Qwen3-8B: for 256 rows and bytes the kernel takes 32, 28, 98 and 64
    us, unpacking and cuBLAS 55, 37, 203 and 112. Four bits take 70, 43, 209 and 113 of 52, 34, 192 and 106, and
    half as long for 128 rows. MXFP4, whose scales are folded, takes 60, 36, 136 and 94 for 256 rows, NVFP4 73, 47, 166
    and 128 of 56, 37, 205 and 113.

    On one H200, offsets of groups of 32 (Q4_K) take 39, 20, 96 and 43 us of 35, 23, 142 and 73 for 64 rows, and
    120, 55, 335 and 143 of 37, 27, 147 and 77 for 128; bytes with scales of groups of 16 (Q6_K) 36, 24, 92 and 61 of
    43, 28, 158 and 83, and 69, 32, 186 and 87 of 44, 31, 161 and 86.
    """
    is_bytes = isinstance(levels, str)
    if has_offsets or (is_bytes and has_scales):
        return 64
    return 256 if is_bytes or folds else 128


def choose_packed_tile(
    rows: int,
    levels: Levels,
    *,
    has_offsets: bool,
    folds: bool = False,
    has_scales: bool = False,
) -> Tile | None:
    """``None``: unpack the weight. ``folds``: scales are folded into the numbers.

    Folding takes 11.6, 9.1, 26.9 and 17.3 us for one row and MXFP4, 24.3, 20.9, 64.8 and 35.6 for 64, and 45, 27, 73
    and 55 for 128, on one H100 over the shapes of Qwen3-8B.
    """
    most = max_rows(levels, has_offsets=has_offsets, folds=folds, has_scales=has_scales)
    if not 1 <= rows <= most:
        return None
    return tile_of(rows, folds=folds)


def tile_of(rows: int, *, folds: bool = False) -> Tile:
    """A number is made once for all rows of a tile, so that one tile takes as many as it can."""
    tiles, last = (FOLDED_TILES, FOLDED_LAST) if folds else (TILES, LARGE_M_TILE)
    return next((tile for tile in tiles if rows <= tile.block_m), last)


def choose_experts_tile(choices: int, experts: int, *, folds: bool) -> Tile:
    """For so many choices: room for twice the mean of an expert, because a second tile makes its numbers again.

    With gpt-oss-20b's 32 experts and folded scales, one H100 takes 24.4 and 20.5 us (gate and up, down) for one token,
    115 and 63 for 32, 215 and 114 for 256, 2,511 and 1,766 for 8,192.
    """
    mean = -(-choices // experts)
    if not folds:
        return tile_of(mean)
    return next((tile for tile in EXPERTS_TILES if 2 * mean <= tile.block_m), EXPERTS_LAST)
