"""Bad words of several tokens: ban the last token if the tokens before it were just generated.

``biases`` bans words of one token. The newest tokens of a slot are stored on the device, so that
the CPU side need not wait for them. As in transformers, a word may begin in the prompt.
"""

from __future__ import annotations

import torch
from torch import Tensor

from treadle.api.step_types import NewSequenceData
from treadle.sampling.logits_edit import EditRows, SlotRowPool, grow
from treadle.sampling.transfer import Int32Packer

__all__ = ("BadWords",)

ANY, NOTHING = -1, -2


class BadWords:
    """The logits edit of ``bad_words``: prefixes, last tokens, and each slot's newest tokens."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self.pool = SlotRowPool()
        self._vocab_size = vocab_size
        # [capacity, words, length], right-aligned and padded with ANY; unused rows: NOTHING
        self._prefixes = torch.zeros(0, 0, 0, dtype=torch.int32, device=device)
        self._last_tokens = torch.zeros(0, 0, dtype=torch.int64, device=device)
        self._recent = torch.zeros(0, 0, dtype=torch.int32, device=device)  # newest at the right
        self._pending: list[tuple[int, int, slice, slice, slice]] = []

    def pack(self, start: NewSequenceData, packer: Int32Packer) -> None:
        words = [
            word for word in start.bad_words if len(word) > 1 and 0 <= word[-1] < self._vocab_size
        ]
        if not words:
            return
        length = max(len(word) for word in words) - 1
        prefixes = [
            token for word in words for token in [ANY] * (length + 1 - len(word)) + word[:-1]
        ]
        recent = [NOTHING] * max(0, length - len(start.token_ids)) + start.token_ids[-length:]
        last_tokens = packer.add(word[-1] for word in words)
        spans = (packer.add(prefixes), last_tokens, packer.add(recent))
        self._pending.append((self.pool.assign(start.slot), length, *spans))

    def write(self, data: Tensor) -> None:
        words = max(
            (last_tokens.stop - last_tokens.start for *_, last_tokens, _ in self._pending),
            default=0,
        )
        length = max((length for _, length, *_ in self._pending), default=0)
        self._grow(self.pool.capacity, words, length)
        for row, length, prefixes, last_tokens, recent in self._pending:
            words = last_tokens.stop - last_tokens.start
            start = self._recent.shape[1] - length
            self._prefixes[row].fill_(ANY)[words:] = NOTHING
            self._prefixes[row, :words, start:] = data[prefixes].view(words, length)
            self._last_tokens[row].zero_()[:words] = data[last_tokens]
            self._recent[row].fill_(NOTHING)[start:] = data[recent]
        self._pending = []

    def apply(self, logits: Tensor, part: EditRows, positions: Tensor) -> None:
        prefixes = self._prefixes.index_select(0, part.owned)
        recent = self._recent.index_select(0, part.owned).unsqueeze(1)
        is_match = ((prefixes == recent) | (prefixes == ANY)).all(dim=-1)
        bans = torch.zeros_like(is_match, dtype=torch.float32).masked_fill_(is_match, float("-inf"))
        indices = self._last_tokens.index_select(0, part.owned) + (
            part.rows * logits.shape[1]
        ).unsqueeze(1)
        logits.view(-1).scatter_add_(0, indices.flatten(), bans.flatten())

    def record_sampled(self, part: EditRows, tokens: Tensor) -> None:
        recent = self._recent.index_select(0, part.owned)
        newest = tokens.index_select(0, part.rows).to(recent.dtype).unsqueeze(1)
        self._recent.index_copy_(0, part.owned, torch.cat((recent[:, 1:], newest), dim=1))

    def _grow(self, capacity: int, words: int, length: int) -> None:
        self._last_tokens = grow(self._last_tokens, capacity, words)
        # Right-aligned tables grow to the left: flip, pad at the end, flip back. ANY ignores the
        # added tokens in existing prefixes; NOTHING never matches in unused rows.
        prefixes = grow(self._prefixes.flip(2), *self._last_tokens.shape, length, fill=ANY)
        prefixes[:, self._prefixes.shape[1] :] = NOTHING
        self._prefixes = prefixes.flip(2)
        self._recent = grow(self._recent.flip(1), capacity, length, fill=NOTHING).flip(1)
