"""A server with OpenAI's API: its models, and requests whose answers stream."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from treadle.errors import (
    ConfigError,
    EngineError,
    ModelNotFoundError,
    QueueFullError,
    RequestError,
    TreadleError,
)
from treadle_cli.client.address import Address
from treadle_cli.client.connection import Connection, ConnectionLost, Response
from treadle_cli.client.events import Event, EventReader

__all__ = ("Server", "error_of")

IDLE_SECONDS = 600.0
"""Longest wait for the next piece of an answer."""


class ModelCard(msgspec.Struct):
    id: str


class ModelList(msgspec.Struct):
    data: list[ModelCard]


class Server:
    """Connections to one server, kept open and used again. Belongs to one event loop."""

    def __init__(
        self, url: str, api_key: str | None = None, headers: Mapping[str, str] | None = None
    ) -> None:
        """``api_key`` is sent as a bearer token. Raises ``ConfigError`` for a bad URL or header."""
        self.address = Address.parse(url)
        self._headers = {"User-Agent": "treadle", "Accept": "*/*"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._headers |= headers or {}
        for name, value in self._headers.items():
            if not (name + value).isascii() or not (name + value).isprintable():
                raise ConfigError(f"the header {name!r} holds characters that HTTP does not allow")
        self._tls = ssl.create_default_context() if self.address.tls else None
        self._idle: list[Connection] = []

    async def models(self) -> list[str]:
        """Return the names of the models, in the server's order."""
        async with self._request("GET", "/models") as response:
            content = await response.read()
        try:
            return [card.id for card in msgspec.json.decode(content, type=ModelList).data]
        except msgspec.DecodeError as error:
            raise EngineError(f"{self.address}/models is not a list of models: {error}") from error

    async def stream(
        self, path: str, body: Mapping[str, Any]
    ) -> AsyncIterator[tuple[float, Event]]:
        """Post a request and yield the events of its answer with the time of their arrival.

        Raises ``RequestError`` (4xx), ``QueueFullError`` (429) or ``EngineError``.
        """
        async with self._request("POST", path, msgspec.json.encode(body)) as response:
            reader = EventReader()
            async for now, piece in response.body():
                for event in reader.feed(piece):
                    if event.failure is not None:
                        raise EngineError(f"the server failed: {event.failure}")
                    yield now, event
            if not reader.is_done:
                raise EngineError(f"{self.address} ended an answer in the middle")

    def close(self) -> None:
        """Close the connections that nobody uses."""
        while self._idle:
            self._idle.pop().close()

    @asynccontextmanager
    async def _request(self, method: str, path: str, body: bytes = b"") -> AsyncIterator[Response]:
        """Send a request. A connection whose answer was not read to its end is closed."""
        connection, response = await self._send(method, self.address.base + path, body)
        try:
            if response.status >= 300:
                raise error_of(response.status, await response.read(), f"{self.address}{path}")
            yield response
        finally:
            if connection.is_reusable:
                self._idle.append(connection)
            else:
                connection.close()

    async def _send(self, method: str, path: str, body: bytes) -> tuple[Connection, Response]:
        while True:
            is_fresh = not self._idle
            connection = (
                await Connection.open(self.address, self._tls) if is_fresh else self._idle.pop()
            )
            try:
                async with asyncio.timeout(IDLE_SECONDS):
                    return connection, await connection.request(method, path, self._headers, body)
            except ConnectionLost as error:
                connection.close()
                if is_fresh or not error.is_unused:
                    raise
                # The server closed an idle connection before it saw this request: try a new one.
            except BaseException as error:
                connection.close()
                if isinstance(error, TimeoutError):
                    text = f"{self.address} did not answer within {IDLE_SECONDS:g} s"
                    raise EngineError(text) from error
                raise


def error_of(status: int, content: bytes, place: str) -> TreadleError:
    """Return the error of treadle for an answer that is not a success."""
    message = error_message(content) or content[:200].decode(errors="replace").strip()
    text = f"{place} answered {status}" + (f": {message}" if message else "")
    if status in (401, 403):
        return RequestError(f"{text}; give a key with --api-key")
    if status == 404 and not message:
        return ModelNotFoundError(f"{text}; is the URL that of an OpenAI-compatible server?")
    if status == 404:
        return ModelNotFoundError(text)
    if status == 429:
        return QueueFullError(text)
    return RequestError(text) if 400 <= status < 500 else EngineError(text)


def error_message(content: bytes) -> str:
    """The message in OpenAI's form, or in those of other servers; ``""`` if there is none."""
    try:
        value = msgspec.json.decode(content)
    except msgspec.DecodeError:
        return ""
    for name in ("error", "message", "detail"):
        if isinstance(value, dict):
            value = value.get(name, value)
    return value if isinstance(value, str) else ""
