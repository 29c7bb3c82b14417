"""Choosing a token: the likeliest one, or one at random.

The draw inverts the cumulative distribution on two levels, first over blocks of the vocabulary,
then inside the chosen block, with one uniform number each:
``P(block) * P(token | block) = P(token)``. Cumulative sums are taken over integers. Integer
addition is associative, so the order in which a device adds cannot move a boundary, the sums never
fall, and a token of weight zero owns an interval of length zero: it cannot be drawn.
"""

from __future__ import annotations

import torch
from torch import Tensor

from treadle.sampling.blocks import Blocks

__all__ = ("argmax", "draw")

# Probabilities sum to 1, so totals stay under 2^51 (see noise.BITS). Mass below 2^-50 of a row is
# lost; the rounding of a float32 softmax is 2^26 times that.
SCALE = float(1 << 50)
# Inside a block, weights are relative to its largest; at most 512 of them add up to 2^51.
LOCAL = float(1 << 42)


def argmax(logits: Tensor, blocks: Blocks) -> tuple[Tensor, Tensor]:
    """The lowest id of the largest logit, and whether the row is unusable.

    ``logits`` is ``[rows, vocab]`` of any float type; returns int64 ``[rows]`` and bool ``[rows]``.
    A row is unusable if its maximum is not finite: it holds a NaN or +inf, or nothing but -inf.
    """
    if not logits.is_cpu:
        values, tokens = logits.max(dim=-1)
    else:
        # On a CPU only the reduction without indices is vectorised: look for the index in one block.
        values, chosen = blocks.reduce(logits, Tensor.amax).max(dim=-1, keepdim=True)
        ids = blocks.members(chosen)
        inside = blocks.gather(logits, ids, float("-inf")).argmax(dim=-1)
        tokens, values = ids[:, 0] + inside, values.squeeze(1)
    # 0 * x is 0 for a finite x and NaN otherwise.
    return tokens, values.mul(0).ne(0)


def draw(weights: Tensor, uniforms: Tensor, blocks: Blocks) -> tuple[Tensor, Tensor]:
    """One token per row, in proportion to its weight; and whether the row is unusable.

    ``weights`` is float32 ``[rows, vocab]``, a softmax with any entries set to zero; ``uniforms``
    is float64 ``[rows, 2]``. Returns int64 ``[rows]`` and bool ``[rows]``. A row with a NaN yields
    an arbitrary id of the vocabulary.
    """
    sums = blocks.reduce(weights, Tensor.sum)
    # A NaN in a softmax's input makes the whole row NaN: one entry tells.
    bad = sums[:, 0].isnan()
    cumulative = sums.mul_(SCALE).long().cumsum(dim=-1)
    chosen = invert(cumulative, uniforms[:, :1])

    ids = blocks.members(chosen)
    inside = blocks.gather(weights, ids, 0.0)
    scale = torch.div(LOCAL, inside.amax(dim=-1, keepdim=True))
    lane = invert(inside.mul_(scale).long().cumsum(dim=-1), uniforms[:, 1:])
    tokens = chosen.mul_(blocks.width).add_(lane).squeeze(1)
    # Only rows with a NaN get here with an id that is out of range.
    return tokens.clamp_(max=blocks.vocab_size - 1), bad


def invert(cumulative: Tensor, uniform: Tensor) -> Tensor:
    """The first index whose cumulative sum exceeds ``uniform`` of the total: ``[rows, 1]``."""
    target = (cumulative[:, -1:] * uniform).long()
    found = torch.searchsorted(cumulative, target, right=True)
    return found.clamp_(max=cumulative.shape[1] - 1)
