"""Which module has the four-bit weight of a layer: for kernels on CUDA, for torch's operator, or row by row."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from treadle_layers_kit.int4 import PackedInt4
from treadle_layers_kit.quantized import CpuInt4
from treadle_layers_kit.row_int4 import RowInt4
from treadle_layers_kit.row_packing import RowPacking

__all__ = ("Int4Module", "Int4Packing")

Int4Module = CpuInt4 | PackedInt4 | RowInt4


class Int4Packing(RowPacking):
    """Brings codes of up to four bits into the layout that is read here, once they are loaded.

    A linear method of whole codes makes one in ``create_weights``, whatever the bits are, and gives its module what
    ``pack`` returns as ``int4``, and an ``ORDER`` that ``x`` must be brought into before.
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
        """See ``RowPacking``."""
        super().__init__(module, inputs, group, dtype, misfit=misfit)
        self.cuda = cuda

    def takes(self, bits: int) -> bool:
        """Return whether codes of so many bits may be packed."""
        return bits == 4 or (bits < 4 and self.by_rows)

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
            if not RowInt4.takes(self.inputs, group):
                return None
            return RowInt4.pack(columns, scales, zeros, self.inputs)
        return CpuInt4.pack(columns(0, scales.shape[1]), scales, zeros, group, self.dtype)
