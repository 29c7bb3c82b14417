"""Rows of a bitmask: 32-bit words, bit ``i % 32`` of word ``i // 32`` is token id ``i``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ("BitmaskRow", "empty_row", "forbid_token", "row_of", "write_row")

BitmaskRow = np.ndarray[tuple[int], np.dtype[np.uint32]]


def empty_row(num_tokens: int) -> BitmaskRow:
    """Return a row that allows none of ``num_tokens`` ids."""
    return np.zeros(-(-num_tokens // 32), dtype=np.uint32)


def row_of(tokens: Iterable[int], num_tokens: int) -> BitmaskRow:
    """Return a row that allows exactly ``tokens``, all of them less than ``num_tokens``."""
    bits = np.zeros(-(-num_tokens // 32) * 32, dtype=np.uint8)
    bits[np.fromiter(tokens, dtype=np.int64)] = 1
    return np.packbits(bits, bitorder="little").view(np.uint32)


def forbid_token(row: BitmaskRow, token: int) -> None:
    """Clear the bit of ``token``."""
    row[token >> 5] &= ~np.uint32(1 << (token & 31))


def write_row(bitmask: Tensor, index: int, row: BitmaskRow) -> None:
    """Copy ``row`` into ``bitmask[index]``, an int32 tensor on the CPU. Extra words are dropped."""
    bitmask[index].numpy().view(np.uint32)[:] = row[: bitmask.shape[1]]
