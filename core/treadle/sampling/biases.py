"""Sparse additions to the logits: ``logit_bias``, ``bad_words`` of one token, ``min_tokens``.

A slot has entries (token, value, until): the value is added while the position is below ``until``. A ban adds -inf;
``min_tokens`` bans the stop ids up to a position. One scatter applies all entries, in any order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from treadle.api.step_types import NewSequenceData
from treadle.sampling.logits_edit import EditRows, LogitsEdit, SlotRowPool, grow
from treadle.sampling.transfer import Int32Packer

__all__ = ("Biases",)

ALWAYS = 2**31 - 1
BANNED = float("-inf")


class Biases(LogitsEdit):
    """Tables ``[capacity, max entries of a slot]``, padded with additions of 0 to token 0."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self.pool = SlotRowPool()
        self._vocab_size = vocab_size
        self._ids = torch.zeros(0, 0, dtype=torch.int64, device=device)
        self._values = torch.zeros(0, 0, dtype=torch.float32, device=device)
        self._end_positions = torch.zeros(0, 0, dtype=torch.int32, device=device)
        self._pending: list[tuple[int, slice, slice, slice]] = []

    def pack(self, start: NewSequenceData, packer: Int32Packer) -> None:
        params = start.params
        entries = [(token, bias, ALWAYS) for token, bias in (params.logit_bias or {}).items()]
        entries += [(word[0], BANNED, ALWAYS) for word in start.bad_words if len(word) == 1]
        if params.min_tokens:
            end = min(start.num_prompt_tokens + params.min_tokens, ALWAYS)
            entries += [(token, BANNED, end) for token in start.stop_token_ids]
        # A token id outside the vocabulary cannot be sampled anyway.
        entries = [entry for entry in entries if 0 <= entry[0] < self._vocab_size]
        if not entries:
            return
        ids, values, ends = zip(*entries, strict=True)
        row = self.pool.assign(start.slot)
        self._pending.append((row, packer.add(ids), packer.add_floats(values), packer.add(ends)))

    def write(self, data: Tensor) -> None:
        width = max((ids.stop - ids.start for _, ids, _, _ in self._pending), default=0)
        shape = (self.pool.capacity, width)
        self._ids = grow(self._ids, *shape)
        self._values = grow(self._values, *shape)
        self._end_positions = grow(self._end_positions, *shape)
        for row, ids, values, ends in self._pending:
            count = ids.stop - ids.start
            self._ids[row].zero_()[:count] = data[ids]
            self._values[row].zero_()[:count] = data[values].view(torch.float32)
            self._end_positions[row].zero_()[:count] = data[ends]
        self._pending = []

    def apply(self, logits: Tensor, part: EditRows, positions: Tensor) -> None:
        position = positions.index_select(0, part.rows).unsqueeze(1)
        is_expired = position >= self._end_positions.index_select(0, part.owned)
        values = self._values.index_select(0, part.owned).masked_fill_(is_expired, 0.0)
        indices = self._ids.index_select(0, part.owned) + (part.rows * logits.shape[1]).unsqueeze(1)
        logits.view(-1).scatter_add_(0, indices.flatten(), values.flatten())
