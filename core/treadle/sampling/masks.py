"""Allowed tokens: grammar bitmasks of a step, and ``allowed_token_ids`` of a slot."""

from __future__ import annotations

import torch
from torch import Tensor

from treadle.api.step_types import NewSequenceData
from treadle.sampling.logits_edit import EditRows, LogitsEdit, SlotRowPool, grow
from treadle.sampling.transfer import Int32Packer

__all__ = ("AllowedTokenIds", "apply_bitmask")


def apply_bitmask(logits: Tensor, bitmask: Tensor, rows: Tensor | None = None) -> Tensor:
    """Set the logits of tokens whose bit is 0 to -inf, in place; return them.

    Bit ``i % 32`` of word ``i // 32`` is token ``i``. ``bitmask`` is int32
    ``[n, words]`` with words for the vocabulary or more, and masks ``logits[rows]`` (int64 ``[n]``), or all rows in order.
    """
    device = bitmask.device
    bits = torch.arange(256, device=device).unsqueeze(1) >> torch.arange(8, device=device)
    # The values to add for each byte: looking up eight tokens is faster than shifting every bit.
    additions = torch.zeros(256, 8, device=device).masked_fill_(bits & 1 == 0, float("-inf"))
    # Bytes of a little-endian word are in the order of their tokens.
    octets = bitmask.contiguous().view(torch.uint8).flatten().int()
    bans = additions.index_select(0, octets).view(len(bitmask), -1)[:, : logits.shape[1]]
    return logits.add_(bans) if rows is None else logits.index_add_(0, rows, bans.to(logits.dtype))


class AllowedTokenIds(LogitsEdit):
    """The logits edit of ``allowed_token_ids``: a table bool ``[capacity, vocab]`` of bans."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self.pool = SlotRowPool()
        self._forbidden_mask = torch.zeros(0, vocab_size, dtype=torch.bool, device=device)
        self._pending: list[tuple[int, slice]] = []

    def pack(self, start: NewSequenceData, packer: Int32Packer) -> None:
        ids = start.params.allowed_token_ids
        if ids is not None:
            self._pending.append((self.pool.assign(start.slot), packer.add(ids)))

    def write(self, data: Tensor) -> None:
        self._forbidden_mask = grow(
            self._forbidden_mask, self.pool.capacity, self._forbidden_mask.shape[1]
        )
        for row, ids in self._pending:
            self._forbidden_mask[row].fill_(True).index_fill_(0, data[ids].long(), False)
        self._pending = []

    def apply(self, logits: Tensor, part: EditRows, positions: Tensor) -> None:
        forbidden = self._forbidden_mask.index_select(0, part.owned)
        masked = logits.index_select(0, part.rows).masked_fill_(forbidden, float("-inf"))
        logits.index_copy_(0, part.rows, masked)
