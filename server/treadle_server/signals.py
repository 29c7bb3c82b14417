"""The signals that end a server."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Coroutine, Iterator
from typing import Any

__all__ = ("Signals",)


class Signals:
    """SIGTERM and SIGINT as two events: the first, and any further one."""

    def __init__(self) -> None:
        self.requested = asyncio.Event()
        self.forced = asyncio.Event()
        self.last = 0

    @contextlib.contextmanager
    def caught(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        signals = (signal.SIGTERM, signal.SIGINT)
        for number in signals:
            loop.add_signal_handler(number, self.take, number)
        try:
            yield
        finally:
            for number in signals:
                loop.remove_signal_handler(number)

    async def run_until_signal(self, work: Coroutine[Any, Any, Any]) -> bool:
        """Run ``work`` and return ``True``; cancel it and return ``False`` if a signal comes first.

        Raises the error of ``work``.
        """
        task = asyncio.create_task(work)
        signal_task = asyncio.create_task(self.requested.wait())
        try:
            await asyncio.wait((task, signal_task), return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                task.result()
                return True
            return False
        finally:
            for pending_task in (task, signal_task):
                pending_task.cancel()
            await asyncio.gather(task, signal_task, return_exceptions=True)

    def take(self, number: int) -> None:
        self.last = number
        (self.forced if self.requested.is_set() else self.requested).set()
