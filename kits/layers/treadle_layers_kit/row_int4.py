"""Four-bit weights row by row, as libraries read them that run whole steps of a decoder on a CPU.

Codes are numbers from -8 to 7 in two's complement, or from 0 to 15 for one of 16 levels, 128 of a row in 64 bytes: the
lower halves of the bytes are the first 64, the upper halves the others. A group, which is a multiple of 32 inputs, has
a scale and may have an offset: the weight is ``number · scale + offset``.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from treadle_layers_kit.row_weight import PIECE, RowWeight

__all__ = ("BLOCK", "GROUP", "RUN", "RowInt4", "pack_rows", "unpack_rows")

RUN = 64
"""Inputs whose codes have the same half of their bytes."""
BLOCK = 2 * RUN
GROUP = 32
"""Groups are multiples of it."""
NUMBERS = tuple(float(code - 8) for code in range(16))
"""Levels of codes that are numbers, less 8."""


class RowInt4(RowWeight):
    """One weight of ``codes`` uint8 ``[out, in / 2]``."""

    def __init__(
        self,
        codes: Tensor,
        scales: Tensor,
        offsets: Tensor | None = None,
        levels: tuple[float, ...] | None = None,
    ) -> None:
        """``levels`` are what the codes 0 to 15 mean; ``None``: codes are numbers themselves."""
        super().__init__(codes, scales, offsets)
        self.levels = levels

    @classmethod
    def takes(cls, inputs: int, group: int) -> bool:
        """Return whether rows of so many inputs, in groups of this size, have the layout."""
        return inputs % BLOCK == 0 and group % GROUP == 0

    @classmethod
    def of_levels(
        cls,
        rows: Callable[[int, int], Tensor],
        levels: tuple[float, ...],
        inputs: int,
        scales: Tensor,
        offsets: Tensor | None = None,
    ) -> RowInt4:
        """``rows`` of a first and a last + 1 are codes ``[rows, in]`` in 0 to 15; the others are ``[out, groups]``."""
        is_plain = levels == NUMBERS
        codes = torch.empty(len(scales), inputs // 2, dtype=torch.uint8)
        for first in range(0, len(codes), PIECE):
            found = rows(first, min(first + PIECE, len(codes)))
            codes[first : first + PIECE] = pack_rows(found ^ 8 if is_plain else found)
        offsets = None if offsets is None else offsets.float().contiguous()
        return cls(codes, scales.float().contiguous(), offsets, None if is_plain else levels)

    @classmethod
    def pack(
        cls, columns: Callable[[int, int], Tensor], scales: Tensor, zeros: Tensor, inputs: int
    ) -> RowInt4:
        """``columns`` of a first and a last + 1 are codes int ``[in, columns]`` in 0 to 15.

        ``scales`` and ``zeros`` are ``[groups, out]``; the weight is ``(code - zero) · scale``.
        """
        scales, zeros = (t.t().float() for t in (scales, zeros))
        offsets = (8 - zeros) * scales if bool((zeros != 8).any()) else None
        return cls.of_levels(lambda a, b: columns(a, b).t(), NUMBERS, inputs, scales, offsets)

    @property
    def group(self) -> int:
        """Inputs that share a scale."""
        return 2 * self.codes.shape[1] // self.scales.shape[1]

    def numbers(self) -> Tensor:
        """See ``RowWeight.numbers``."""
        codes = unpack_rows(self.codes)
        if self.levels is None:
            return codes.float()
        return torch.tensor(self.levels)[(codes & 15).long()]


def pack_rows(numbers: Tensor) -> Tensor:
    """int ``[out, in]``, of which the lowest four bits count, to uint8 ``[out, in / 2]``."""
    pairs = numbers.to(torch.uint8).unflatten(1, (-1, 2, RUN))
    codes: Tensor = pairs[:, :, 0] & 15 | pairs[:, :, 1] << 4
    return codes.flatten(1)


def unpack_rows(codes: Tensor) -> Tensor:
    """The inverse of ``pack_rows``: int8 ``[out, in]``, from -8 to 7."""
    pairs = codes.view(torch.int8).unflatten(1, (-1, 1, RUN))
    return torch.cat([pairs << 4 >> 4, pairs >> 4], dim=2).flatten(1)
