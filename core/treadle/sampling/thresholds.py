"""top-k, top-p and min-p as thresholds on the probabilities of a row, found without sorting.

Each filter keeps the tokens with a probability of at least a threshold. The meaning is that of
transformers' warpers in this order:

* top-k keeps ``p`` if it is at least the k-th largest; ties with the k-th are kept.
* top-p keeps ``p`` if the strictly larger probabilities sum to less than ``top_p`` of the
  probability that top-k kept. Tokens of equal probability are treated the same; a sort would
  separate them arbitrarily.
* min-p keeps ``p`` if it is at least ``min_p`` times the largest.

"Equal" means equal as float32. The most probable token is always kept.
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
    "search",
    "top_p_threshold",
    "top_p_threshold_sorted",
)

HEAD = 128
"""Up to this top-k, list the largest probabilities; above it, use a binary search."""
# Bit patterns of positive floats are ordered like the floats; those of [0, 1] are below 2^30.
PROBABILITY_BITS = 30
# A CPU sorts this many values faster than it partitions them once more.
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
    """Set ``probs`` of removed tokens to 0 in place; the others are unchanged.

    ``probs`` is float32 ``[rows, vocab]``, a softmax; ``mask`` is a buffer of the same shape and ``mask_dtype``.
    Parameters are ``[rows, 1]``: ``top_k`` int64 in ``[1, vocab]``, with an upper bound of the values below
    ``vocab``; ``top_p`` float64 in ``(0, 1]``, with whether every row below 1 has a top-k of at most ``HEAD``;
    ``min_p`` float32. A row with parameters ``vocab``, 1 and 0 is bitwise unchanged.
    """
    largest = None
    if top_k is not None:
        k, max_k = top_k
        if max_k <= HEAD:
            largest = blocks.largest(probs, max_k)[0]
            kth = largest.gather(1, (k - 1).clamp_(max=largest.shape[1] - 1))
        else:
            kth = search(probs, mask, lambda mask: mask.sum(dim=-1, keepdim=True) >= k)
        keep(probs, mask, kth * (k < blocks.vocab_size))
    threshold: Tensor | None = None
    if top_p is not None:
        p, in_head = top_p
        total = blocks.reduce(probs, Tensor.sum).sum(dim=-1, keepdim=True, dtype=torch.float64)
        budget = total * p
        if in_head and largest is not None:
            cutoff = top_p_threshold_sorted(largest, budget)
        elif probs.is_cpu:
            cutoff = top_p_threshold(probs, budget, blocks)
        else:
            cutoff = search(probs, mask, lambda mask: kept_probability(probs, mask) >= budget)
        threshold = cutoff * (p < 1)
    if min_p is not None:
        floor = probs.amax(dim=-1, keepdim=True) * min_p
        threshold = floor if threshold is None else torch.maximum(threshold, floor)
    if threshold is not None:
        keep(probs, mask, threshold)


def mask_dtype(device: torch.device) -> torch.dtype:
    """Return float32 on a CPU, which vectorises no other comparisons; else bool, the smallest."""
    return torch.float32 if device.type == "cpu" else torch.bool


def keep(probs: Tensor, mask: Tensor, threshold: Tensor) -> None:
    """Zero values below ``threshold`` (float32 ``[rows, 1]``) in place; NaN stays NaN."""
    probs.mul_(torch.ge(probs, threshold, out=mask))


def kept_probability(probs: Tensor, mask: Tensor) -> Tensor:
    # float64 sums agree to 1e-15 in any order, so all top-p algorithms keep the same tokens.
    return (probs * mask).sum(dim=-1, keepdim=True, dtype=torch.float64)


def search(probs: Tensor, mask: Tensor, predicate: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the largest threshold with ``predicate(probs >= threshold)``: float32 ``[rows, 1]``.

    ``predicate`` maps a mask ``[rows, vocab]`` to bool ``[rows, 1]``. It must be true at threshold 0
    and, once false, stay false for larger thresholds. The search sets the threshold's bits from
    the highest down: it is exact, has a fixed number of passes, and does not wait for the device.
    """
    bits = torch.zeros(probs.shape[0], 1, dtype=torch.int32, device=probs.device)
    for bit in range(PROBABILITY_BITS - 1, -1, -1):
        candidate = (bits + (1 << bit)).view(torch.float32)
        bits.add_(predicate(torch.ge(probs, candidate, out=mask)), alpha=1 << bit)
    return bits.view(torch.float32)


def top_p_threshold_sorted(values: Tensor, budget: Tensor) -> Tensor:
    """Return the top-p threshold, float32 ``[rows, 1]``.

    It is the smallest probability whose strictly larger probabilities sum to less than ``budget`` (float64 ``[rows,
    1]``). ``values`` (``[rows, n]``) are the largest probabilities in descending order, including the threshold.
    """
    probs = values.double()
    # The sum before an entry; for the first of equal entries, the sum of the strictly larger ones.
    sum_before = probs.cumsum(dim=-1).sub_(probs)
    num_kept = (sum_before < budget).sum(dim=-1, keepdim=True)
    return values.gather(1, num_kept.sub_(1).clamp_(min=0))


def top_p_threshold(probs: Tensor, budget: Tensor, blocks: Blocks) -> Tensor:
    """Return ``top_p_threshold_sorted`` of all probabilities. For CPUs: control flow reads values.

    The 128 largest are nearly always enough; otherwise the row is partitioned as in quickselect.
    """
    largest = blocks.largest(probs, min(HEAD, probs.shape[1]))[0]
    thresholds = top_p_threshold_sorted(largest, budget)
    top_sums = largest.sum(dim=-1, keepdim=True, dtype=torch.float64)
    for row in (top_sums < budget).squeeze(1).nonzero().squeeze(1).tolist():
        thresholds[row, 0] = select(probs[row], float(budget[row]))
    return thresholds


def select(values: Tensor, budget: float) -> Tensor:
    """Return the top-p threshold of unsorted ``values`` (``[n]``)."""
    pivot = values[0]
    while len(values) > SORTED:
        pivot = values[:: max(1, len(values) // 64)].median()
        above = values[values > pivot]
        cumulative_prob = float(above.sum(dtype=torch.float64))
        if cumulative_prob >= budget:
            values = above
            continue
        below = values[values < pivot]
        cumulative_prob += float(pivot.double()) * (len(values) - len(above) - len(below))
        if cumulative_prob >= budget:
            return pivot
        values, budget = below, budget - cumulative_prob
    if not len(values):
        return pivot  # the budget is the whole sum, up to rounding
    values = values.sort(descending=True).values
    return top_p_threshold_sorted(
        values.unsqueeze(0), torch.tensor([[budget]], dtype=torch.float64)
    )[0, 0]
