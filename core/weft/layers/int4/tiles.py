"""Which tiles a product with four-bit weights runs with, and from how many rows on it does not.

This is the place to change after a measurement (``benchmarks/quantized.py``).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

__all__ = ("MOST_ROWS", "Tile", "choose", "shares")

MOST_ROWS = 256
"""Beyond, the weight is unpacked once and multiplied by the vendor's product."""
FEWEST_CHUNKS = 4
"""Chunks of inputs (see ``packing``) that are worth a program of their own."""


@dataclass(frozen=True, slots=True)
class Tile:
    """What one program computes: ``outputs`` of ``rows``, by ``warps`` warps.

    ``stages`` tiles of the weight less one are on their way at a time. About ``resident`` programs
    for each multiprocessor are made by giving each a share of the inputs.
    ``fold``: the scale multiplies the weight, rounded, instead of the sums of a group; with
    accumulators for nothing but the result, many rows fit into registers.
    """

    outputs: int
    rows: int
    warps: int
    stages: int
    resident: int
    fold: bool = False


FEW = (
    Tile(128, 8, 4, 4, 2),
    Tile(128, 16, 4, 4, 2),
    Tile(64, 32, 4, 5, 2),
    Tile(128, 64, 8, 4, 1),
)
"""For up to as many rows as the tile has; in this order."""
MANY = Tile(128, 64, 4, 3, 2)
"""For up to 128 rows, folded for WIDE outputs."""
WIDE = 16384
MOST = Tile(128, 128, 8, 3, 1)
"""For up to MOST_ROWS."""


def choose(rows: int, outputs: int) -> Tile | None:
    """The tile for ``x [rows, inputs]`` times ``[inputs, outputs]``; ``None``: unpack the weight.

    From a sweep on one H200 over the shapes of Qwen3-8B. (Starting early, with the weight announced to L2
    before the wait, took 10 to 50 % longer for up to 16 rows.)
    """
    if not 1 <= rows <= MOST_ROWS:
        return None
    if rows > 128:
        return MOST
    if rows > 64:
        return replace(MANY, fold=outputs >= WIDE)
    return next(tile for tile in FEW if rows <= tile.rows)


def shares(tile: Tile, tiles: int, chunks: int, processors: int) -> tuple[int, int]:
    """Into how many shares the inputs of a tile are divided, and the chunks of a share."""
    wanted = round(tile.resident * processors / tiles)
    count = max(1, min(chunks // FEWEST_CHUNKS, wanted))
    share = -(-chunks // count)
    return -(-chunks // share), share
