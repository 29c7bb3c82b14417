"""Which tiles products with packed weights run with, and from how many rows on the weight is unpacked.

This is the place to change after a measurement (``benchmarks/packed.py``).
"""

from __future__ import annotations

from treadle_kernels_triton.int4.tiles import LARGE_M_TILE, SMALL_M_TILES, Tile
from treadle_layers_kit.packed_layout import Levels

__all__ = ("TILES", "choose_packed_tile", "max_rows", "tile_of")

TILES = (*SMALL_M_TILES, LARGE_M_TILE)
"""For up to as many rows as the tile has, in this order; the last one for all others."""


def max_rows(levels: Levels, *, has_offsets: bool) -> int:
    """Beyond, the weight is unpacked and multiplied by the vendor's product.

    Measured on one H100 over the shapes of Qwen3-8B: for 256 rows and bytes the kernel takes 32, 28, 98 and 64
    us, unpacking and cuBLAS 55, 37, 203 and 112. Four bits take 70, 43, 209 and 113 of 52, 34, 192 and 106, and
    half as long for 128 rows. Sums of activations for offsets cost as much again, from 64 rows on.
    """
    if has_offsets:
        return 32
    return 256 if isinstance(levels, str) else 128


def choose_packed_tile(rows: int, levels: Levels, *, has_offsets: bool) -> Tile | None:
    """``None``: unpack the weight."""
    if not 1 <= rows <= max_rows(levels, has_offsets=has_offsets):
        return None
    return tile_of(rows)


def tile_of(rows: int) -> Tile:
    """A number is made once for all rows of a tile, so that one tile takes as many as it can."""
    return next((tile for tile in TILES if rows <= tile.block_m), LARGE_M_TILE)
