"""The interface of logits edits."""

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
    """The rows of a step to which a logits edit applies."""

    rows: Tensor  # int64 [n]: rows of the batch
    owned: Tensor  # int64 [n]: rows of the edit's tables, all different
    slots: list[int]  # the slots of these rows


class Table(Protocol):
    """A logits edit: parameters that few slots have, in rows of tables that grow on demand."""

    pool: Pool
    remembers: bool
    """Whether ``record_sampled`` must be called after sampling."""

    def pack(self, start: SlotStart, parcel: Parcel) -> None:
        """Assign a row and add its data to ``parcel``, if the sequence needs this edit."""

    def write(self, data: Tensor) -> None:
        """Fill the assigned rows from the parcel's ``data`` (int32, on the device)."""

    def apply(self, logits: Tensor, part: Part, positions: Tensor) -> None:
        """Edit ``logits[part.rows]`` in place.

        ``logits`` is float32 ``[batch, vocab]``, contiguous; ``positions`` is int64 ``[batch]``.
        """

    def accept(self, part: Part, tokens: Tensor) -> None:
        """Record ``tokens[part.rows]``; ``tokens`` is int64 ``[batch]``."""
