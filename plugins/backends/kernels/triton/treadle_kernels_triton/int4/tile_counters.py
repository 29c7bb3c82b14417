"""Counters with which programs that share a tile find out who is last."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ("TileCounters",)


class TileCounters:
    """Counters for tiles whose depth is shared: zeros whenever no kernel runs that counts in them.

    Captured graphs keep reading the same ones. Two products must not count in them at the same time, so
    whoever loads an operation has counters of its own, and calls it on one stream at a time, as models call
    their layers. That the next kernel starts early is no harm: it does not count before this one has
    finished.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._buffers: dict[torch.device, Tensor] = {}

    def for_device(self, device: torch.device) -> Tensor | None:
        """int32, one for each tile that may be shared.

        ``None`` if they would have to be made in a capture, whose replays alone would make them zeros.
        """
        counters = self._buffers.get(device)
        if counters is None:
            if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                return None
            counters = torch.zeros(self._count, dtype=torch.int32, device=device)
            self._buffers[device] = counters
        return counters
