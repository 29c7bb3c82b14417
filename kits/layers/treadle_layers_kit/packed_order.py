"""An order of inputs in which groups are runs that ``packed_linear`` takes, whatever group each input is of."""

from __future__ import annotations

from math import gcd
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ("NOWHERE", "Order", "arrange", "reorder", "reorder_experts")

UNIT = 16
"""Groups of ``packed_linear`` are multiples of it."""
NOWHERE = 2**31 - 1
"""A place without an input, however many there are."""
MAX_ROOM = 2
"""Places for each input, at most: beyond, codes take as much memory as numbers do."""


class Order(NamedTuple):
    """``places`` int64 ``[n]`` are the inputs in their new order, and the number of inputs where there is none.

    ``size`` places are of one group, which ``groups`` int64 ``[n / size]`` names.
    """

    places: Tensor
    groups: Tensor
    size: int

    def apply(self, columns: Tensor) -> Tensor:
        """Bring ``[..., in]`` into this order, with zeros where there is no input."""
        return reorder(columns, self.places)


def reorder(columns: Tensor, places: Tensor) -> Tensor:
    """See ``Order.apply``."""
    if len(places) > columns.shape[-1]:
        columns = F.pad(columns, (0, 1))
    return columns.index_select(-1, places)


def reorder_experts(x: Tensor, topk_ids: Tensor, order: Tensor) -> Tensor:
    """The operation of ``treadle_layers_kit.kernel_ops``, by torch's own."""
    flat = topk_ids.reshape(-1)
    rows = x.repeat_interleave(len(flat) // max(1, len(x)), dim=0)
    places = order.index_select(0, flat).clamp(max=x.shape[1]).long()
    return F.pad(rows, (0, 1)).gather(1, places)


def arrange(index: Tensor, bits: int, step_bits: int) -> Order | None:
    """Sort inputs by ``index`` int64 ``[in]``, the group of each, and let runs begin at multiples of 16.

    Of the sizes that fit, the one is taken that needs the least memory: each place has ``bits`` and each run
    ``step_bits``. ``None`` if most places would be empty.
    """
    counts = torch.bincount(index)
    present = [count for count in counts.tolist() if count]

    def room(size: int) -> int:
        return sum(-(-count // size) * size for count in present)

    sizes = {size for size in (gcd(*present), UNIT, 2 * UNIT) if size and not size % UNIT}
    size = min(sizes, key=lambda size: room(size) * (bits + step_bits / size))
    if room(size) > MAX_ROOM * len(index):
        return None
    rooms = -(-counts // size) * size
    shifts = (rooms - counts).cumsum(0) - (rooms - counts)
    order = torch.argsort(index, stable=True)
    places = torch.full((room(size),), len(index), dtype=torch.int64, device=index.device)
    places[torch.arange(len(index), device=index.device) + shifts[index[order]]] = order
    groups = torch.arange(len(counts), device=index.device).repeat_interleave(rooms // size)
    return Order(places, groups, size)
