"""Parameters whose values stay where the file of the checkpoint is mapped into memory.

Such a parameter costs no memory of its own: its pages are the file's, and every process that maps the file
shares them. Whoever reads weights as the checkpoint has them says so with ``allow_mapping`` before they are
loaded. A write makes private copies of the pages that it touches, and the file stays as it is.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from treadle_layers_kit.weight import layout_of

__all__ = ("allow_mapping", "is_mapped", "map_parameter", "may_map", "release_pages")


def allow_mapping(parameters: Iterable[Tensor]) -> None:
    """Say that these parameters may be read from the file, at any address and without being packed."""
    for parameter in parameters:
        parameter.treadle_mapping = "allowed"  # type: ignore[attr-defined]


def is_mapped(parameter: Tensor) -> bool:
    """Return whether the values are the file's pages."""
    return getattr(parameter, "treadle_mapping", None) == "mapped"


def may_map(parameter: Tensor, tensor: Tensor, part: int | None) -> bool:
    """Return whether ``tensor`` is exactly what ``part`` of the parameter holds, value by value."""
    if getattr(parameter, "treadle_mapping", None) is None or parameter.device.type != "cpu":
        return False
    layout = layout_of(parameter)
    shape = list(parameter.shape)
    if len(layout.outputs) > 1:
        if part is None or layout.output_dim != 0 or layout.output_block != 1 or layout.stack:
            return False
        shape[0] = layout.outputs[part].size
    return (
        list(tensor.shape) == shape
        and tensor.dtype == parameter.dtype
        and tensor.device.type == "cpu"
        and tensor.is_contiguous()
        and tensor.data_ptr() % tensor.element_size() == 0
    )


def map_parameter(parameter: Tensor, parts: Sequence[Tensor]) -> bool:
    """Let the parameter be its parts, if they lie one behind the other; say whether they do."""
    if len(parts) == 1:
        parameter.data = parts[0]
    else:
        address = parts[0].data_ptr()
        for part in parts:
            if part.data_ptr() != address:
                return False
            address += part.nbytes
        memory = (ctypes.c_uint8 * sum(part.nbytes for part in parts)).from_address(
            parts[0].data_ptr()
        )
        memory.parts = tuple(parts)  # type: ignore[attr-defined]  # they keep the file mapped
        parameter.data = torch.frombuffer(memory, dtype=parameter.dtype).view(parameter.shape)
    parameter.treadle_mapping = "mapped"  # type: ignore[attr-defined]
    return True


def release_pages(tensor: Tensor) -> None:
    """Give back the pages of a tensor that is a file's mapped memory: they are read anew when they are needed.

    Values that were written since are lost, and so is a tensor that is no mapping of a file.
    """
    page = mmap.PAGESIZE
    first = -(-tensor.data_ptr() // page) * page
    last = (tensor.data_ptr() + tensor.nbytes) // page * page
    madvise = (
        getattr(ctypes.CDLL(None), "madvise", None) if hasattr(mmap, "MADV_DONTNEED") else None
    )
    if madvise is not None and last > first:
        madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), mmap.MADV_DONTNEED)
