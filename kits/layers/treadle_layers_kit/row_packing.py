"""Which layers have their weights row by row, as libraries read them that run whole steps of a decoder on a CPU."""

from __future__ import annotations

from typing import Self

import torch
from torch import Tensor, nn

__all__ = ("ORDER", "RowPacking", "even_order")

ATTRIBUTE = "row_packing"
ORDER = "order"
"""The buffer of a linear layer that has the order of its weight's inputs, int64 ``[in]``, if it is not that of ``x``."""
RUN = 16
"""Groups are multiples of it."""


class RowPacking:
    """Says of a layer whether its weight can be a ``RowBytes``, and whether it is to be one.

    A linear method whose weight can makes one in ``create_weights``. Who runs steps of the model on a CPU finds it at
    the empty layer, asks for ``row_misfit``, and sets ``by_rows`` where there is none.
    """

    def __init__(
        self, module: nn.Module, inputs: int, group: int, dtype: torch.dtype, *, misfit: str = ""
    ) -> None:
        """``misfit`` says of the layer why its weight cannot, besides its groups."""
        object.__setattr__(module, ATTRIBUTE, self)
        self.inputs, self.group, self.dtype, self.misfit = inputs, group, dtype, misfit
        self.by_rows = False
        """Whether the weight becomes one that is read row by row."""

    @classmethod
    def of(cls, module: nn.Module) -> Self | None:
        """Return that of a linear layer, if its method has one."""
        packing = vars(module).get(ATTRIBUTE)
        return packing if isinstance(packing, cls) else None

    def row_misfit(self) -> str:
        """Say why the weight cannot be read row by row, as far as it is known before it is loaded; else nothing."""
        if self.misfit:
            return self.misfit
        if self.dtype is not torch.bfloat16:
            name = str(self.dtype).removeprefix("torch.")
            return f"has quantized weights for {name}, for which they are not unpacked row by row"
        if self.group % RUN or self.inputs % self.group:
            return f"has {self.inputs} inputs in groups of {self.group}, which are to be a multiple of {RUN}"
        return ""


def even_order(index: Tensor, group: int) -> Tensor | None:
    """Return the inputs sorted by ``index`` int64 ``[in]``, the group of each; ``None`` if a group has not ``group`` inputs."""
    order = torch.argsort(index, stable=True)
    places = torch.arange(len(index), device=index.device)
    return order if torch.equal(index[order], places // group) else None
