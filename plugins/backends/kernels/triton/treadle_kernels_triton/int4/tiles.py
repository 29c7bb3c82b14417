"""Which tiles a product with four-bit weights runs with, and from how many rows on it does not.

This is the place to change after a measurement (``benchmarks/quantized.py``).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

__all__ = (
    "MAX_ROWS",
    "Tile",
    "choose_tile",
    "split_k",
)

MAX_ROWS = 256
"""Beyond, without Hopper's kernel, the weight is unpacked and multiplied by the vendor's product."""
MIN_CHUNKS_PER_SPLIT = 4
"""Chunks of inputs (see ``packing``) that are worth a program of their own."""


@dataclass(frozen=True, slots=True)
class Tile:
    """What one program of Triton's kernel computes: ``block_n`` outputs of ``block_m`` rows, by ``num_warps`` warps.

    ``num_stages`` tiles of the weight less one are on their way at a time. About ``programs_per_sm`` programs
    for each multiprocessor are made by giving each a share of the inputs.
    ``fold_scales``: the scale multiplies the weight, rounded, instead of the sums of a group; with
    accumulators for nothing but the result, many rows fit into registers.
    """

    block_n: int
    block_m: int
    num_warps: int
    num_stages: int
    programs_per_sm: int
    fold_scales: bool = False


SMALL_M_TILES = (
    Tile(128, 8, 4, 4, 2),
    Tile(128, 16, 4, 4, 2),
    Tile(64, 32, 4, 5, 2),
    Tile(128, 64, 8, 4, 1),
)
"""For up to as many rows as the tile has; in this order."""
MEDIUM_M_TILE = Tile(128, 64, 4, 3, 2)
"""For up to 128 rows, folded for FOLD_MIN_FEATURES outputs."""
FOLD_MIN_FEATURES = 16384
LARGE_M_TILE = Tile(128, 128, 8, 3, 1)
"""For up to MAX_ROWS."""


def choose_tile(rows: int, out_features: int) -> Tile | None:
    """The tile for ``x [rows, in_features]`` times ``[in_features, out_features]``; ``None``: unpack the weight.

    From a sweep on one H200 over the shapes of Qwen3-8B. (Starting early, with the weight announced to L2
    before the wait, took 10 to 50 % longer for up to 16 rows.)
    """
    if not 1 <= rows <= MAX_ROWS:
        return None
    if rows > 128:
        return LARGE_M_TILE
    if rows > 64:
        return replace(MEDIUM_M_TILE, fold_scales=out_features >= FOLD_MIN_FEATURES)
    return next(tile for tile in SMALL_M_TILES if rows <= tile.block_m)


def split_k(tile: Tile, num_tiles: int, num_chunks: int, num_sms: int) -> tuple[int, int]:
    """Into how many shares the inputs of a tile are divided, and the chunks of a share."""
    target_splits = round(tile.programs_per_sm * num_sms / num_tiles)
    num_splits = max(1, min(num_chunks // MIN_CHUNKS_PER_SPLIT, target_splits))
    chunks_per_split = -(-num_chunks // num_splits)
    return -(-num_chunks // chunks_per_split), chunks_per_split
