"""Logits edits: their interface, and table rows for the few slots that need them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from treadle.api.step_types import NewSequenceData
from treadle.sampling.transfer import Int32Packer

__all__ = ("EditRows", "LogitsEdit", "SlotRowPool", "grow")

FIRST_ROWS = 4


class SlotRowPool:
    """Assignment of table rows to slots. The owner's tables need ``capacity`` rows.

    The smallest free row is assigned first, so that the tables stay short.
    """

    def __init__(self) -> None:
        self.capacity = 0
        self._rows: dict[int, int] = {}
        self._free: list[int] = []

    def __contains__(self, slot: int) -> bool:
        return slot in self._rows

    def __getitem__(self, slot: int) -> int:
        return self._rows[slot]

    def __len__(self) -> int:
        return len(self._rows)

    def assign(self, slot: int) -> int:
        """Return the row of ``slot``; assign one if it has none."""
        if slot in self._rows:
            return self._rows[slot]
        if not self._free:
            capacity = max(FIRST_ROWS, self.capacity * 2)
            self._free = list(range(capacity - 1, self.capacity - 1, -1))
            self.capacity = capacity
        row = self._free.pop()
        self._rows[slot] = row
        return row

    def release(self, slot: int) -> None:
        """Release the row of ``slot``, if it has one."""
        row = self._rows.pop(slot, None)
        if row is not None:
            self._free.append(row)
            self._free.sort(reverse=True)


def grow(table: Tensor, *shape: int, fill: float = 0) -> Tensor:
    """Return ``table`` if it is at least ``shape``, else a larger copy padded with ``fill``."""
    target_shape = [max(old, new) for old, new in zip(table.shape, shape, strict=True)]
    if list(table.shape) == target_shape:
        return table
    larger = torch.full(target_shape, fill, dtype=table.dtype, device=table.device)
    larger[tuple(slice(0, size) for size in table.shape)] = table
    return larger


@dataclass(frozen=True, slots=True)
class EditRows:
    """The rows of a step to which a logits edit applies."""

    rows: Tensor  # int64 [n]: rows of the batch
    owned: Tensor  # int64 [n]: rows of the edit's tables, all different
    slots: list[int]  # the slots of these rows


class LogitsEdit(Protocol):
    """A logits edit: parameters that few slots have, in rows of tables that grow on demand."""

    pool: SlotRowPool

    def pack(self, start: NewSequenceData, packer: Int32Packer) -> None:
        """Assign a row and add its data to ``packer``, if the sequence needs this edit."""

    def write(self, data: Tensor) -> None:
        """Fill the assigned rows from ``data``, the packer's contents on the device (int32)."""

    def apply(self, logits: Tensor, part: EditRows, positions: Tensor) -> None:
        """Edit ``logits[part.rows]`` in place.

        ``logits`` is float32 ``[batch, vocab]``, contiguous; ``positions`` is int64 ``[batch]``.
        """

    def record_sampled(self, part: EditRows, tokens: Tensor) -> None:
        """Record ``tokens[part.rows]`` if the edit depends on it; ``tokens`` is int64 ``[batch]``."""
        return
