"""top-k, top-p and min-p as one threshold per row on the probabilities, found without sorting.

Each filter keeps the tokens whose probability is at least some value of the row, so together they
are one comparison with the largest of the three values. Their meaning is that of transformers'
warpers applied in this order:

* top-k keeps ``p`` if it is at least the k-th largest. Tokens that tie with the k-th stay.
* top-p keeps ``p`` if the tokens that are strictly likelier hold less than ``top_p`` of the mass
  that top-k left. Tokens of equal probability stay or go together; a sort would part them
  arbitrarily.
* min-p keeps ``p`` if it is at least ``min_p`` times the largest.

"Equal" means equal as float32 probabilities. The likeliest token always stays.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from weft.sampling.blocks import Blocks

__all__ = ("HEAD", "filtered", "head_nucleus", "kth_largest", "nucleus", "search")

HEAD = 128
"""A top-k up to this reads a list of the largest; above it, a binary search counts."""
# Bit patterns of positive floats are ordered like the floats; those of [0, 1] lie below 2^30.
PROBABILITY_BITS = 30


def filtered(
    probs: Tensor,
    blocks: Blocks,
    *,
    top_k: tuple[Tensor, int] | None,
    top_p: tuple[Tensor, bool] | None,
    min_p: Tensor | None,
) -> Tensor:
    """``probs`` with the tokens that a filter removes set to 0. Not normalised again.

    ``probs`` is float32 ``[rows, vocab]``, a softmax; it may be overwritten. Parameters are
    ``[rows, 1]``: ``top_k`` int64 in ``[1, vocab]`` with an upper bound of those that are below
    ``vocab``, ``top_p`` float64 in ``(0, 1]`` with whether every row below 1 has a top-k of at
    most ``HEAD``, ``min_p`` float32. A row whose parameters are ``vocab``, 1 and 0 comes out
    unchanged to the bit, whatever the other rows ask for.
    """
    largest = None
    if top_k is not None:
        k, most = top_k
        if most <= HEAD:
            largest = blocks.largest(probs, most)
        probs = at_least(probs, kth_largest(probs, k, largest))
    threshold = None
    if top_p is not None:
        p, listed = top_p
        budget = probs.sum(dim=-1, keepdim=True, dtype=torch.float64) * p
        if listed and largest is not None:
            found = head_nucleus(largest, budget)
        else:
            found = nucleus(probs, budget, blocks)
        threshold = found * (p < 1)
    if min_p is not None:
        floor = probs.amax(dim=-1, keepdim=True) * min_p
        threshold = floor if threshold is None else torch.maximum(threshold, floor)
    return probs if threshold is None else at_least(probs, threshold)


def at_least(probs: Tensor, threshold: Tensor) -> Tensor:
    # A product keeps a NaN a NaN, and is several times faster than masked_fill_ on a CPU.
    return probs * mask_at_least(probs, threshold, None)


def mask_at_least(probs: Tensor, threshold: Tensor, out: Tensor | None) -> Tensor:
    """``probs >= threshold`` as 0 and 1; float32 on a CPU, where only that is vectorised."""
    if out is None:
        out = torch.empty_like(probs, dtype=torch.float32 if probs.is_cpu else torch.bool)
    return torch.ge(probs, threshold, out=out)


def kth_largest(probs: Tensor, k: Tensor, largest: Tensor | None) -> Tensor:
    """The k-th largest probability ``[rows, 1]``; 0 in rows where ``k`` is the whole vocabulary.

    ``largest`` holds the first entries in falling order, enough for every other ``k``.
    """
    everything = k >= probs.shape[1]
    if largest is None:
        found = search(probs, lambda mask: mask.sum(dim=-1, keepdim=True) >= k)
    else:
        found = largest.gather(1, (k - 1).clamp_(max=largest.shape[1] - 1))
    return found.masked_fill_(everything, 0.0)


def nucleus(probs: Tensor, budget: Tensor, blocks: Blocks) -> Tensor:
    """The smallest probability of which the strictly larger ones hold less than ``budget``.

    ``budget`` is float64 ``[rows, 1]``, in units of ``probs``; returns float32 ``[rows, 1]``.
    """
    if probs.is_cpu:
        return nucleus_listed(probs, budget, blocks)
    return search(
        probs, lambda mask: (probs * mask).sum(-1, keepdim=True, dtype=torch.float64) >= budget
    )


def search(probs: Tensor, enough: Callable[[Tensor], Tensor]) -> Tensor:
    """The largest threshold at which ``enough(probs >= threshold)`` still holds: ``[rows, 1]``.

    ``enough`` maps a mask ``[rows, vocab]`` to bool ``[rows, 1]``, falls from true to false as the
    threshold rises, and holds at 0. Bits of the threshold are decided from the highest down, so
    the result is exact; the number of passes is fixed, and nothing is read back to the host.
    """
    bits = torch.zeros(probs.shape[0], 1, dtype=torch.int32, device=probs.device)
    mask: Tensor | None = None
    for bit in range(PROBABILITY_BITS - 1, -1, -1):
        candidate = bits + (1 << bit)
        mask = mask_at_least(probs, candidate.view(torch.float32), mask)
        bits = bits.add_(enough(mask), alpha=1 << bit)
    return bits.view(torch.float32)


def head_nucleus(largest: Tensor, budget: Tensor) -> Tensor:
    """``nucleus`` from the largest probabilities in falling order (``[rows, n]``).

    Right if they reach the nucleus' end or the smallest of them is below every kept token.
    """
    listed = largest.double()
    # Mass before an entry; for the first of several equal ones, the mass strictly above it.
    before = listed.cumsum(dim=-1).sub_(listed)
    inside = (before < budget).sum(dim=-1, keepdim=True)
    return largest.gather(1, inside.sub_(1).clamp_(min=0))


def nucleus_listed(probs: Tensor, budget: Tensor, blocks: Blocks) -> Tensor:
    """``nucleus`` for a CPU, which may look at values: a short list nearly always suffices."""
    largest = blocks.largest(probs, min(HEAD, probs.shape[1]))
    found = head_nucleus(largest, budget)
    reached = largest.sum(dim=-1, keepdim=True, dtype=torch.float64)
    for row in (reached < budget).squeeze(1).nonzero().squeeze(1).tolist():
        # Tokens under (mass - budget) / vocab hold less than mass - budget together, so they lie
        # outside of the nucleus; only the others are sorted. (Rounding may undercut 0.)
        values, limit = probs[row], budget[row]
        floor = values.sum(dtype=torch.float64).sub(limit).div_(len(values)).clamp_(min=0.0)
        candidates = values[values >= floor.float() * 0.999].sort(descending=True).values
        found[row] = head_nucleus(candidates.unsqueeze(0), limit.unsqueeze(0))[0]
    return found
