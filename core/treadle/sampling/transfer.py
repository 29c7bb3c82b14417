"""Copies between CPU side and device that do not block the CPU side."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

import torch
from torch import Tensor

__all__ = ("Int32Packer", "download", "upload")


class Int32Packer:
    """Lists of int32 in one buffer, for one transfer. ``add`` returns the position of a list."""

    def __init__(self) -> None:
        self._data = array("i")

    def add(self, values: Iterable[int]) -> slice:
        start = len(self._data)
        self._data.extend(values)
        return slice(start, len(self._data))

    def add_floats(self, values: Iterable[float]) -> slice:
        """Add floats as float32 bits; view the slice as float32."""
        return self.add(array("i", array("f", values).tobytes()))

    def to_device(self, device: torch.device) -> Tensor:
        """Return the data, int32 ``[length]``, on ``device``. The copy is ordered in the stream."""
        return upload(torch.frombuffer(self._data, dtype=torch.int32).clone(), device)


def upload(values: Tensor, device: torch.device) -> Tensor:
    """Return a copy on ``device``, without waiting for the device."""
    if device.type != "cuda":
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)


def download(values: Tensor) -> Tensor:
    """Return a copy on the CPU side, valid once the device's stream has reached it."""
    if values.device.type != "cuda":
        return values.cpu()
    # Only copies to pinned memory are asynchronous.
    pinned = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    return pinned.copy_(values, non_blocking=True)
