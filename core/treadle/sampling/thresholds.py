"""top-k, top-p and min-p as thresholds on the probabilities of a row, found without sorting.

Each filter keeps the tokens whose probability is at least some value of the row. Their meaning is
that of transformers' warpers applied in this order:

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

from treadle.sampling.blocks import Blocks

__all__ = (
    "HEAD",
    "apply_filters",
    "keep",
    "mask_dtype",
    "nucleus_of_sorted",
    "nucleus_selected",
    "search",
)

HEAD = 128
"""A top-k up to this reads a list of the largest; above it, a binary search counts."""
# Bit patterns of positive floats are ordered like the floats; those of [0, 1] lie below 2^30.
PROBABILITY_BITS = 30
# A CPU sorts this many faster than it partitions them once more.
SORTED = 1024


def apply_filters(
    probs: Tensor,
    mask: Tensor,
    blocks: Blocks,
    *,
    top_k: tuple[Tensor, int] | None,
    top_p: tuple[Tensor, bool] | None,
    min_p: Tensor | None,
) -> None:
    """Set ``probs`` of the tokens that a filter removes to 0, in place. The rest stays as it is.

    ``probs`` is float32 ``[rows, vocab]``, a softmax; ``mask`` is a buffer of its shape and of
    ``mask_dtype``. Parameters are ``[rows, 1]``: ``top_k`` int64 in ``[1, vocab]`` with an upper
    bound of those below ``vocab``, ``top_p`` float64 in ``(0, 1]`` with whether every row below 1
    has a top-k of at most ``HEAD``, ``min_p`` float32. A row whose parameters are ``vocab``, 1 and
    0 comes out unchanged to the bit, whatever the other rows ask for.
    """
    largest = None
    if top_k is not None:
        k, most = top_k
        if most <= HEAD:
            largest = blocks.largest(probs, most)[0]
            kth = largest.gather(1, (k - 1).clamp_(max=largest.shape[1] - 1))
        else:
            kth = search(probs, mask, lambda mask: mask.sum(dim=-1, keepdim=True) >= k)
        keep(probs, mask, kth * (k < blocks.vocab_size))
    threshold: Tensor | None = None
    if top_p is not None:
        p, listed = top_p
        total = blocks.reduce(probs, Tensor.sum).sum(dim=-1, keepdim=True, dtype=torch.float64)
        budget = total * p
        if listed and largest is not None:
            found = nucleus_of_sorted(largest, budget)
        elif probs.is_cpu:
            found = nucleus_selected(probs, budget, blocks)
        else:
            found = search(probs, mask, lambda mask: mass(probs, mask) >= budget)
        threshold = found * (p < 1)
    if min_p is not None:
        floor = probs.amax(dim=-1, keepdim=True) * min_p
        threshold = floor if threshold is None else torch.maximum(threshold, floor)
    if threshold is not None:
        keep(probs, mask, threshold)


def mask_dtype(device: torch.device) -> torch.dtype:
    """A CPU vectorises comparisons into float32 only; elsewhere the smallest type is the fastest."""
    return torch.float32 if device.type == "cpu" else torch.bool


def keep(probs: Tensor, mask: Tensor, threshold: Tensor) -> None:
    """Zero what is below ``threshold`` (float32 ``[rows, 1]``), in place; a NaN stays a NaN."""
    probs.mul_(torch.ge(probs, threshold, out=mask))


def mass(probs: Tensor, mask: Tensor) -> Tensor:
    # Sums in float64 agree to 1e-15 in any order, so the paths to a nucleus keep the same tokens.
    return (probs * mask).sum(dim=-1, keepdim=True, dtype=torch.float64)


def search(probs: Tensor, mask: Tensor, enough: Callable[[Tensor], Tensor]) -> Tensor:
    """The largest threshold at which ``enough(probs >= threshold)`` still holds: ``[rows, 1]``.

    ``enough`` maps a mask ``[rows, vocab]`` to bool ``[rows, 1]``, falls from true to false as the
    threshold rises, and holds at 0. Bits of the threshold are decided from the highest down, so
    the result is exact; the number of passes is fixed, and nothing is read back to the host.
    """
    bits = torch.zeros(probs.shape[0], 1, dtype=torch.int32, device=probs.device)
    for bit in range(PROBABILITY_BITS - 1, -1, -1):
        candidate = (bits + (1 << bit)).view(torch.float32)
        bits.add_(enough(torch.ge(probs, candidate, out=mask)), alpha=1 << bit)
    return bits.view(torch.float32)


def nucleus_of_sorted(values: Tensor, budget: Tensor) -> Tensor:
    """The smallest value before whose equals less than ``budget`` is held: float32 ``[rows, 1]``.

    ``values`` are the largest probabilities in falling order (``[rows, n]``), and reach the end of
    the nucleus; ``budget`` is float64 ``[rows, 1]``.
    """
    listed = values.double()
    # Mass before an entry; for the first of several equal ones, the mass strictly above it.
    before = listed.cumsum(dim=-1).sub_(listed)
    inside = (before < budget).sum(dim=-1, keepdim=True)
    return values.gather(1, inside.sub_(1).clamp_(min=0))


def nucleus_selected(probs: Tensor, budget: Tensor, blocks: Blocks) -> Tensor:
    """``nucleus_of_sorted`` of all probabilities, for a CPU, which may look at values.

    The 128 largest nearly always suffice; if not, the row is partitioned like in quickselect.
    """
    largest = blocks.largest(probs, min(HEAD, probs.shape[1]))[0]
    found = nucleus_of_sorted(largest, budget)
    listed = largest.sum(dim=-1, keepdim=True, dtype=torch.float64)
    for row in (listed < budget).squeeze(1).nonzero().squeeze(1).tolist():
        found[row, 0] = select(probs[row], float(budget[row]))
    return found


def select(values: Tensor, budget: float) -> Tensor:
    """The nucleus' smallest value among ``values`` (``[n]``, unsorted)."""
    pivot = values[0]
    while len(values) > SORTED:
        pivot = values[:: max(1, len(values) // 64)].median()
        above = values[values > pivot]
        held = float(above.sum(dtype=torch.float64))
        if held >= budget:
            values = above
            continue
        below = values[values < pivot]
        held += float(pivot.double()) * (len(values) - len(above) - len(below))
        if held >= budget:
            return pivot
        values, budget = below, budget - held
    if not len(values):
        return pivot  # the budget is all there is, up to rounding
    values = values.sort(descending=True).values
    return nucleus_of_sorted(values.unsqueeze(0), torch.tensor([[budget]], dtype=torch.float64))[
        0, 0
    ]
