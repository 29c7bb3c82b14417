"""CUDA graphs: captured one after the other into one memory pool; tensors in it, and in the host's memory."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

__all__ = ("Pieces", "Ring", "Turn", "alias")

TURNS = 4
"""Places of a ring: more than there are steps whose output was not read."""
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Pieces:
    """CUDA graphs that are captured one after the other, of one memory pool.

    ``torch.cuda.graph`` would wait for the device and empty the cache of its allocator each time.
    """

    def __init__(self, pool: Any, stream: torch.cuda.Stream) -> None:
        self._pool, self._stream = pool, stream
        self.graphs: list[torch.cuda.CUDAGraph] = []

    @contextlib.contextmanager
    def capturing(self) -> Iterator[None]:
        """Capture what is launched within. Raises ``RuntimeError`` for what no graph holds."""
        torch.cuda.synchronize(self._stream.device)
        with torch.cuda.stream(self._stream):
            self._begin()
            try:
                yield
            except BaseException:
                with contextlib.suppress(RuntimeError):
                    self.graphs[-1].capture_end()
                raise
            self.graphs[-1].capture_end()

    def next(self) -> None:
        """End a piece and begin the next."""
        self.graphs[-1].capture_end()
        self._begin()

    def _begin(self) -> None:
        graph = torch.cuda.CUDAGraph()
        # Relaxed: a kernel that no step before has run may be loaded while it is captured.
        graph.capture_begin(pool=self._pool, capture_error_mode="relaxed")
        self.graphs.append(graph)


class _Memory:
    def __init__(self, interface: dict[str, object]) -> None:
        self.__cuda_array_interface__ = interface


def alias(tensor: Tensor) -> Tensor:
    """Return a tensor of the same memory that does not keep it: the next capture may use it again."""
    integers = tensor.view(INTEGERS[tensor.element_size()])
    memory = _Memory(integers.__cuda_array_interface__)
    return torch.as_tensor(memory, device=tensor.device).view(tensor.dtype)


class Ring:
    """Pinned memory that graphs read or write in place, int64 ``[TURNS, width]``, by turns.

    A copy between two graphs would cost 10 to 25 us on the device, and several calls of the driver.
    """

    def __init__(self, width: int, device: torch.device) -> None:
        self.pinned = torch.zeros(TURNS, width, dtype=torch.int64, pin_memory=True)
        place = {"shape": (TURNS, width), "typestr": "<i8", "data": (self.pinned.data_ptr(), False)}
        self.device = torch.as_tensor(_Memory({**place, "version": 3}), device=device)


class Turn:
    """Which place of the rings a step has, on the device and beside it."""

    def __init__(self, device: torch.device) -> None:
        self.index = torch.zeros(1, dtype=torch.int64, device=device)
        self.number = 0

    @property
    def following(self) -> int:
        return (self.number + 1) % TURNS

    def advance(self) -> None:
        """Let the device go on to the next place. Captured; whoever replays it sets ``number``."""
        self.index.add_(1).remainder_(TURNS)
