"""Weights in the layout of ``treadle_layers_kit.packed_layout``, by whatever kernel is offered for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from treadle_layers_kit.fusion import Site
from treadle_layers_kit.packed_layout import (
    Levels,
    pack_words,
    packed_linear,
    run_of,
    unpack_words,
)
from treadle_layers_kit.packed_order import NOWHERE, arrange, reorder

__all__ = ("NumbersPart", "PackedParts", "PackedWeight")

ROWS = 1024
"""Outputs that are repacked at a time: a code takes up to eight times its size meanwhile."""

LARGEST = 15
"""The power of two below which float16 steps are."""

Operation = Callable[..., Tensor]


class PackedWeight(nn.Module):
    """One weight, repacked; a module of the layer whose method has it.

    There a kernel for ``packed_linear`` is given to it as ``op``, and its tensors count where the weights
    are counted.
    """

    OP = "packed_linear"
    codes: Tensor
    scales: Tensor | None
    offsets: Tensor | None
    factors: Tensor | None
    order: Tensor | None

    def __init__(
        self,
        codes: Tensor,
        scales: Tensor | None,
        offsets: Tensor | None,
        factors: Tensor | None,
        levels: Levels,
        inputs: int,
        group: int,
        order: Tensor | None = None,
    ) -> None:
        """The arguments of ``packed_linear``; ``order``: the places of ``packed_order``, if inputs are not in order."""
        super().__init__()
        self.codes = nn.Parameter(codes, requires_grad=False)
        for name, tensor in (("scales", scales), ("offsets", offsets), ("factors", factors)):
            parameter = None if tensor is None else nn.Parameter(tensor, requires_grad=False)
            self.register_parameter(name, parameter)
        self.levels, self.inputs, self.group = levels, inputs, group
        self.register_buffer("order", order, persistent=False)
        self.op: Operation = packed_linear

    @staticmethod
    def takes(device: torch.device, dtype: torch.dtype) -> bool:
        """Return whether there may be kernels for activations of this type on this device."""
        return device.type == "cuda" and dtype in (torch.float16, torch.bfloat16)

    @classmethod
    def pack(
        cls,
        rows: Callable[[int, int], Tensor],
        scales: Tensor,
        group: int,
        inputs: int,
        dtype: torch.dtype,
        levels: Levels,
        *,
        offsets: Tensor | None = None,
        factors: Tensor | None = None,
        index: Tensor | None = None,
    ) -> PackedWeight | None:
        """For activations of ``dtype``; ``None`` where no kernel takes them, and for groups so small that they would
        be padding for the most part.

        ``rows`` gives the codes or numbers ``[last - first, in]`` of some outputs. ``scales`` and ``offsets`` are
        ``[out, groups]``, ``factors`` ``[out]`` or ``[out, 1]``. ``index`` int64 ``[in]`` is the group of each
        input, if they are in no order. A scale for each output becomes its factor; scales in float32 and what has
        offsets get steps in float16, and a factor that keeps these in range.
        """
        out, groups = scales.shape
        is_covered = index is not None or inputs <= group * groups
        if not cls.takes(scales.device, dtype) or not is_covered:
            return None
        codes_of, order = rows, None
        if groups > 1 and (index is not None or run_of(levels, group) is None):
            if index is None:
                index = torch.arange(inputs, device=scales.device) // group
            bits = 8 if isinstance(levels, str) else 4
            order = arrange(index, bits, 16 if offsets is None else 32)
            if order is None:
                return None
            codes_of, group, inputs = _in_order(rows, order.apply), order.size, len(order.places)
            scales = scales[:, order.groups]
            offsets = None if offsets is None else offsets[:, order.groups]
        run = run_of(levels, group if groups > 1 else 128)
        if run is None:
            return None
        steps: Tensor | None = scales
        if factors is None and offsets is None and groups == 1 and scales.dtype is not torch.uint8:
            steps, factors = None, scales.float()
        elif factors is None and (offsets is not None or scales.dtype is torch.float32):
            steps, offsets, factors = _in_halves(scales.float(), offsets)
        codes = None
        for first in range(0, out, ROWS):
            last = min(first + ROWS, out)
            packed = pack_words(codes_of(first, last), levels, run)
            if codes is None:
                codes = packed.new_empty(len(packed), out, run)
            codes[:, first:last] = packed
        return cls(
            scales.new_empty(0) if codes is None else codes,
            None if steps is None else steps.t().contiguous(),
            None if offsets is None else offsets.t().contiguous(),
            None if factors is None else factors.float().flatten(),
            levels,
            inputs,
            group if groups > 1 else codes_group(inputs),
            None if order is None else order.places,
        )

    def regrouped(self, group: int, inputs: int) -> PackedWeight | None:
        """Return the same weight in ``group``, which divides this one's, and with as many ``inputs``, the last ones nowhere;
        ``None`` if kernels take no such group, or inputs are in order."""
        run, more = run_of(self.levels, group), inputs - self.inputs
        if run is None or self.order is None:
            return None
        codes = F.pad(unpack_words(self.codes, self.levels)[:, : self.inputs], (0, more))
        scales, offsets = (
            None if t is None else F.pad(t.repeat_interleave(self.group // group, 0), (0, 0, 0, more // group))
            for t in (self.scales, self.offsets)
        )  # fmt: skip
        order = F.pad(self.order, (0, more), value=NOWHERE)
        words = pack_words(codes, self.levels, run)
        return PackedWeight(
            words, scales, offsets, self.factors, self.levels, inputs, group, order
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        """``[..., in]`` to ``[..., out]``, in the type of ``x``."""
        return self.multiply(x, self.op)

    def multiply(self, x: Tensor, op: Operation) -> Tensor:
        """``op`` of ``x`` and the weight."""
        if self.order is not None:
            x = reorder(x, self.order)
        steps = self.scales, self.offsets, self.factors
        return op(x, self.codes, *steps, self.levels, self.inputs, self.group)

    @property
    def sizes(self) -> Mapping[str, int]:
        """For the request of a kernel."""
        features = {"in_features": self.inputs, "out_features": self.codes.shape[1]}
        bits = 8 if isinstance(self.levels, str) else 4
        return features | {"group": self.group, "bits": bits}

    def kernel_sites(self, path: str) -> Iterator[Site]:
        yield Site(path, (self.OP,), (self.sizes,), partial(setattr, self, "op"))


class NumbersPart(nn.Module):
    """A matrix of numbers among others that are packed."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """``[..., in]`` to ``[..., out]``."""
        return F.linear(x, self.weight)


class PackedParts(nn.ModuleList):
    """The matrices of a layer that cannot be one weight, one after the other."""

    def forward(self, x: Tensor) -> Tensor:
        """``[..., in]`` to ``[..., out]``."""
        return torch.cat([part(x) for part in self], dim=-1)


def codes_group(inputs: int) -> int:
    """One group of all inputs, rounded up to whole chunks."""
    return -(-inputs // 128) * 128


def _in_order(
    rows: Callable[[int, int], Tensor], order: Callable[[Tensor], Tensor]
) -> Callable[[int, int], Tensor]:
    return lambda first, last: order(rows(first, last))


def _in_halves(scales: Tensor, offsets: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor]:
    """``[out, groups]`` in float16, and the powers of two ``[out]`` that they are to be multiplied by.

    A step is rounded as a weight in float16 would be, unless it is less than the largest of its output by 2^28.
    """
    largest = scales.abs().amax(1)
    if offsets is not None:
        largest = torch.maximum(largest, offsets.abs().amax(1))
    powers = torch.frexp(largest).exponent.clamp_min(-100) - LARGEST
    factors = torch.ldexp(torch.ones_like(largest), powers)
    halves = (scales / factors[:, None]).half()
    return halves, None if offsets is None else (offsets / factors[:, None]).half(), factors
