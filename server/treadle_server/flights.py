"""Requests that are being answered: each ends with its client, its deadline, or the server.

A handler that only awaits the engine would not notice that its client has left. ``Flights.run``
races the work against the disconnect, cancels it, and waits until the cancellation has reached the
engine, so that a request never outlives the one who wanted it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from litestar.types import Receive

from treadle_server.errors import APIError

__all__ = ("ClientGone", "Flight", "Flights")

T = TypeVar("T")


class ClientGone(Exception):
    """The client has closed the connection; nobody reads the answer."""


class Flight:
    """One request. ``reason`` is why the server itself has ended it."""

    def __init__(self) -> None:
        self.reason: APIError | None = None
        self.task: asyncio.Task[Any] | None = None

    def stop(self, reason: APIError) -> None:
        """End the request; its client gets ``reason``."""
        if self.reason is None and self.task is not None:
            self.reason = reason
            self.task.cancel()


class Flights:
    """All requests of one server that wait for the engine."""

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._live: set[Flight] = set()

    def __len__(self) -> int:
        return len(self._live)

    def stop_all(self, reason: APIError) -> None:
        for flight in list(self._live):
            flight.stop(reason)

    async def run(self, receive: Receive, work: Callable[[Flight], Coroutine[Any, Any, T]]) -> T:
        """Do ``work``. Raises ``ClientGone``, or ``APIError`` (504 past the deadline, or a stop).

        The body of the request must have been read. On return the work has ended, whatever
        the reason.
        """
        flight = Flight()
        task: asyncio.Task[T] = asyncio.create_task(work(flight))
        flight.task = task
        gone = asyncio.create_task(disconnected(receive))
        self._live.add(flight)
        try:
            await asyncio.wait(
                (task, gone), timeout=self._timeout, return_when=asyncio.FIRST_COMPLETED
            )
            if not task.done():
                if gone.done():
                    raise ClientGone
                flight.stop(self._late())
                await asyncio.wait((task,))
            if task.cancelled():
                raise flight.reason or ClientGone()
            return task.result()
        finally:
            self._live.discard(flight)
            gone.cancel()
            if not task.done():
                task.cancel()
                await asyncio.wait((task,))

    def _late(self) -> APIError:
        return APIError(
            504,
            f"the request took longer than {self._timeout:g} s and was stopped; ask for less, or "
            "start the server with a larger --request-timeout",
            code="request_timeout",
        )


async def disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
