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
    num_lanes: Tensor  # int64 [width]: 0, 1, …; on the device, so that a CUDA graph can read it

    @classmethod
    def of(cls, vocab_size: int, device: torch.device) -> Blocks:
        # A width that divides the vocabulary saves the two extra launches for a short block.
        exact = [width for width in range(64, 513) if vocab_size % width == 0]
        width = min(exact, key=lambda width: abs(width - PREFERRED), default=PREFERRED)
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

    def members(self, chosen: Tensor) -> Tensor:
        """Return the token ids ``[rows, n * width]`` of blocks ``chosen`` (int64 ``[rows, n]``).

        Ids past the end of a short block are ``vocab_size`` or larger.
        """
        ids = (chosen * self.width).unsqueeze(-1) + self.num_lanes
        return ids.flatten(1)

    def gather(self, values: Tensor, ids: Tensor, fill: float) -> Tensor:
        """Return ``values`` (``[rows, vocab]``) at ids of ``members``; ``fill`` past the end."""
        if not self.tail:
            return values.gather(1, ids)
        found = values.gather(1, ids.clamp(max=self.vocab_size - 1))
        return found.masked_fill_(ids >= self.vocab_size, fill)

    def largest(self, values: Tensor, most: int) -> tuple[Tensor, Tensor]:
        """Return the ``most`` largest values of each row in descending order, and their ids.

        The result is exact: these values are all in the ``most`` blocks with the largest maxima.
        """
        if most * self.width * 2 >= self.vocab_size:
            found, ids = values.topk(min(most, self.vocab_size), dim=-1)
            return found, ids
        maxima = self.reduce(values, Tensor.amax)
        members = self.members(maxima.topk(most, dim=-1, sorted=False).indices)
        found, places = self.gather(values, members, float("-inf")).topk(most, dim=-1)
        return found, members.gather(1, places)
