"""The outermost layer: who may ask, what a request is called, and how it is counted.

It stands outside of litestar, so that it sees every scope, also those of plugins' routes and of
paths that do not exist. Its decisions never use a path prefix or a rebuilt URL: what is not
exactly a liveness path needs a key.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from typing import Any, cast
from urllib.parse import urlsplit

import msgspec
from litestar.types import Message, Receive, Scope, Send

from treadle_server.config import LOOPBACK
from treadle_server.context import ServerContext
from treadle_server.errors import APIError
from treadle_server.keys import Keys

__all__ = ("GatewayMiddleware",)

PUBLIC_PATHS = frozenset({"/health", "/ping", "/ready"})
"""Paths that need no key and are answered while the server drains."""
STOPPED = APIError(
    503, "the server was stopped before this request was complete", code="server_stopped"
)
REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")
Headers = dict[bytes, bytes]


class GatewayMiddleware:
    """An ASGI application around the one that ``context`` serves, which may change."""

    def __init__(self, context: ServerContext) -> None:
        config = context.config
        self._context = context
        # Who may administer may also do everything else.
        self._keys = Keys([*config.api_key, *config.admin_api_key] if config.api_key else ())
        self._hosts = LOOPBACK | {config.host.lower()} | {h.lower() for h in config.allowed_hosts}
        self._check_host = config.loopback and config.uds is None
        self._origins = frozenset(config.allowed_origins)
        self._root = config.root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        kind: str = scope["type"]
        headers: Headers = dict(reversed(cast("Any", scope)["headers"]))
        path = scope["path"]
        if self._root and (path == self._root or path.startswith(self._root + "/")):
            path = scope["path"] = path[len(self._root) :] or "/"
        label = headers.get(b"x-request-id", b"")
        if not REQUEST_ID.fullmatch(label):
            label = secrets.token_hex(16).encode()
        refusal = self._refusal(scope, headers, path)
        if kind == "websocket":
            if refusal is not None:
                await send({"type": "websocket.close", "code": 1008, "reason": str(refusal)[:120]})
                return
            await self._context.served(scope, receive, send)
            return
        await self._counted(scope, receive, send, label, refusal)

    async def _counted(
        self, scope: Scope, receive: Receive, send: Send, label: bytes, refusal: APIError | None
    ) -> None:
        metrics, began, status, ended = self._context.metrics, time.monotonic(), 0, False

        async def labelled(message: Message) -> None:
            nonlocal status, ended
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", label)]
            elif message["type"] == "http.response.body":
                ended |= not message.get("more_body", False)
            await send(message)

        async def _log_request() -> Any:
            nonlocal ended
            message = await receive()
            if message["type"] == "http.disconnect":
                ended = True  # nobody waits for the rest
            return message

        metrics.active += 1
        served = self._context.served
        try:
            if refusal is not None:
                await refuse(labelled, refusal)
            else:
                await served(scope, _log_request, labelled)
                if not ended:
                    raise RuntimeError("its answer has no end")
        except BaseException as error:  # what plugins have put around the handlers may raise it
            failure = STOPPED if is_cancelled() else served.owners.error_for_client(error, scope)
            if not status:
                await refuse(labelled, failure)
            # Half an answer is cut off: the server closes a connection whose answer has no end.
        finally:
            metrics.active -= 1
            route = cast("dict[str, Any]", scope).get("path_template") or "other"
            method = cast("Any", scope)["method"]
            metrics.answered(method, route, status, time.monotonic() - began)

    def _refusal(self, scope: Scope, headers: Headers, path: str) -> APIError | None:
        refusal = self._origin_error(headers)
        if refusal is not None or path in PUBLIC_PATHS:
            return refusal
        if not self._preflight(scope, headers) and not self._is_authorized(headers):
            return APIError(
                401,
                "no valid API key; send it as Authorization: Bearer KEY",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )
        if self._context.draining:
            return APIError(
                503,
                "the server is going to stop and takes no new requests",
                code="draining",
                headers={"retry-after": "5", "connection": "close"},
            )
        return None

    def _origin_error(self, headers: Headers) -> APIError | None:
        """Web pages must not reach a server of this machine by a name of theirs."""
        if not self._check_host:
            return None
        host = headers.get(b"host", b"").decode("latin-1").lower()
        if name_of(host) not in self._hosts:
            return APIError(
                403,
                f"the host name {host[:64]!r} is not one of this server; start it with --allowed-hosts",
                code="unknown_host",
            )
        origin = headers.get(b"origin", b"").decode("latin-1")
        if origin and not self._origins & {origin, "*"} and urlsplit(origin).netloc.lower() != host:
            return APIError(
                403,
                f"the web origin {origin[:64]!r} may not use this server; start it with --allowed-origins",
                code="unknown_origin",
            )
        return None

    def _preflight(self, scope: Scope, headers: Headers) -> bool:
        """A browser asks for permission without credentials; litestar answers from the options."""
        method = cast("dict[str, Any]", scope).get("method")
        asks = b"origin" in headers and b"access-control-request-method" in headers
        return bool(self._origins) and method == "OPTIONS" and asks

    def _is_authorized(self, headers: Headers) -> bool:
        """Whether one of the keys was sent. Takes equally long for every wrong one."""
        return not self._keys or self._keys.sent_in(headers)


def is_cancelled() -> bool:
    """Whether the server ends this request; a plugin that raises the same error means itself."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def name_of(host: str) -> str:
    """``localhost`` of ``localhost:8000``, ``::1`` of ``[::1]:8000``."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]


async def refuse(send: Send, error: APIError) -> None:
    body = msgspec.json.encode(error.body)
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        *((k.encode(), v.encode()) for k, v in error.headers.items()),
    ]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})
