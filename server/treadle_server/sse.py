"""Server-sent events: one encoder, one growing buffer, one ``send`` for all that is ready."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing, suppress
from typing import Any

import msgspec
from litestar.response import Stream
from litestar.types import Receive, Scope, Send

from treadle_server.active_requests import ActiveRequest, ActiveRequests, ClientDisconnected
from treadle_server.errors import APIError, error_of

__all__ = ("DONE", "EventBuffer", "EventStream")

DONE = b"data: [DONE]\n\n"
ALIVE = b": keep-alive\n\n"
ENCODER = msgspec.json.Encoder()


class EventBuffer:
    """Collects events. The buffer is reused; what ``take`` returns is a copy."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def add(self, event: Any, name: str | None = None) -> None:
        """Append one event; ``name`` is for protocols whose events have one."""
        buffer = self._bytes
        if name is not None:
            buffer += b"event: " + name.encode("ascii") + b"\n"
        buffer += b"data: "
        ENCODER.encode_into(event, buffer, -1)
        buffer += b"\n\n"

    def comment(self, text: str) -> None:
        """Append a comment line, which clients ignore."""
        self._bytes += b": " + text.encode("ascii", "replace").replace(b"\n", b" ") + b"\n\n"

    def take(self) -> bytes:
        out = bytes(self._bytes)
        self._bytes.clear()
        return out


def error_event(error: APIError) -> bytes:
    """Return the event of an error in the form of the OpenAI API."""
    buffer = EventBuffer()
    buffer.add(error.body)
    return buffer.take()


class EventStream(Stream):
    """An answer that streams ``events`` (bytes of whole events) and ends with ``end``.

    Nothing is sent before the first events are there, so that an error until then is an ordinary
    error answer. A later one is exactly one event, made by ``on_error``, followed by ``end``. After
    ``pause`` seconds without an event, and then again and again, a comment is sent (0: never), so
    that no proxy takes a long prefill for a dead connection.
    """

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        active_requests: ActiveRequests,
        pause: float,
        headers: Mapping[str, str] | None = None,
        *,
        end: bytes = DONE,
        on_error: Callable[[APIError], bytes] = error_event,
    ) -> None:
        super().__init__(events)
        self._events = events
        self._active_requests = active_requests
        self._pause = pause
        self._end, self._on_error = end, on_error
        self._quiet = True
        self._head = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),
            *((k.encode("latin-1"), v.encode("latin-1")) for k, v in (headers or {}).items()),
        ]
        self._started = False

    def to_asgi_response(self, *_: Any, **__: Any) -> Any:
        """Litestar asks an answer for an ASGI application; this one needs nothing from it."""
        return self.respond

    async def respond(self, scope: Scope, receive: Receive, send: Send) -> None:
        with suppress(ClientDisconnected):
            await self._active_requests.run(receive, lambda request: self._pump(request, send))

    async def _pump(self, request: ActiveRequest, send: Send) -> None:
        comments = asyncio.create_task(self._comments(send)) if self._pause else None
        try:
            try:
                async with aclosing(self._events) as events:
                    async for data in events:
                        if not self._started:
                            await self._start(send)
                        if data:
                            self._quiet = False
                            await send(
                                {"type": "http.response.body", "body": data, "more_body": True}
                            )
            finally:
                if comments is not None:
                    comments.cancel()
        except asyncio.CancelledError:
            if request.reason is None:
                raise
            await self._fail(request.reason, send)
        except Exception as error:
            await self._fail(error, send)
        else:
            if not self._started:
                await self._start(send)
            await send({"type": "http.response.body", "body": self._end, "more_body": False})

    async def _comments(self, send: Send) -> None:
        while True:
            await asyncio.sleep(self._pause)
            if self._quiet:
                if not self._started:
                    await self._start(send)
                await send({"type": "http.response.body", "body": ALIVE, "more_body": True})
            self._quiet = True

    async def _start(self, send: Send) -> None:
        self._started = True
        await send({"type": "http.response.start", "status": 200, "headers": self._head})

    async def _fail(self, error: BaseException, send: Send) -> None:
        api_error = error_of(error)
        if not self._started:
            raise api_error
        body = self._on_error(api_error) + self._end
        await send({"type": "http.response.body", "body": body, "more_body": False})
