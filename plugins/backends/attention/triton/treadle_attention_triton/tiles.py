"""Which tile shapes to run: plain numbers, chosen from the shape of the problem.

The limits are Hopper's: 227 KB of shared memory a program, 64 K registers a multiprocessor, and
warp-group products from 64 rows on.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ("Tile", "choose_num_splits", "decode_tile", "next_power_of_2", "prefill_tile")


@dataclass(frozen=True, slots=True)
class Tile:
    """``block_m`` rows of queries by ``block_n`` keys; ``num_stages`` tiles are in flight.

    ``max_registers`` is the most of a thread, so that two programs fit a multiprocessor.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    max_registers: int | None = None


DRAFT_SPLITS = 16


def next_power_of_2(n: int) -> int:
    """The least power of two that is not below ``n``."""
    return 1 << (n - 1).bit_length()


def decode_tile(
    queries: int, head_dim: int, itemsize: int, programs: int = 1, fp8_cache: bool = False
) -> Tile:
    """For few queries, the heads of a group counted: bound by memory, so several tiles in flight.

    ``programs`` is how many there are without splits, rows times kv heads. Two warps took the least
    time at every batch and length that was tried, most of all for a cache in fp8 (``fp8_cache``). Up to a
    thousand programs want a fourth tile in flight (16 bits, heads of 128, rows of eight kv heads: 4 to
    10 % faster at 32 and 64 rows, 1 % at 128). Keys by 128 gained 1 to 3 % at 256 rows by themselves and
    lost 0.3 % in whole steps.
    """
    rows = max(16, next_power_of_2(queries))
    key_bytes = next_power_of_2(head_dim) * itemsize  # bytes of one key
    if rows == 16 and key_bytes == 256 and not fp8_cache:
        return Tile(16, 64, 2, 4 if programs <= 1024 else 3)
    keys = 64 if key_bytes <= 256 else 32 if key_bytes <= 512 else 16
    return Tile(rows, keys, 2 if rows == 16 and key_bytes <= 256 else 4, 3)


def prefill_tile(
    queries: int,
    gqa_group: int,
    head_dim: int,
    itemsize: int,
    max_seq_len: int = 0,
    fp8_cache: bool = False,
) -> Tile:
    """For rows of up to ``queries`` new tokens and ``max_seq_len`` keys; the cache is fp8 if ``fp8_cache``.

    Two programs on a multiprocessor hide each other's softmax: 6 % faster at 2,048 keys, 9 % at 500.
    Where programs are long, one with more tiles in flight is up to 14 % faster.
    """
    key_bytes = next_power_of_2(head_dim) * itemsize
    rows = min(128, max(16, next_power_of_2(queries * gqa_group), next_power_of_2(gqa_group)))
    if itemsize == 4:  # no tensor cores in full float32: registers are the limit
        return Tile(
            min(rows, max(32, next_power_of_2(gqa_group))), 32 if key_bytes <= 512 else 16, 4, 2
        )
    if rows < 128:
        return Tile(rows, 64 if key_bytes <= 256 else 32, 4, 3 if key_bytes <= 256 else 2)
    if (
        key_bytes == 256 and fp8_cache
    ):  # what turns fp8 into float16 takes the registers of a larger tile
        return Tile(64, 64, 4, 3)
    if key_bytes == 256 and max_seq_len <= 4096:
        return Tile(128, 64, 8, 2, max_registers=128)
    return Tile(128, 64, 8, 3 if key_bytes <= 256 else 2)


def choose_num_splits(rows: int, kv_heads: int, max_tiles: int, num_sms: int) -> int:
    """How many programs share the keys of one row; ``max_tiles`` counts the tiles of the longest.

    Two programs a multiprocessor, but no more than 16 a row, because joining them takes time too,
    unless that leaves multiprocessors idle. Up to four tiles are done sooner than split and joined.
    A power of two that does not depend on the length, so that a step of few tokens compiles no
    variant that a captured one has not.
    """
    if max_tiles <= 4:
        return 1
    programs = max(1, rows * kv_heads)
    target = min(2 * num_sms // programs, max(16, num_sms // programs), 64)
    return 1 << max(target, 1).bit_length() - 1


def choose_draft_splits(rows: int, kv_heads: int, max_tiles: int, num_sms: int) -> int:
    """``choose_num_splits`` for rows of drafts: all or nothing, so that a step compiles no new variant."""
    return DRAFT_SPLITS if max_tiles > 4 and rows * kv_heads <= num_sms else 1
