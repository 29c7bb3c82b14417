"""The vocabulary in blocks: what makes a reduction over 150,000 logits cheap to look into again.

One pass reduces every block of about 128 neighbours; the search for a maximum, for the largest k,
or for the token at a point of the cumulative distribution then reads the block results and the few
blocks that matter.
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
    """``count`` blocks of ``width`` tokens cover ``vocab_size``; the last one may be short."""

    vocab_size: int
    width: int
    count: int
    lanes: Tensor  # int64 [width]: 0, 1, … on the device, so that a captured graph can read it

    @classmethod
    def of(cls, vocab_size: int, device: torch.device) -> Blocks:
        # A width that divides the vocabulary spares the two extra launches of a short block.
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
        """``[rows, vocab]`` to ``[rows, count]`` by ``Tensor.sum`` or ``Tensor.amax``."""
        if not self.tail:
            return reduction(values.view(-1, self.count, self.width), -1)
        body = self.vocab_size - self.tail
        parts = [reduction(values[:, body:], -1, keepdim=True)]
        if body:
            full = values[:, :body].view(-1, self.count - 1, self.width)
            parts.insert(0, reduction(full, -1))
        return torch.cat(parts, dim=1)

    def members(self, chosen: Tensor) -> Tensor:
        """Token ids of the chosen blocks: int64 ``[rows, n]`` to ``[rows, n * width]``.

        Past the end of a short block the ids are ``vocab_size`` and more.
        """
        ids = (chosen * self.width).unsqueeze(-1) + self.lanes
        return ids.flatten(1)

    def gather(self, values: Tensor, ids: Tensor, fill: float) -> Tensor:
        """``values`` (``[rows, vocab]``) at ids from ``members``; ``fill`` past the end."""
        if not self.tail:
            return values.gather(1, ids)
        found = values.gather(1, ids.clamp(max=self.vocab_size - 1))
        return found.masked_fill_(ids >= self.vocab_size, fill)

    def largest(self, values: Tensor, most: int) -> tuple[Tensor, Tensor]:
        """The ``most`` largest values of each row in falling order, and their ids.

        Exact: every one of them lies in a block that is among the ``most`` with the largest
        maxima. Were it not, ``most`` maxima would be at least as large.
        """
        if most * self.width * 2 >= self.vocab_size:
            found, ids = values.topk(min(most, self.vocab_size), dim=-1)
            return found, ids
        maxima = self.reduce(values, Tensor.amax)
        members = self.members(maxima.topk(most, dim=-1, sorted=False).indices)
        found, places = self.gather(values, members, float("-inf")).topk(most, dim=-1)
        return found, members.gather(1, places)
