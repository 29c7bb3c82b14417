"""HTTP/1.1 with limits: uvicorn's httptools protocol limits neither headers nor pauses.

What is refused here never reaches the application. ``sweep`` is called about once a second for all
connections, which costs less than a timer for each of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from treadle_server.config import ServerConfig
from treadle_server.errors import APIError

__all__ = ("MAX_HEADERS", "BoundedProtocol", "bounded", "sweep")

MAX_HEADERS = 128
BODY_TIMEOUT_FACTOR = 10
"""A whole body may take so many times the longest pause inside of it."""


class TooLarge(Exception):
    """Ends the parser from inside one of its callbacks."""


class BoundedProtocol(HttpToolsProtocol):
    """One connection. The limits are attributes of a subclass, see ``bounded``."""

    max_header_bytes = 64 * 2**10
    header_timeout = 10.0
    body_timeout = 30.0
    write_timeout = 60.0

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._in_head = True
        self._raw = self._size = self._count = 0
        self._too_large = False
        self._head_since: float | None = self.loop.time()
        self._last_read_time = self._body_start_time = self.loop.time()
        self._stuck_since: float | None = None

    def data_received(self, data: bytes) -> None:
        self._last_read_time = self.loop.time()
        if self._in_head:
            if self._head_since is None:
                self._head_since = self._last_read_time
            # A header that is not complete yet is invisible to the callbacks: count what came.
            self._raw += len(data)
        super().data_received(data)
        max_bytes = self.max_header_bytes + 2**18
        if self._in_head and self._raw > max_bytes and not self.transport.is_closing():
            self._too_large = True
            self.send_400_response("")

    def on_message_begin(self) -> None:
        self._in_head = True
        self._raw = self._size = self._count = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._grow(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count += 1
        self._grow(len(name) + len(value) + 4)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._head_since = None
        self._body_start_time = self.loop.time()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._in_head = True
        self._raw = 0
        super().on_message_complete()

    def _grow(self, size: int) -> None:
        self._size += size
        if self._size > self.max_header_bytes or self._count > MAX_HEADERS:
            self._too_large = True
            raise TooLarge

    def send_400_response(self, msg: str) -> None:
        """Uvicorn's answer to bytes that are not HTTP, as JSON like all other errors."""
        if self._too_large:
            text = (
                f"the header block is larger than {self.max_header_bytes} bytes or "
                f"{MAX_HEADERS} lines; send less"
            )
            error = APIError(431, text, code="headers_too_large")
        else:
            error = APIError(400, "this is not a valid HTTP request")
        body = msgspec.json.encode(error.body)
        head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
        self.transport.write(STATUS_LINE[error.status] + head % len(body) + body)
        self.transport.close()

    def pause_writing(self) -> None:
        self._stuck_since = self.loop.time()
        super().pause_writing()

    def resume_writing(self) -> None:
        self._stuck_since = None
        super().resume_writing()

    def overdue(self, now: float) -> bool:
        """Whether the server has waited too long for the client."""
        if self._stuck_since is not None:
            return now - self._stuck_since > self.write_timeout
        if self._head_since is not None:
            return now - self._head_since > self.header_timeout
        cycle: Any = self.cycle
        receiving = cycle is not None and cycle.more_body and not cycle.response_complete
        return bool(receiving) and (
            now - self._last_read_time > self.body_timeout
            or now - self._body_start_time > self.body_timeout * BODY_TIMEOUT_FACTOR
        )


def bounded(config: ServerConfig) -> type[BoundedProtocol]:
    """The protocol class with the limits of ``config``."""
    limits = {
        name: getattr(config, name)
        for name in ("max_header_bytes", "header_timeout", "body_timeout", "write_timeout")
    }
    return type("Protocol", (BoundedProtocol,), limits)


def sweep(connections: Iterable[Any], now: float) -> int:
    """Close the connections that are overdue and return their number."""
    dropped = 0
    for connection in list(connections):
        if isinstance(connection, BoundedProtocol) and connection.overdue(now):
            connection.transport.abort()
            dropped += 1
    return dropped
