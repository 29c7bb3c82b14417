"""The routes of an isolated server plugin, in the server: each request is answered in the plugin's process.

They are ordinary routes, behind the keys, the metrics and the drain of the server. If the process is lost,
the requests that it was answering fail, and the next one starts another.
"""

from __future__ import annotations

import asyncio
import logging
import re
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any, cast

from litestar import Request, Response
from litestar.handlers import HTTPRouteHandler, route

from treadle.errors import PluginLoadError, TreadleError
from treadle.plugins.call_stats import CallCounter
from treadle.processes.watchdog import MAX_STUCK_THREADS, RETRY_SECONDS
from treadle_server.active_requests import ClientDisconnected
from treadle_server.errors import APIError, plugin_failed
from treadle_server.isolation.route_connection import Connection, Late, Lost, Stream
from treadle_server.isolation.route_process import RouteProcess
from treadle_server.isolation.route_wire import (
    EndOfAnswer,
    Head,
    Headers,
    Piece,
    Raised,
    Refusal,
    Route,
    Scope,
    Start,
)

if TYPE_CHECKING:
    from litestar import Litestar
    from litestar.config.app import AppConfig
    from litestar.types import Receive, Send
    from litestar.types import Scope as ASGIScope

    from treadle_server.context import ServerContext

__all__ = ("IsolatedRoutes",)

log = logging.getLogger("treadle.plugins")

MAX_FAILURES = MAX_STUCK_THREADS
"""Processes lost in a row after which one request in ``RETRY_SECONDS`` is tried."""
SECRETS = frozenset({b"authorization", b"x-api-key"})
"""Headers that open this server, and are not for a plugin that is not trusted."""
NAME = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
BAD_VALUE = re.compile(rb"[\r\n\0]")


