"""Which tiles a product of few rows runs with: plain numbers, chosen from the shape of the problem."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ("BLOCK", "Tile", "choose")

BLOCK = 128
"""Inputs, and outputs, of one scale where scales are by block."""


@dataclass(frozen=True, slots=True)
class Tile:
    """One program multiplies ``wide`` outputs by ``rows``, ``deep`` inputs at a time, ``stages`` of them
    on their way; ``splits`` programs share the inputs."""

    wide: int
    rows: int
    deep: int
    warps: int
    stages: int
    splits: int = 1


def choose(rows: int, width: int, depth: int, blocks: bool = False) -> Tile | None:
    """For ``[rows, depth]`` by ``[width, depth]``; ``None``: cuBLAS is the better one.

    Measured on one H200 with ``benchmarks/fp8.py``, the shapes of Qwen3-8B: with a scale for each row the
    kernel takes 0.5 to 0.9 of cuBLAS's time for up to 64 rows, and of 4,096 outputs for up to 128.
    """
    narrow, deep = width <= 4096, depth > 8192
    if blocks:
        if rows > 64:
            return None
        return Tile(64, _columns(rows), BLOCK, 4, 4, 4 if width <= 8192 else 1)
    if rows > 128 or (rows > 64 and not narrow):
        return None
    if rows > 64:
        return Tile(128, 128, 128, 8, 4, 4) if deep else Tile(64, 64, 256, 4, 4)
    if rows > 32:
        if width > 16384:
            return Tile(128, 64, 128, 4, 4)
        return Tile(64, 64, 128, 4, 5, 4) if deep else Tile(64, 64, 256, 4, 4, 2 if narrow else 1)
    if rows > 16 and width > 16384:
        return Tile(64, 32, 128, 4, 5)
    return Tile(64, _columns(rows), 256, 4, 4, 4 if narrow and depth >= 2048 else 1)


def _columns(rows: int) -> int:
    return 16 if rows <= 16 else 32 if rows <= 32 else 64
