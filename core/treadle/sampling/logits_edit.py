"""The interface of logits edits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from treadle.api.step_types import NewSequenceData
from treadle.sampling.slot_row_pool import SlotRowPool
from treadle.sampling.transfer import Int32Packer

__all__ = ("EditRows", "LogitsEdit")


@dataclass(frozen=True, slots=True)
class EditRows:
    """The rows of a step to which a logits edit applies."""

    rows: Tensor  # int64 [n]: rows of the batch
    owned: Tensor  # int64 [n]: rows of the edit's tables, all different
    slots: list[int]  # the slots of these rows


class LogitsEdit(Protocol):
    """A logits edit: parameters that few slots have, in rows of tables that grow on demand."""

    pool: SlotRowPool
    needs_sampled_tokens: bool
    """Whether ``record_sampled`` must be called after sampling."""

    def pack(self, start: NewSequenceData, parcel: Int32Packer) -> None:
        """Assign a row and add its data to ``parcel``, if the sequence needs this edit."""

    def write(self, data: Tensor) -> None:
        """Fill the assigned rows from the parcel's ``data`` (int32, on the device)."""

    def apply(self, logits: Tensor, part: EditRows, positions: Tensor) -> None:
        """Edit ``logits[part.rows]`` in place.

        ``logits`` is float32 ``[batch, vocab]``, contiguous; ``positions`` is int64 ``[batch]``.
        """

    def record_sampled(self, part: EditRows, tokens: Tensor) -> None:
        """Record ``tokens[part.rows]``; ``tokens`` is int64 ``[batch]``."""
