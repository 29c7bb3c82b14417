"""Repetition, presence and frequency penalties, with token counts on the device.

Repetition (Keskar et al., "CTRL", 2019, section 4.1) applies to tokens of prompt and output: a
positive logit is divided by the penalty, a negative one multiplied. Presence and frequency
(OpenAI's API) apply to the output only: ``logit - frequency * count - presence * [count > 0]``.

A step edits only the logits of the sequence's tokens, not the whole vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from treadle.api.step_types import NewSequenceData
from treadle.sampling.logits_edit import EditRows, SlotRowPool, grow
from treadle.sampling.transfer import Int32Packer

__all__ = ("Penalties",)

# A count is an int32: bit 0 is set if the token is in the prompt, the other bits count outputs.
PROMPT, OUTPUT = 1, 2
MARGIN = 1024  # extra columns, so that a growing sequence does not enlarge the table each step


class Penalties:
    """The logits edit of penalties: counts ``[capacity, vocab]``, tokens ``[capacity, len]``."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self.pool = SlotRowPool()
        self._vocab_size = vocab_size
        self._counts = torch.zeros(0, vocab_size, dtype=torch.int32, device=device)
        # Padding with token 0 is harmless: logits of tokens with count 0 are written unchanged.
        self._tokens = torch.zeros(0, 0, dtype=torch.int64, device=device)
        self._lengths = torch.zeros(0, dtype=torch.int64, device=device)
        # repetition, presence, frequency
        self._params = torch.zeros(0, 3, dtype=torch.float32, device=device)
        # The CPU side's copy of _lengths, by slot: it bounds the width of a step.
        self._num_known_tokens: dict[int, int] = {}
        self._pending: list[tuple[int, slice, slice, slice]] = []

    def pack(self, start: NewSequenceData, packer: Int32Packer) -> None:
        params = start.params
        numbers = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
        if numbers == (1.0, 0.0, 0.0):
            return
        row = self.pool.assign(start.slot)
        # Image placeholders may be outside the vocabulary; they cannot be sampled.
        prompt, output = (
            [token for token in tokens if 0 <= token < self._vocab_size]
            for tokens in (
                start.token_ids[: start.num_prompt_tokens],
                start.token_ids[start.num_prompt_tokens :],
            )
        )
        self._num_known_tokens[start.slot] = len(prompt) + len(output)
        self._pending.append(
            (row, packer.add_floats(numbers), packer.add(prompt), packer.add(output))
        )

    def write(self, data: Tensor) -> None:
        if not self._pending:
            return
        capacity = self.pool.capacity
        self._counts = grow(self._counts, capacity, self._vocab_size)
        self._lengths = grow(self._lengths, capacity)
        self._params = grow(self._params, capacity, 3)
        self._widen(max(output.stop - prompt.start for _, _, prompt, output in self._pending))
        for row, numbers, prompt, output in self._pending:
            self._params[row] = data[numbers].view(torch.float32)
            tokens = data[prompt.start : output.stop].long()
            self._tokens[row].zero_()[: len(tokens)] = tokens
            self._lengths[row].fill_(len(tokens))
            output_tokens = tokens[prompt.stop - prompt.start :]
            counts = self._counts[row].zero_()
            counts.index_fill_(0, tokens[: prompt.stop - prompt.start], PROMPT)
            counts.index_add_(
                0, output_tokens, torch.full_like(output_tokens, OUTPUT, dtype=torch.int32)
            )
        self._pending = []

    def apply(self, logits: Tensor, part: EditRows, positions: Tensor) -> None:
        width = max(self._num_known_tokens[slot] for slot in part.slots)
        tokens = self._tokens[:, :width].index_select(0, part.owned)
        counts = self._counts.view(-1)[tokens + (part.owned * self._vocab_size).unsqueeze(1)]
        indices = tokens.add_((part.rows * self._vocab_size).unsqueeze(1)).flatten()
        params = self._params.index_select(0, part.owned).unsqueeze(2)
        repetition, presence, frequency = params.unbind(1)
        x = logits.view(-1)[indices].view(counts.shape)
        x = torch.where(counts > 0, torch.where(x < 0, x * repetition, x / repetition), x)
        outputs = counts >> 1
        x = x.sub_(outputs * frequency).sub_((outputs > 0) * presence)
        # A token that occurs twice is written twice, with the same value.
        logits.view(-1)[indices] = x.flatten()

    def record_sampled(self, part: EditRows, tokens: Tensor) -> None:
        for slot in part.slots:
            self._num_known_tokens[slot] += 1
        self._widen(max(self._num_known_tokens[slot] for slot in part.slots))
        owned, new = part.owned, tokens.index_select(0, part.rows)
        lengths = self._lengths.index_select(0, owned)
        self._tokens[owned, lengths] = new
        self._lengths.index_copy_(0, owned, lengths + 1)
        self._counts[owned, new] += OUTPUT

    def _widen(self, width: int) -> None:
        shape = (self.pool.capacity, width)
        if shape[0] > self._tokens.shape[0] or width > self._tokens.shape[1]:
            self._tokens = grow(self._tokens, shape[0], width + MARGIN)
