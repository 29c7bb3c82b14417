"""Repetition, presence and frequency penalties over counts that live on the device.

Repetition (Keskar et al., "CTRL", 2019, section 4.1) looks at prompt and output: a positive logit
is divided by the penalty, a negative one multiplied. Presence and frequency (OpenAI's API) look at
the output only: ``logit - presence * [count > 0] - frequency * count``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from weft.engine.plan import SlotStart
from weft.sampling.params import SamplingParams
from weft.sampling.parcel import Parcel
from weft.sampling.pool import Pool, grown

__all__ = ("Penalties",)

# One int32 per token: the lowest bit tells whether the prompt holds it, the rest counts outputs.
PROMPT, OUTPUT = 1, 2


class Penalties:
    """Counts ``int32 [capacity, vocab]`` for the slots that have a penalty, and no others."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self.pool = Pool()
        self._counts = torch.zeros(0, vocab_size, dtype=torch.int32, device=device)
        # repetition, presence, frequency
        self._params = torch.zeros(0, 3, dtype=torch.float32, device=device)
        self._pending: list[tuple[int, slice, slice, slice]] = []

    @staticmethod
    def wanted(params: SamplingParams) -> bool:
        neutral = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
        return neutral != (1.0, 0.0, 0.0)

    def pack(self, start: SlotStart, parcel: Parcel) -> None:
        params = start.params
        if not self.wanted(params):
            return
        row = self.pool.take(start.slot)
        numbers = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
        # Placeholders of images may lie outside of the vocabulary; the model cannot repeat them.
        size = self._counts.shape[1]
        prompt = (token for token in start.tokens[: start.prompt_len] if 0 <= token < size)
        output = (token for token in start.tokens[start.prompt_len :] if 0 <= token < size)
        self._pending.append(
            (row, parcel.add_floats(numbers), parcel.add(prompt), parcel.add(output))
        )

    def write(self, data: Tensor) -> None:
        self._counts = grown(self._counts, self.pool.capacity, self._counts.shape[1])
        self._params = grown(self._params, self.pool.capacity, 3)
        for row, numbers, prompt, output in self._pending:
            self._params[row] = data[numbers].view(torch.float32)
            counts = self._counts[row].zero_()
            counts.index_fill_(0, data[prompt].long(), PROMPT)
            seen = data[output].long()
            counts.index_add_(0, seen, torch.full_like(seen, OUTPUT, dtype=torch.int32))
        self._pending = []

    def apply(self, logits: Tensor, rows: Tensor, owned: Tensor) -> None:
        """Penalise ``logits[rows]`` (float32 ``[batch, vocab]``) in place by table rows ``owned``."""
        counts = self._counts.index_select(0, owned)
        repetition, presence, frequency = self._params.index_select(0, owned).unsqueeze(2).unbind(1)
        x = logits.index_select(0, rows)
        x = torch.where(counts > 0, torch.where(x < 0, x * repetition, x / repetition), x)
        outputs = counts >> 1
        x = x.sub_(outputs * frequency).sub_((outputs > 0) * presence)
        logits.index_copy_(0, rows, x)

    def accept(self, owned: Tensor, tokens: Tensor) -> None:
        """Count one sampled token per table row; ``owned`` has no duplicates."""
        self._counts[owned, tokens] += OUTPUT
