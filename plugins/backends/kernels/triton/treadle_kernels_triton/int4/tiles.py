"""Which tiles a product with four-bit weights runs with, and from how many rows on it does not.

This is the place to change after a measurement (``benchmarks/quantized.py``).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

__all__ = (
    "HOPPER_TILES",
    "MAX_ROWS",
    "HopperTile",
    "Tile",
    "choose_hopper_tile",
    "choose_tile",
    "split_k",
)

MAX_ROWS = 256
"""Beyond, without Hopper's kernel, the weight is unpacked and multiplied by the vendor's product."""
MIN_CHUNKS_PER_SPLIT = 4
"""Chunks of inputs (see ``packing``) that are worth a program of their own."""
LARGE_WEIGHT_ELEMENTS = 1 << 25
"""Elements of a large weight: those of a feed-forward layer of an 8B model, not of its attention."""


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


@dataclass(frozen=True, slots=True)
class HopperTile:
    """A tile of Hopper's kernel: 128 outputs of ``block_m`` rows, with ``num_stages`` chunks on their way or used."""

    block_m: int
    num_stages: int


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
HOPPER_MAX_ROWS = 2048
HOPPER_TILES = (HopperTile(32, 10), HopperTile(64, 8), HopperTile(128, 5), HopperTile(256, 3))
"""As many stages as fit into shared memory; for up to HOPPER_MAX_ROWS rows."""


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


def choose_hopper_tile(rows: int, in_features: int, out_features: int) -> HopperTile | None:
    """The tile of Hopper's kernel; ``None``: Triton's kernel and ``choose_tile``.

    Measured on one H200 (triton 3.6) in graphs, over cold weights of Qwen3-8B's shapes, in the order
    4096 x 6144, 4096 x 4096, 4096 x 24576 and 12288 x 4096 (in x out). Microseconds of this kernel
    with a layout of its own, Triton's, unpacking and cuBLAS, and cuBLAS in bfloat16:

    * 1 row: 12.2, 9.2, 27, 16.2; Triton's 8.7, 7.0, 23, 12.3, and it wins up to 16 rows;
    * 32 rows: 12.8, 9.5, 28.1, 16.7; Triton's 13.1, 8.8, 31.6, 17.4: large weights alone gain;
    * 64: 15.1, 11.4, 34.7, 19.8; 20.5, 13.3, 40.6, 25.6; 33, 20, 137, 70; 18, 13.7, 54, 33;
    * 128: 19.2, 14.8, 45.7, 27.7; Triton's 30.4, 18.6, 62.4, 35.8;
    * 256: 26.9, 19.4, 78.6, 44.2; with tiles of 256 31.0, 23.5, 77.6, 43.6; Triton's 38.4, 27.3, 113.6,
      63.1;
    * 512: 42.6, 28.2, 149.8, 77.3; with 256 44.8, 31.6, 133.4, 72.4; unpacking 52.3, 34.9, 214, 102;
    * 1024: 76.5, 52.3, 297, 152; with 256 75.7, 47.8, 272, 128.6; 85.4, 55.6, 344, 168; 73.6, 46.2,
      270, 133;
    * 4096 with 256: 306, 195, 1226, 634; 316, 204, 1285, 635; 305, 201, 1212, 608.

    So a tile of 256 rows takes 16/9 of the time of one of 128, once there are enough of them to fill
    the device: whichever pads less is taken. Beyond HOPPER_MAX_ROWS rows the weight is unpacked, for there the
    card's power is the limit, and numbers made anew for each tile cost more of it: 8,192 rows of
    4096 x 24576 take 2803 us with this kernel, 2635 unpacked first, if the card has no rest.
    """
    if rows > HOPPER_MAX_ROWS:
        return None
    is_large = in_features * out_features >= LARGE_WEIGHT_ELEMENTS
    if rows <= 16 or (rows <= 32 and not is_large):
        return None
    if rows <= 64:
        return HOPPER_TILES[0] if rows <= 32 else HOPPER_TILES[1]
    if rows <= (256 if is_large else 512):
        return HOPPER_TILES[2]
    return HOPPER_TILES[2] if 9 * -(-rows // 128) < 16 * -(-rows // 256) else HOPPER_TILES[3]


def split_k(tile: Tile, num_tiles: int, num_chunks: int, num_sms: int) -> tuple[int, int]:
    """Into how many shares the inputs of a tile are divided, and the chunks of a share."""
    target_splits = round(tile.programs_per_sm * num_sms / num_tiles)
    num_splits = max(1, min(num_chunks // MIN_CHUNKS_PER_SPLIT, target_splits))
    chunks_per_split = -(-num_chunks // num_splits)
    return -(-num_chunks // chunks_per_split), chunks_per_split