class IsolatedRoutes:
    """What one application has of an isolated plugin: its routes, and the process that answers them.

    ``start_process`` starts another process, and calls its hook with ``start``.
    """

    def __init__(
        self,
        id: str,
        context: ServerContext,
        counter: CallCounter,
        start: Start,
        start_process: Callable[[], RouteProcess],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start the process and call the hook. Raises what it raises, and ``PluginLoadError``."""
        self.id = id
        self._context, self._counter, self._start = context, counter, start
        self._start_process = start_process
        self._clock = clock
        self._num_failures = 0
        self._retry_time = 0.0
        self._connection: Connection | None = None
        self._opening: asyncio.Task[Connection] | None = None
        self._lock = threading.Lock()
        self.routes: list[Route] = []
        self._process: RouteProcess | None = self._new_process()

    @property
    def pid(self) -> int | None:
        """The process that answers, ``None`` while there is none."""
        if self._connection is not None and not self._connection.lost:
            return self._connection.process.pid
        return None if self._process is None else self._process.pid

    @property
    def refusal(self) -> str:
        """Why no request is passed on at the moment; empty if they are."""
        seconds = self._retry_time - self._clock()
        if self._num_failures < MAX_FAILURES or seconds <= 0:
            return ""
        lost = f"its process was lost {self._num_failures} times in a row"
        return f"{lost}; it is tried again in {seconds:.0f} s"

    def add_to(self, app: AppConfig) -> None:
        """Add the routes to the application of the server, with whose lifespan the process ends."""
        app.route_handlers.extend(self._handler(route) for route in self.routes)
        app.lifespan.append(self._lifespan)

    # -- the process -----------------------------------------------------------------

    def _new_process(self) -> RouteProcess:
        """Return a process whose hook was called. Raises ``PluginLoadError``, and what it raises."""
        process = self._start_process()
        try:
            tokenizer: Any = self._context.engine.tokenizer
        except TreadleError:
            tokenizer = None
        routes = process.begin(self._start, tokenizer)
        if self.routes and routes != self.routes:
            process.kill()
            raise PluginLoadError(f"{self.id} has other routes than when it was started first")
        self.routes = routes
        return process

    async def _connect(self) -> Connection:
        """Return the connection to a process. Raises ``Lost`` if there is none."""
        if refusal := self.refusal:
            raise Lost(refusal)
        if self._num_failures >= MAX_FAILURES:
            self._retry_time = self._clock() + RETRY_SECONDS  # this request is the trial
        if self._connection is not None and not self._connection.lost:
            return self._connection
        if self._opening is None or self._opening.done():
            self._opening = asyncio.create_task(self._open())
        return await asyncio.shield(self._opening)  # others wait for it, too

    async def _open(self) -> Connection:
        process, self._process = self._process, None
        try:
            if process is None:
                process = await asyncio.to_thread(self._new_process)
            connection = Connection(process, self._context.engine, self._on_lost)
            await connection.open()
        except Exception as error:  # the plugin may raise anything
            self._on_lost(str(error))
            raise Lost("its process does not start; the log says why") from error
        self._connection = connection
        return connection

    def _on_lost(self, reason: str) -> None:
        self._num_failures += 1
        log.error("%s has lost its process: %s", self.id, reason)
        if self._num_failures >= MAX_FAILURES:
            self._retry_time = self._clock() + RETRY_SECONDS
            lost = (self.id, self._num_failures, RETRY_SECONDS)
            log.error("%s has lost its process %d times in a row and is not called for %g s", *lost)

    @asynccontextmanager
    async def _lifespan(self, _: Litestar) -> AsyncIterator[None]:
        await self._connect()
        try:
            yield
        finally:
            if self._connection is not None:
                await self._connection.close()

    # -- requests --------------------------------------------------------------------

    def _handler(self, place: Route) -> HTTPRouteHandler:
        more: dict[str, Any] = {}
        if place.max_body is not None:
            more["request_max_body_size"] = place.max_body

        @route(
            place.path,
            http_method=[cast("Any", place.method)],
            status_code=200,
            opt={"public": True} if place.is_public else {},
            include_in_schema=place.in_schema,
            summary=place.summary,
            description=place.description,
            **more,
        )
        async def isolated(request: Request[Any, Any, Any]) -> Response[bytes]:
            return _Answer(self, await request.body())

        return isolated

    async def respond(self, body: bytes, scope: ASGIScope, receive: Receive, send: Send) -> None:
        """Answer a request. Raises ``APIError`` for one that fails before its answer begins."""
        try:
            connection = await self._connect()
            stream = connection.begin(self._scope(scope), body)
        except Lost as error:
            raise self._unavailable(error) from error
        try:
            await self._context.active_requests.run(
                receive, lambda _: self._pump(connection, stream, send)
            )
        finally:
            connection.leave(stream)

    async def _pump(self, connection: Connection, stream: Stream, send: Send) -> None:
        message: Any
        has_head = False
        while True:
            match message := await stream.events.get():
                case Head(status=status, headers=headers):
                    check_head(self.id, status, headers, is_first=not has_head)
                    has_head = True
                    begin: Any = {
                        "type": "http.response.start",
                        "status": status,
                        "headers": headers,
                    }
                    await send(begin)
                case Piece(data=data):
                    if not has_head:
                        raise self._failed("a body before its head")
                    await send({"type": "http.response.body", "body": data, "more_body": True})
                    connection.acknowledge(stream, len(data))
                case Refusal():
                    self._worked()
                    raise APIError(
                        message.status,
                        message.message,
                        type=message.error_type,
                        param=message.param,
                        code=message.code,
                        headers=message.headers,
                    )
                case Raised(text=text):
                    raise self._failed(text)
                case EndOfAnswer(is_complete=is_complete):
                    if not (has_head and is_complete):
                        raise self._failed("an answer without an end")
                    self._worked()
                    await send({"type": "http.response.body", "body": b"", "more_body": False})
                    return
                case Lost():
                    raise self._unavailable(message)
                case Late():
                    raise self._late(message)

    def _worked(self) -> None:
        self._num_failures = 0
        self._counter.record_success(0.0)  # a stream may be as long as it likes

    def _failed(self, text: str) -> APIError:
        log.error("%s failed on a request: %s", self.id, text)
        self._num_failures = 0  # its process works
        self._counter.record_failure()
        return plugin_failed(self.id)

    def _late(self, error: Late) -> APIError:
        log.error("%s %s", self.id, error)
        self._counter.record_failure()
        return APIError(504, f"{self.id} {error}", code="plugin_timeout")

    def _unavailable(self, error: Lost) -> APIError:
        self._counter.record_failure()
        return APIError(
            503,
            f"{self.id}, an isolated plugin, cannot answer now: {error}",
            code="plugin_unavailable",
            headers={"retry-after": "5"},
        )

    def _scope(self, scope: ASGIScope) -> Scope:
        fields, config = cast("dict[str, Any]", scope), self._context.config
        hidden = SECRETS if config.api_key or config.admin_api_key else ()
        client, server = fields.get("client"), fields.get("server")
        return Scope(
            method=fields["method"],
            path=fields["path"],
            raw_path=fields.get("raw_path") or fields["path"].encode(),
            query_string=fields.get("query_string", b""),
            root_path=fields.get("root_path", ""),
            scheme=fields.get("scheme", "http"),
            http_version=fields.get("http_version", "1.1"),
            headers=[(bytes(k), bytes(v)) for k, v in fields["headers"] if k not in hidden],
            client=None if client is None else tuple(client),
            server=None if server is None else tuple(server),
            request_id=fields.get("state", {}).get("request_id", ""),
        )


class _Answer(Response[bytes]):
    """What the plugin's process answers to a request whose body has been read."""

    def __init__(self, routes: IsolatedRoutes, body: bytes) -> None:
        super().__init__(b"")
        self._routes, self._body = routes, body

    def to_asgi_response(self, *_: Any, **__: Any) -> Any:
        """Litestar asks an answer for an ASGI application; this one needs nothing from it."""
        return self.respond

    async def respond(self, scope: ASGIScope, receive: Receive, send: Send) -> None:
        with suppress(ClientDisconnected):
            await self._routes.respond(self._body, scope, receive, send)


def check_head(id: str, status: int, headers: Headers, *, is_first: bool) -> None:
    """Raise ``APIError`` for a head that would break the connection to the client."""
    bad = [n for n, v in headers if not NAME.fullmatch(n) or BAD_VALUE.search(v)]
    if not is_first or not 200 <= status < 600 or bad:
        log.error("%s failed on a request: it sent a head with status %d, %r", id, status, bad)
        raise plugin_failed(id)
