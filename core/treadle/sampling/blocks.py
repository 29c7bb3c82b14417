"""The vocabulary in blocks of about 128 tokens, for two-level searches over the logits.

One pass reduces every block. A search for the maximum, the largest k, or the token at a point of
the cumulative distribution then reads only the block results and a few blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ("Blocks",)

PREFERRED = 128


@dataclass(frozen=True, slots=True)
class Blocks:
    """``count`` blocks of ``width`` tokens that cover the vocabulary; the last may be shorter."""

    vocab_size: int
    width: int
    count: int
    lanes: Tensor  # int64 [width]: 0, 1, …; on the device, so that a CUDA graph can read it

    @classmethod
    def of(cls, vocab_size: int, device: torch.device) -> Blocks:
        # A width that divides the vocabulary saves the two extra launches for a short block.
        divisors = [width for width in range(64, 513) if vocab_size % width == 0]
        width = min(divisors, key=lambda width: abs(width - PREFERRED), default=PREFERRED)
        width = min(width, vocab_size)
        lanes = torch.arange(width, dtype=torch.int64, device=device)
        return cls(vocab_size, width, -(-vocab_size // width), lanes)

    @property
    def tail(self) -> int:
        """Tokens in a short last block; 0 if every block is full."""
        return self.vocab_size % self.width

    def reduce(self, values: Tensor, reduction: Callable[..., Tensor]) -> Tensor:
        """Reduce ``[rows, vocab]`` to ``[rows, count]`` by ``Tensor.sum`` or ``Tensor.amax``."""
        if not self.tail:
            return reduction(values.view(-1, self.count, self.width), -1)
        body = self.vocab_size - self.tail
        parts = [reduction(values[:, body:], -1, keepdim=True)]
        if body:
            full = values[:, :body].view(-1, self.count - 1, self.width)
            parts.insert(0, reduction(full, -1))
        return torch.cat(parts, dim=1)

    def members(self, block_ids: Tensor) -> Tensor:
        """Return the token ids ``[rows, n * width]`` of blocks ``block_ids`` (int64 ``[rows, n]``).

        Ids past the end of a short block are ``vocab_size`` or larger.
        """
        ids = (block_ids * self.width).unsqueeze(-1) + self.lanes
        return ids.flatten(1)

    def gather(self, values: Tensor, ids: Tensor, fill: float) -> Tensor:
        """Return ``values`` (``[rows, vocab]``) at ids of ``members``; ``fill`` past the end."""
        if not self.tail:
            return values.gather(1, ids)
        result = values.gather(1, ids.clamp(max=self.vocab_size - 1))
        return result.masked_fill_(ids >= self.vocab_size, fill)

    def largest(self, values: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Return the ``k`` largest values of each row in descending order, and their ids.

        The result is exact: these values are all in the ``k`` blocks with the largest maxima.
        """
        if k * self.width * 2 >= self.vocab_size:
            top, ids = values.topk(min(k, self.vocab_size), dim=-1)
            return top, ids
        maxima = self.reduce(values, Tensor.amax)
        members = self.members(maxima.topk(k, dim=-1, sorted=False).indices)
        top, indices = self.gather(values, members, float("-inf")).topk(k, dim=-1)
        return top, members.gather(1, indices)
