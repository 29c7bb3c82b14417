"""Four-bit weights in the layout of ``treadle_layers_kit.int4_layout``, by whatever kernel is offered for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial

import torch
from torch import Tensor, nn

from treadle_layers_kit.fusion import Site
from treadle_layers_kit.int4_layout import BIAS, CHUNK, RUN, int4_linear, pack_codes, pack_steps

__all__ = ("PackedInt4",)

COLUMNS = 1024
"""Outputs that are repacked at a time: a code takes up to eight times its size meanwhile."""

Operation = Callable[[Tensor, Tensor, Tensor, int, int], Tensor]


class PackedInt4(nn.Module):
    """One weight, repacked; called like ``CpuInt4``.

    A linear layer's method that has one makes it a module of the layer: there a kernel for
    ``int4_linear`` is given to it as ``op``, and its tensors count where the weights are counted.
    """

    OP = "int4_linear"

    def __init__(
        self, codes: Tensor, scales: Tensor, inputs: int, group: int, *, in_order: bool = True
    ) -> None:
        """``codes`` and ``scales`` are those of ``treadle_layers_kit.int4_layout``, the latter its steps.

        ``in_order``: inputs are those of the layer.
        """
        super().__init__()
        self.in_order = in_order
        self.codes = nn.Parameter(codes, requires_grad=False)
        self.scales = nn.Parameter(scales, requires_grad=False)
        self.inputs, self.group = inputs, group
        self.op: Operation = int4_linear

    @classmethod
    def pack(
        cls,
        columns: Callable[[int, int], Tensor],  # first and last + 1 -> codes int [in, columns]
        scales: Tensor,  # [in / group, out_features]
        zeros: Tensor,  # [in / group, out_features]
        inputs: int,
        group: int,
        dtype: torch.dtype,
        *,
        in_order: bool = True,
    ) -> PackedInt4 | None:
        """For activations of ``dtype``; ``None`` for others than 16-bit ones, and where a run of
        inputs in a word would cross groups."""
        if dtype not in BIAS or group % RUN or inputs != group * len(scales):
            return None
        out_features = scales.shape[1]
        shape = (-(-inputs // CHUNK), out_features, RUN)
        codes = torch.empty(shape, dtype=torch.int16, device=scales.device)
        for first in range(0, out_features, COLUMNS):
            last = min(first + COLUMNS, out_features)
            codes[:, first:last] = pack_codes(columns(first, last))
        return cls(codes, pack_steps(scales, zeros, dtype), inputs, group, in_order=in_order)

    def forward(self, x: Tensor) -> Tensor:
        """``[..., in]`` to ``[..., out]``, in the type that the weight was packed for."""
        return self.multiply(x, self.op)

    def multiply(self, x: Tensor, op: Operation) -> Tensor:
        """``op`` of ``x`` and the weight."""
        return op(x, self.codes, self.scales, self.inputs, self.group)

    @property
    def sizes(self) -> Mapping[str, int]:
        """For the request of a kernel."""
        features = {"in_features": self.inputs, "out_features": self.codes.shape[1]}
        return features | {"group": self.group}

    def kernel_sites(self, path: str) -> Iterator[Site]:
        yield Site(path, (self.OP,), (self.sizes,), partial(setattr, self, "op"))
