"""Which module has the four-bit weight of a layer: for kernels on CUDA, for torch's operator, or row by row."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from treadle_layers_kit.int4 import PackedInt4
from treadle_layers_kit.quantized import CpuInt4
from treadle_layers_kit.row_int4 import BLOCK, RUN, RowInt4

__all__ = ("ORDER", "Int4Module", "Int4Packing", "even_order")

ATTRIBUTE = "int4_packing"
ORDER = "order"
"""The buffer of a linear layer that has the order of its weight's inputs, int64 ``[in]``, if it is not that of ``x``."""
Int4Module = CpuInt4 | PackedInt4 | RowInt4


class Int4Packing:
    """Brings a weight into the layout that is read here, once it is loaded.

    A linear method of whole codes makes one in ``create_weights``, whatever the bits are, and gives its module what
    ``pack`` returns as ``int4``, and an ``ORDER`` that ``x`` must be brought into before. Who runs steps of the model on a CPU finds it at the empty layer, asks for
    ``row_misfit``, and sets ``by_rows`` where there is none.
    """

    def __init__(
        self,
        module: nn.Module,
        inputs: int,
        group: int,
        dtype: torch.dtype,
        *,
        cuda: bool = False,
        misfit: str = "",
    ) -> None:
        """``misfit`` says of the layer why its weight is nothing for ``RowInt4``, besides its groups."""
        object.__setattr__(module, ATTRIBUTE, self)
        self.inputs, self.group, self.dtype, self.cuda = inputs, group, dtype, cuda
        self.by_rows = False
        """Whether the weight becomes a ``RowInt4`` where it can."""
        self._misfit = misfit

    @staticmethod
    def of(module: nn.Module) -> Int4Packing | None:
        """Return that of a linear layer, if its method has one."""
        packing: Int4Packing | None = vars(module).get(ATTRIBUTE)
        return packing

    def row_misfit(self) -> str:
        """Say why the weight cannot be a ``RowInt4``, as far as it is known before it is loaded; else nothing."""
        if self._misfit:
            return self._misfit
        if self.dtype is not torch.bfloat16:
            name = str(self.dtype).removeprefix("torch.")
            return f"has weights in four bits for {name}, in which activations are not rounded"
        if self.group % RUN:
            return f"has groups of {self.group} inputs, which is not a multiple of {RUN}"
        if self.inputs % BLOCK:
            return f"has {self.inputs} inputs, which is not a multiple of {BLOCK}"
        return ""

    def pack(
        self,
        columns: Callable[[int, int], Tensor],  # first and last + 1 -> codes int [in, columns]
        scales: Tensor,  # [in / group, out_features]
        zeros: Tensor,  # [in / group, out_features]
        group: int,
        *,
        in_order: bool = True,
    ) -> Int4Module | None:
        """For codes of 0 to 15 that mean ``(code - zero) · scale``; ``None`` where nothing takes them.

        ``group`` is that of this rank, and ``in_order`` says that inputs are those of the layer.
        """
        if self.cuda:
            sizes = self.inputs, group, self.dtype
            return PackedInt4.pack(columns, scales, zeros, *sizes, in_order=in_order)
        if scales.device.type != "cpu" or self.dtype is not torch.bfloat16:
            return None
        if self.by_rows:
            return RowInt4.pack(columns, scales, zeros, self.inputs)
        return CpuInt4.pack(columns(0, scales.shape[1]), scales, zeros, group, self.dtype)


def even_order(index: Tensor, group: int) -> Tensor | None:
    """Return the inputs sorted by ``index`` int64 ``[in]``, the group of each; ``None`` if a group has not ``group`` inputs."""
    order = torch.argsort(index, stable=True)
    places = torch.arange(len(index), device=index.device)
    return order if torch.equal(index[order], places // group) else None
