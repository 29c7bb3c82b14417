"""Weights in the layout of ``treadle_layers_kit.packed_layout``, by whatever kernel is offered for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor, nn

from treadle_layers_kit.fusion import Site
from treadle_layers_kit.packed_layout import Levels, pack_words, packed_linear, run_of

__all__ = ("PackedWeight",)

ROWS = 1024
"""Outputs that are repacked at a time: a code takes up to eight times its size meanwhile."""

Operation = Callable[..., Tensor]


class PackedWeight(nn.Module):
    """One weight, repacked; a module of the layer whose method has it.

    There a kernel for ``packed_linear`` is given to it as ``op``, and its tensors count where the weights
    are counted.
    """

    def __init__(
        self,
        codes: Tensor,
        scales: Tensor | None,
        offsets: Tensor | None,
        factors: Tensor | None,
        levels: Levels,
        inputs: int,
        group: int,
    ) -> None:
        """The arguments of ``packed_linear``."""
        super().__init__()
        self.codes = nn.Parameter(codes, requires_grad=False)
        for name, tensor in (("scales", scales), ("offsets", offsets), ("factors", factors)):
            parameter = None if tensor is None else nn.Parameter(tensor, requires_grad=False)
            self.register_parameter(name, parameter)
        self.levels, self.inputs, self.group = levels, inputs, group
        self.op: Operation = packed_linear

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
    ) -> PackedWeight | None:
        """For activations of ``dtype``; ``None`` for others than 16-bit ones on a CUDA device, and for groups that are no
        multiples of 16.

        ``rows`` gives the codes or numbers ``[last - first, in]`` of some outputs. ``scales`` and ``offsets`` are
        ``[out, groups]``, ``factors`` ``[out]`` or ``[out, 1]``. A scale for each output becomes its factor.
        """
        out, groups = scales.shape
        run = run_of(levels, group if groups > 1 else 128)
        is_half = dtype in (torch.float16, torch.bfloat16)
        if not scales.is_cuda or not is_half or run is None or inputs > group * groups:
            return None
        stepped: Tensor | None = scales
        if factors is None and offsets is None and groups == 1 and scales.dtype is not torch.uint8:
            stepped, factors = None, scales.float()
        codes = None
        for first in range(0, out, ROWS):
            last = min(first + ROWS, out)
            packed = pack_words(rows(first, last), levels, run)
            if codes is None:
                codes = packed.new_empty(len(packed), out, run)
            codes[:, first:last] = packed
        return cls(
            scales.new_empty(0) if codes is None else codes,
            None if stepped is None else _narrow(stepped).t().contiguous(),
            None if offsets is None else offsets.float().t().contiguous(),
            None if factors is None else factors.float().flatten(),
            levels,
            inputs,
            group if groups > 1 else codes_group(inputs),
        )

    def forward(self, x: Tensor) -> Tensor:
        """``[..., in]`` to ``[..., out]``, in the type of ``x``."""
        return self.op(
            x,
            self.codes,
            self.scales,
            self.offsets,
            self.factors,
            self.levels,
            self.inputs,
            self.group,
        )

    def kernel_sites(self, path: str) -> Iterator[Site]:
        sizes = {"in_features": self.inputs, "out_features": self.codes.shape[1]}
        sizes |= {"group": self.group, "bits": 8 if isinstance(self.levels, str) else 4}
        yield Site(path, ("packed_linear",), (sizes,), partial(setattr, self, "op"))


def codes_group(inputs: int) -> int:
    """One group of all inputs, rounded up to whole chunks."""
    return -(-inputs // 128) * 128


def _narrow(scales: Tensor) -> Tensor:
    """Half as large where that loses nothing."""
    if scales.dtype is not torch.float32:
        return scales
    half = scales.to(torch.float16)
    return half if torch.equal(half.float(), scales) else scales
