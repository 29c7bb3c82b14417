"""Sequences that wait for a slot, in the policy's order."""

from __future__ import annotations

import heapq
import itertools

from treadle.scheduler.sequence import Sequence

__all__ = ("WaitingQueue",)


class WaitingQueue:
    """A priority queue. A sequence that has finished meanwhile (aborted) is dropped when met."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[float, ...], int, Sequence]] = []
        self._ticket = itertools.count()
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def push(self, sequence: Sequence) -> None:
        """Enter by ``sequence.order``; equals keep the order in which they entered."""
        heapq.heappush(self._heap, (sequence.order, next(self._ticket), sequence))
        self._size += 1

    def peek(self) -> Sequence | None:
        while self._heap and self._heap[0][2].finished:
            heapq.heappop(self._heap)
        return self._heap[0][2] if self._heap else None

    def pop(self) -> Sequence:
        """Remove what ``peek`` has just returned."""
        self._size -= 1
        return heapq.heappop(self._heap)[2]

    def forget(self, sequence: Sequence) -> None:
        """A waiting sequence has finished; its entry is dropped when it surfaces."""
        if not sequence.finished:
            raise ValueError(f"{sequence!r} has not finished")
        self._size -= 1
