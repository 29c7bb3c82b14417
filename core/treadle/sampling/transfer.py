"""Copies between host and device that do not make the host wait.

Everything that new slots bring along travels in one of them.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable

import torch
from torch import Tensor

__all__ = ("Parcel", "download", "upload")


class Parcel:
    """Lists of int32 packed back to back; ``add`` says where a list will be found on the device."""

    def __init__(self) -> None:
        self._data = array("i")

    def add(self, values: Iterable[int]) -> slice:
        start = len(self._data)
        self._data.extend(values)
        return slice(start, len(self._data))

    def add_floats(self, values: Iterable[float]) -> slice:
        """Floats as float32 bits; view the slice as float32."""
        return self.add(array("i", array("f", values).tobytes()))

    def ship(self, device: torch.device) -> Tensor:
        """int32 ``[length]`` on ``device``; the copy is ordered with the stream's work."""
        return upload(torch.frombuffer(self._data, dtype=torch.int32).clone(), device)


def upload(values: Tensor, device: torch.device) -> Tensor:
    """A copy on ``device`` that does not make the host wait for the device."""
    if device.type != "cuda":
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)


def download(values: Tensor) -> Tensor:
    """A copy on the host that is complete once the device's queue has reached it."""
    if values.device.type != "cuda":
        return values.cpu()
    # Only into pinned memory does a copy run beside the host.
    pinned = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    return pinned.copy_(values, non_blocking=True)
