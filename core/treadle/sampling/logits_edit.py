"""What the tables behind per-slot edits of the logits have in common."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from treadle.api.step_types import SlotStart
from treadle.sampling.slot_row_pool import Pool
from treadle.sampling.transfer import Parcel

__all__ = ("Part", "Table")


@dataclass(frozen=True, slots=True)
class Part:
    """The rows of a step that a table concerns, three times."""

    rows: Tensor  # int64 [n]: rows of the batch
    owned: Tensor  # int64 [n]: rows of the table, all different
    slots: list[int]


class Table(Protocol):
    """Parameters that few slots have, in rows of tables that grow on demand."""

    pool: Pool
    remembers: bool
    """Whether ``accept`` must be told what was sampled."""

    def pack(self, start: SlotStart, parcel: Parcel) -> None:
        """Reserve a row and add its data to ``parcel``, if ``start`` asks for this edit."""

    def write(self, data: Tensor) -> None:
        """Fill the reserved rows from the shipped parcel (int32)."""

    def apply(self, logits: Tensor, part: Part, positions: Tensor) -> None:
        """Edit ``logits[part.rows]`` in place.

        ``logits`` is float32 ``[batch, vocab]``, contiguous; ``positions`` is int64 ``[batch]``.
        """

    def accept(self, part: Part, tokens: Tensor) -> None:
        """Remember ``tokens[part.rows]``; ``tokens`` is int64 ``[batch]``."""
