"""Which tile shapes to run: plain numbers, chosen from the shape of the problem.

The limits are Hopper's: 227 KB of shared memory a program, 64 K registers a multiprocessor, and
warp-group products from 64 rows on.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ("Tile", "decode_tile", "power", "prefill_tile", "splits")


@dataclass(frozen=True, slots=True)
class Tile:
    """``rows`` of queries by ``keys``; ``stages`` tiles are in flight.

    ``registers`` is the most of a thread, so that two programs fit a multiprocessor.
    """

    rows: int
    keys: int
    warps: int
    stages: int
    registers: int | None = None


def power(n: int) -> int:
    """The least power of two that is not below ``n``."""
    return 1 << (n - 1).bit_length()


def decode_tile(
    queries: int, size: int, itemsize: int, programs: int = 1, narrow: bool = False
) -> Tile:
    """For few queries, the heads of a group counted: bound by memory, so several tiles in flight.

    ``programs`` is how many there are without splits, rows times kv heads. Two warps took the least
    time at every batch and length that was tried, most of all for a cache in fp8 (``narrow``). Up to a
    thousand programs want a fourth tile in flight (16 bits, heads of 128, rows of eight kv heads: 4 to
    10 % faster at 32 and 64 rows, 1 % at 128). Keys by 128 gained 1 to 3 % at 256 rows by themselves and
    lost 0.3 % in whole steps.
    """
    rows = max(16, power(queries))
    tile = power(size) * itemsize  # bytes of one key
    if rows == 16 and tile == 256 and not narrow:
        return Tile(16, 64, 2, 4 if programs <= 1024 else 3)
    keys = 64 if tile <= 256 else 32 if tile <= 512 else 16
    return Tile(rows, keys, 2 if rows == 16 and tile <= 256 else 4, 3)


def prefill_tile(
    queries: int, group: int, size: int, itemsize: int, longest: int = 0, narrow: bool = False
) -> Tile:
    """For rows of up to ``queries`` new tokens and ``longest`` keys; the cache is fp8 if ``narrow``.

    Two programs on a multiprocessor hide each other's softmax: 6 % faster at 2,048 keys, 9 % at 500.
    Where programs are long, one with more tiles in flight is up to 14 % faster.
    """
    wide = power(size) * itemsize
    rows = min(128, max(16, power(queries * group), power(group)))
    if itemsize == 4:  # no tensor cores in full float32: registers are the limit
        return Tile(min(rows, max(32, power(group))), 32 if wide <= 512 else 16, 4, 2)
    if rows < 128:
        return Tile(rows, 64 if wide <= 256 else 32, 4, 3 if wide <= 256 else 2)
    if wide == 256 and narrow:  # what turns fp8 into float16 takes the registers of a larger tile
        return Tile(64, 64, 4, 3)
    if wide == 256 and longest <= 4096:
        return Tile(128, 64, 8, 2, registers=128)
    return Tile(128, 64, 8, 3 if wide <= 256 else 2)


def splits(rows: int, kv_heads: int, longest: int, processors: int) -> int:
    """How many programs share the keys of one row; ``longest`` counts the tiles of the longest.

    Two programs a multiprocessor, but no more than 16 a row, because joining them takes time too,
    unless that leaves multiprocessors idle. Up to four tiles are done sooner than split and joined.
    A power of two, so that few variants are compiled.
    """
    if longest <= 4:
        return 1
    programs = max(1, rows * kv_heads)
    wanted = min(2 * processors // programs, max(16, processors // programs), longest, 64)
    return 1 << max(wanted, 1).bit_length() - 1
