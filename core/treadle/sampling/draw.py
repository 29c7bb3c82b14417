"""Greedy and random choice of a token.

A random draw inverts the cumulative distribution on two levels, over the blocks of the vocabulary and inside the
chosen block, with one uniform number each: ``P(block) * P(token | block) = P(token)``. Cumulative sums are integers:
their addition is associative, so they do not depend on the device's order of addition, they never decrease, and a
token of weight zero has an empty interval and cannot be drawn.
"""

from __future__ import annotations

import torch
from torch import Tensor

from treadle.sampling.blocks import Blocks

__all__ = ("argmax", "draw")

# Probabilities sum to 1, so totals are below 2^51 (see noise.BITS). Probabilities below 2^-50 are
# lost; the rounding error of a float32 softmax is 2^26 times that.
SCALE = float(1 << 50)
# Inside a block, weights are relative to the largest one; at most 512 of them sum to 2^51.
LOCAL = float(1 << 42)


def argmax(logits: Tensor, blocks: Blocks) -> tuple[Tensor, Tensor]:
    """Return the argmax of each row, and whether the row is invalid.

    ``logits`` is ``[rows, vocab]`` of any float type; returns int64 ``[rows]`` and bool ``[rows]``. Ties go to the
    lowest id. A row is invalid if its maximum is not finite: it contains NaN or +inf, or only -inf.
    """
    if not logits.is_cpu:
        values, tokens = logits.max(dim=-1)
    else:
        # On a CPU only reductions without indices are vectorised: search the index in one block.
        values, block_ids = blocks.reduce(logits, Tensor.amax).max(dim=-1, keepdim=True)
        ids = blocks.members(block_ids)
        offset = blocks.gather(logits, ids, float("-inf")).argmax(dim=-1)
        tokens, values = ids[:, 0] + offset, values.squeeze(1)
    # 0 * x is 0 for a finite x and NaN otherwise.
    return tokens, values.mul(0).ne(0)


def draw(weights: Tensor, uniforms: Tensor, blocks: Blocks) -> tuple[Tensor, Tensor]:
    """Draw a token per row in proportion to its weight; return also whether the row is invalid.

    ``weights`` is float32 ``[rows, vocab]``, a softmax with any entries set to zero; ``uniforms``
    is float64 ``[rows, 2]``. Returns int64 ``[rows]`` and bool ``[rows]``. The token of an invalid
    row, which contains NaN, is an arbitrary id of the vocabulary.
    """
    sums = blocks.reduce(weights, Tensor.sum)
    # NaN in the input of a softmax makes the whole row NaN, so checking one entry is enough.
    invalid = sums[:, 0].isnan()
    cumulative = sums.mul_(SCALE).long().cumsum(dim=-1)
    block_ids = invert(cumulative, uniforms[:, :1])

    ids = blocks.members(block_ids)
    block_weights = blocks.gather(weights, ids, 0.0)
    scale = torch.div(LOCAL, block_weights.amax(dim=-1, keepdim=True))
    lane = invert(block_weights.mul_(scale).long().cumsum(dim=-1), uniforms[:, 1:])
    tokens = block_ids.mul_(blocks.width).add_(lane).squeeze(1)
    # Only rows with NaN can have an id out of range here.
    return tokens.clamp_(max=blocks.vocab_size - 1), invalid


def invert(cumulative: Tensor, uniform: Tensor) -> Tensor:
    """Return the first index with a cumulative sum above ``uniform * total``: ``[rows, 1]``."""
    target = (cumulative[:, -1:] * uniform).long()
    indices = torch.searchsorted(cumulative, target, right=True)
    return indices.clamp_(max=cumulative.shape[1] - 1)
