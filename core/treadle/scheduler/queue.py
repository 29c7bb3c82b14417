"""The queue of sequences that wait for a slot, in the policy's order."""

from __future__ import annotations

import heapq
import itertools

from treadle.scheduler.sequence import SequenceState

__all__ = ("WaitingQueue",)


class WaitingQueue:
    """A priority queue. Aborted sequences are removed lazily, when they reach the front."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[float, ...], int, SequenceState]] = []
        self._ticket = itertools.count()
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def push(self, sequence: SequenceState) -> None:
        """Insert by ``sequence.sort_key``. Sequences with equal keys keep their insertion order."""
        heapq.heappush(self._heap, (sequence.sort_key, next(self._ticket), sequence))
        self._size += 1

    def peek(self) -> SequenceState | None:
        while self._heap and self._heap[0][2].finished:
            heapq.heappop(self._heap)
        return self._heap[0][2] if self._heap else None

    def pop(self) -> SequenceState:
        """Remove and return the first sequence. Call ``peek`` first: it drops finished ones."""
        self._size -= 1
        return heapq.heappop(self._heap)[2]

    def discard(self, sequence: SequenceState) -> None:
        """Stop counting a waiting sequence that has finished. ``peek`` drops its entry later."""
        if not sequence.finished:
            raise ValueError(f"{sequence!r} has not finished")
        self._size -= 1
