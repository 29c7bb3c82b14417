"""One HTTP/1.1 connection, parsed by httptools: a request, then its response piece by piece."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections import deque
from collections.abc import AsyncIterator, Mapping
from typing import Any, cast

import httptools

from treadle.errors import EngineError
from treadle_cli.client.address import Address

__all__ = ("Connection", "ConnectionLost", "Response")

CONNECT_SECONDS = 10.0
MAX_PENDING_BYTES = 2**20
"""Bytes that were received and not read yet; then the socket waits."""


class ConnectionLost(EngineError):
    """The server closed the connection. ``is_unused`` if it had not answered at all."""

    def __init__(self, message: str, *, is_unused: bool) -> None:
        super().__init__(message)
        self.is_unused = is_unused


class Response:
    """A response whose body may still be arriving."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.status = 0
        self.headers: dict[str, str] = {}
        self.pieces: deque[tuple[float, bytes]] = deque()
        self.is_complete = False
        self.error: EngineError | None = None

    async def body(self) -> AsyncIterator[tuple[float, bytes]]:
        """Yield the pieces of the body, each with the ``perf_counter`` of its arrival.

        Raises ``EngineError`` if the connection breaks or the response is not HTTP.
        """
        while True:
            while self.pieces:
                piece = self.pieces.popleft()
                self._connection.consumed(len(piece[1]))
                yield piece
            if self.error is not None:
                raise self.error
            if self.is_complete:
                return
            await self._connection.wait()

    async def read(self, limit: int = 16 * 2**20) -> bytes:
        """Return the whole body, of which at most ``limit`` bytes."""
        parts, size = [], 0
        async for _, piece in self.body():
            parts.append(piece)
            size += len(piece)
            if size > limit:
                raise EngineError(f"the server's answer is larger than {limit} bytes")
        return b"".join(parts)


class Connection(asyncio.Protocol):
    """One connection, for one request at a time."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self._transport: asyncio.Transport | None = None
        self._parser: Any = None
        self._response: Response | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._num_pending = 0
        self._is_paused = False
        self._lasts_until_close = False
        self._now = 0.0

    @classmethod
    async def open(cls, address: Address, context: ssl.SSLContext | None) -> Connection:
        """Connect. Raises ``EngineError`` that names the address."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                if address.uds is not None:
                    _, protocol = await loop.create_unix_connection(
                        lambda: cls(address), address.uds
                    )
                else:
                    _, protocol = await loop.create_connection(
                        lambda: cls(address), address.host, address.port, ssl=context
                    )
        except TimeoutError as error:
            raise EngineError(
                f"{address} did not accept a connection within {CONNECT_SECONDS:g} s"
            ) from error
        except OSError as error:  # ssl.SSLError is one, too
            raise EngineError(f"{address} cannot be reached: {error.strerror or error}") from error
        return protocol

    @property
    def is_reusable(self) -> bool:
        """Whether another request may be sent."""
        response = self._response
        return (
            self._transport is not None
            and not self._transport.is_closing()
            and (response is None or (response.is_complete and not self._lasts_until_close))
        )

    async def request(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes = b""
    ) -> Response:
        """Send a request and return its response once the headers are here."""
        if self._transport is None or self._transport.is_closing():
            raise ConnectionLost(f"{self._address} closed the connection", is_unused=True)
        lines = [f"{method} {path} HTTP/1.1", f"Host: {self._address.authority}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        if body:
            lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
        self._parser = httptools.HttpResponseParser(self)
        self._response = response = Response(self)
        self._lasts_until_close = False
        self.consumed(self._num_pending)  # what nobody read of the previous response
        self._transport.write("\r\n".join([*lines, "", ""]).encode("latin-1") + body)
        while not response.status and response.error is None:
            await self.wait()
        if not response.status and response.error is not None:
            raise response.error
        return response

    def close(self) -> None:
        """Close at once; the server sees that its client has left."""
        if self._transport is not None:
            self._transport.abort()

    # -- the reader's side -------------------------------------------------------------

    async def wait(self) -> None:
        """Wait until something arrives."""
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def consumed(self, size: int) -> None:
        self._num_pending -= size
        if self._is_paused and self._num_pending < MAX_PENDING_BYTES and self._transport:
            self._is_paused = False
            self._transport.resume_reading()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _fail(self, error: EngineError) -> None:
        if self._response is not None and not self._response.is_complete:
            self._response.error = self._response.error or error
        self._wake()
        self.close()

    # -- what asyncio calls ------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self._now = time.perf_counter()
        if self._parser is None or self._response is None or self._response.is_complete:
            return self._fail(EngineError(f"{self._address} sent data that nobody asked for"))
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(EngineError(f"{self._address} does not speak HTTP/1.1: {error}"))
        except httptools.HttpParserUpgrade:
            self._fail(EngineError(f"{self._address} wants another protocol than HTTP/1.1"))
        self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        response = self._response
        if response is not None and not response.is_complete:
            if self._lasts_until_close and exc is None:
                response.is_complete = True
            elif response.error is None:
                reason = "in the middle of an answer" if response.status else "without an answer"
                text = f"{self._address} closed the connection {reason}"
                response.error = ConnectionLost(text, is_unused=not response.status)
        self._transport = None
        self._wake()

    # -- what the parser calls ---------------------------------------------------------

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._response is not None:
            self._response.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        response, status = self._response, self._parser.get_status_code()
        if response is None or status < 200:  # 100 Continue announces the real one
            return
        response.status = status
        framed = "content-length" in response.headers or "transfer-encoding" in response.headers
        self._lasts_until_close = not framed or not self._parser.should_keep_alive()

    def on_body(self, data: bytes) -> None:
        if self._response is None:
            return
        self._response.pieces.append((self._now, data))
        self._num_pending += len(data)
        if self._num_pending > MAX_PENDING_BYTES and self._transport and not self._is_paused:
            self._is_paused = True
            self._transport.pause_reading()

    def on_message_complete(self) -> None:
        if self._response is not None and self._response.status:
            self._response.is_complete = True
