"""Requests that are being answered: each ends with its client, its deadline, or the server.

A handler that only awaits the engine would not notice that its client has left. ``ActiveRequests.run``
races the work against the disconnect, cancels it, and waits until the cancellation has reached the
engine, so that no request outlives its client.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from litestar.types import Receive

from treadle_server.errors import APIError

__all__ = ("ActiveRequest", "ActiveRequests", "ClientDisconnected")

T = TypeVar("T")


class ClientDisconnected(Exception):
    """The client has closed the connection and will not read the response."""


class ActiveRequest:
    """One request. ``reason`` is why the server itself has ended it."""

    def __init__(self) -> None:
        self.reason: APIError | None = None
        self.task: asyncio.Task[Any] | None = None

    def stop(self, reason: APIError) -> None:
        """End the request; its client gets ``reason``."""
        if self.reason is None and self.task is not None:
            self.reason = reason
            self.task.cancel()


class ActiveRequests:
    """All requests of one server that wait for the engine."""

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._active: set[ActiveRequest] = set()
        self.on_end: Callable[[], None] = lambda: None
        """Called when a request has ended."""

    def __len__(self) -> int:
        return len(self._active)

    def stop_all(self, reason: APIError) -> None:
        for request in list(self._active):
            request.stop(reason)

    async def run(
        self, receive: Receive, work: Callable[[ActiveRequest], Coroutine[Any, Any, T]]
    ) -> T:
        """Run ``work`` and return its result. Raises ``ClientDisconnected``, or ``APIError`` (504 past the deadline, or a stop).

        The body of the request must have been read. On return the work has ended, whatever
        the reason.
        """
        request = ActiveRequest()
        task: asyncio.Task[T] = asyncio.create_task(work(request))
        request.task = task
        disconnect = asyncio.create_task(disconnected(receive))
        self._active.add(request)
        try:
            await asyncio.wait(
                (task, disconnect), timeout=self._timeout, return_when=asyncio.FIRST_COMPLETED
            )
            if not task.done():
                if disconnect.done():
                    raise ClientDisconnected
                request.stop(self._timeout_error())
                await asyncio.wait((task,))
            if task.cancelled():
                raise request.reason or ClientDisconnected()
            return task.result()
        finally:
            self._active.discard(request)
            self.on_end()
            disconnect.cancel()
            if not task.done():
                task.cancel()
                await asyncio.wait((task,))

    def _timeout_error(self) -> APIError:
        return APIError(
            504,
            f"the request took longer than {self._timeout:g} s and was stopped; ask for less, or "
            "start the server with a larger --request-timeout",
            code="request_timeout",
        )


async def disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
