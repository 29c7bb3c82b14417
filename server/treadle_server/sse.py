"""Server-sent events: one encoder, one growing buffer, one ``send`` for all that is ready."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing, suppress
from typing import Any, cast

import msgspec
from litestar.response import Stream
from litestar.types import Receive, Scope, Send

from treadle_server.active_requests import ActiveRequest, ActiveRequests, ClientDisconnected
from treadle_server.errors import APIError, error_of

__all__ = ("DONE", "EventBuffer", "EventStream", "EventWriter", "LineBuffer")

DONE = b"data: [DONE]\n\n"
OPENING_DELAY = 1.0
"""Seconds without an output after which an answer that has opening events sends them: until then
the engine may still refuse the request, which is an ordinary error answer."""
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


class LineBuffer(EventBuffer):
    """Collects lines of JSON, for protocols that stream those. They have no names and no comments."""

    def add(self, event: Any, name: str | None = None) -> None:
        ENCODER.encode_into(event, self._bytes, -1)
        self._bytes += b"\n"

    def comment(self, text: str) -> None:
        """Write nothing: a line that is no JSON ends the client."""


class EventWriter:
    """Writes the events of one streamed answer. What it returns are bytes of whole events.

    The protocol is that of the OpenAI completions: errors are nameless events, pauses are filled with
    comments, and the last event is ``[DONE]``.
    """

    end = DONE
    media_type = "text/event-stream; charset=utf-8"

    def __init__(self) -> None:
        self.buffer = EventBuffer()

    def opening(self) -> bytes:
        """Return the events that can be sent before there is any output."""
        return b""

    def keep_alive(self) -> bytes:
        """Return what fills a pause."""
        return ALIVE

    def error(self, error: APIError) -> bytes:
        """Return the event that tells of a failure."""
        self.buffer.add(error.body)
        return self.buffer.take()


class EventStream(Stream):
    """An answer that streams ``events`` (bytes of whole events), in the protocol of ``writer``.

    Nothing is sent before the first events are there, so that an error until then is an ordinary
    error answer. A later one is exactly one event, followed by the end. After ``pause`` seconds
    without an event, and then again and again, the writer fills the pause (0: never), so that no
    proxy takes a long prefill for a dead connection.
    """

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        writer: EventWriter,
        active_requests: ActiveRequests,
        pause: float,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(events)
        self._events = events
        self._active_requests = active_requests
        self._pause = pause
        self._writer = writer
        self._quiet = True
        self._head = [
            (b"content-type", writer.media_type.encode("latin-1")),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),
            *((k.encode("latin-1"), v.encode("latin-1")) for k, v in (headers or {}).items()),
        ]
        self._started = False
        self._state: dict[str, Any] = {}

    def to_asgi_response(self, *_: Any, **__: Any) -> Any:
        """Litestar asks an answer for an ASGI application; this one needs nothing from it."""
        return self.respond

    async def respond(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._state = cast("dict[str, Any]", scope).setdefault("state", {})
        with suppress(ClientDisconnected):
            await self._active_requests.run(receive, lambda request: self._pump(request, send))

    async def _pump(self, request: ActiveRequest, send: Send) -> None:
        filler = asyncio.create_task(self._fill_pauses(send)) if self._pause else None
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
                if filler is not None:
                    filler.cancel()
        except asyncio.CancelledError:
            if request.reason is None:
                raise
            await self._fail(request.reason, send)
        except Exception as error:
            await self._fail(error, send)
        else:
            if not self._started:
                await self._start(send)
            await send({"type": "http.response.body", "body": self._writer.end, "more_body": False})

    async def _fill_pauses(self, send: Send) -> None:
        early = min(OPENING_DELAY, self._pause)
        await asyncio.sleep(early)
        await self._fill(self._writer.opening(), send)
        await asyncio.sleep(self._pause - early)
        while True:
            if self._quiet:
                await self._fill(self._writer.keep_alive(), send)
            self._quiet = True
            await asyncio.sleep(self._pause)

    async def _fill(self, data: bytes, send: Send) -> None:
        if not data:
            return
        if not self._started:
            await self._start(send)
        await send({"type": "http.response.body", "body": data, "more_body": True})

    async def _start(self, send: Send) -> None:
        self._started = True
        await send({"type": "http.response.start", "status": 200, "headers": self._head})

    async def _fail(self, error: BaseException, send: Send) -> None:
        api_error = error_of(error)
        if not self._started:
            raise api_error
        self._state["error"] = api_error
        body = self._writer.error(api_error) + self._writer.end
        await send({"type": "http.response.body", "body": body, "more_body": False})
