"""Who may use the engine next: requests of clients first, then lines of batches."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from treadle_server.active_requests import ActiveRequests

__all__ = ("LineSlots",)


class LineSlots:
    """The slots for lines of all batches of a server. A line takes one for each of its sequences.

    A line starts only if requests of clients and lines, this one included, then are at most
    ``max_sequences``, so that no request waits in the engine behind a line, and lines at most ``max_lines``.
    """

    def __init__(self, requests: ActiveRequests, max_lines: int, max_sequences: int) -> None:
        self._requests = requests
        self._max_lines, self._max_sequences = min(max_lines, max_sequences), max_sequences
        self._waiters: deque[tuple[asyncio.Future[None], int]] = deque()
        self._num_taken = 0
        requests.on_end = self._wake

    @asynccontextmanager
    async def taken(self, size: int) -> AsyncIterator[None]:
        """Take ``size`` slots, or all if that is more. The first to wait is the first to get them."""
        size = min(size, self._max_lines)
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.append((waiter, size))
        self._wake()
        try:
            await waiter
            yield
        finally:
            if waiter.done() and not waiter.cancelled():
                self._num_taken -= size
            self._wake()

    def _wake(self) -> None:
        while self._waiters:
            waiter, size = self._waiters[0]
            if not waiter.cancelled():
                num_running = self._num_taken + len(self._requests)
                room = min(self._max_lines - self._num_taken, self._max_sequences - num_running)
                if size > room:
                    return
                self._num_taken += size
                waiter.set_result(None)
            self._waiters.popleft()
