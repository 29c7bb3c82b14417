"""The outermost ASGI middleware: API keys, host names, origins, request ids and counting.

It wraps litestar, so it sees every scope, including those of plugins' routes and of paths that do
not exist. Its decisions never use a path prefix or a rebuilt URL: every path needs a key, other than
exactly those of handlers that say ``opt={"public": True}``.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from typing import Any, cast
from urllib.parse import urlsplit

from litestar.types import Message, Receive, Scope, Send

from treadle_server.config import LOOPBACK
from treadle_server.context import ServerContext
from treadle_server.error_forms import ErrorForms
from treadle_server.errors import APIError
from treadle_server.keys import Keys
from treadle_server.logs import request_id, unenforced
from treadle_server.messages.errors import is_messages_path

__all__ = ("GatewayMiddleware",)

STOPPED = APIError(
    503, "the server was stopped before this request was complete", code="server_stopped"
)
REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")
UNPRINTABLE = re.compile(r"[^\x20-\x7e]")
MAX_NOTES = 2048
HOST = re.compile(r"(?:\[([0-9a-f:.]+)\]|([^\[\]:@/?#\\\s]*))(?::[0-9]{1,5})?")
"""A host header in lower case; a group is the name or the address."""
SINGLE_HEADERS = (b"host", b"origin", b"authorization", b"x-api-key")
"""Headers that decide who may ask. If one were sent twice, a proxy and this server might read
different ones."""
ALLOW_ORIGIN = b"access-control-allow-origin"
Headers = dict[bytes, bytes]
HeaderList = list[tuple[bytes, bytes]]


class GatewayMiddleware:
    """An ASGI middleware around the application of ``context``, which a reload may replace."""

    def __init__(self, context: ServerContext) -> None:
        config = context.config
        self._context = context
        # An administrator's key also opens all other routes.
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
            await self._context.app_instance(scope, receive, send)
            return
        await self._counted(scope, receive, send, headers, label, refusal)

    async def _counted(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        headers: Headers,
        label: bytes,
        refusal: APIError | None,
    ) -> None:
        metrics, start_time, status, is_finished = self._context.metrics, time.monotonic(), 0, False
        is_left, failure = False, refusal
        request_id.set(label.decode())
        notes: dict[str, None] = {}
        unenforced.set(notes)

        async def labelled(message: Message) -> None:
            nonlocal status, is_finished
            if message["type"] == "http.response.start":
                status = message["status"]
                added = [(b"x-request-id", label)]
                if notes:
                    text = "; ".join(notes)[:MAX_NOTES]
                    added.append((b"x-unenforced", UNPRINTABLE.sub("?", text).encode()))
                if is_messages_path(scope["path"]):
                    added.append((b"request-id", label))
                sent = [*message.get("headers", ()), *added]
                message["headers"] = sent + self._origin_headers(headers, sent)
            elif message["type"] == "http.response.body":
                is_finished |= not message.get("more_body", False)
            await send(message)

        async def watched() -> Any:
            nonlocal is_finished, is_left
            message = await receive()
            if message["type"] == "http.disconnect" and not is_finished:
                is_finished = is_left = True  # nobody waits for the rest
            return message

        metrics.active += 1
        state = cast("dict[str, Any]", scope).setdefault("state", {})
        state["request_id"] = label.decode()
        app = self._context.app_instance
        try:
            if refusal is not None:
                await refuse(labelled, refusal, scope, label, app.error_forms)
            else:
                await app(scope, watched, labelled)
                if not is_finished:
                    raise RuntimeError("its answer has no end")
                app.faults.record_answer(scope, status)
        except BaseException as error:  # what plugins have put around the handlers may raise it
            failure = STOPPED if is_cancelled() else app.faults.error_for_client(error, scope)
            if not status:
                await refuse(labelled, failure, scope, label, app.error_forms)
            # Half an answer is cut off: the server closes a connection whose answer has no end.
        finally:
            metrics.active -= 1
            route = cast("dict[str, Any]", scope).get("path_template") or "other"
            method = cast("Any", scope)["method"]
            seconds = time.monotonic() - start_time
            metrics.count_request(method, route, status, seconds)
            failure = failure or state.get("error")
            self._context.request_log.end(scope, status, seconds, failure, is_left=is_left)

    def _refusal(self, scope: Scope, headers: Headers, path: str) -> APIError | None:
        refusal = _header_error(scope, headers) or self._origin_error(headers)
        method = cast("Any", scope).get("method")
        if refusal is not None or (method, path) in self._context.app_instance.public_routes:
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
        """Return an error if a web page calls a loopback server under another host name."""
        if not self._check_host:
            return None
        host = host_of(headers)
        if name_of(host) not in self._hosts:
            return APIError(
                403,
                f"the host name {host[:64]!r} is not one of this server; start it with --allowed-hosts",
                code="unknown_host",
            )
        origin = headers.get(b"origin", b"").decode("latin-1")
        if origin and not self._origins & {origin, "*"} and _netloc(origin) != host:
            return APIError(
                403,
                f"the web origin {origin[:64]!r} may not use this server; start it with --allowed-origins",
                code="unknown_origin",
            )
        return None

    def _preflight(self, scope: Scope, headers: Headers) -> bool:
        """A browser asks for permission without credentials; litestar answers from the options."""
        method = cast("dict[str, Any]", scope).get("method")
        is_preflight = b"origin" in headers and b"access-control-request-method" in headers
        return bool(self._origins) and method == "OPTIONS" and is_preflight

    def _origin_headers(self, headers: Headers, sent: HeaderList) -> HeaderList:
        """Return what lets a page of an allowed origin read an answer that no route has made."""
        origin = headers.get(b"origin", b"")
        is_allowed = "*" in self._origins or origin.decode("latin-1") in self._origins
        if not origin or not is_allowed or any(name == ALLOW_ORIGIN for name, _ in sent):
            return []
        return [
            (ALLOW_ORIGIN, b"*" if "*" in self._origins else origin),
            (b"access-control-expose-headers", b"x-request-id, request-id, retry-after"),
            (b"vary", b"Origin"),
        ]

    def _is_authorized(self, headers: Headers) -> bool:
        """Whether one of the keys was sent. Compares in constant time."""
        return not self._keys or self._keys.sent_in(headers)


def is_cancelled() -> bool:
    """Whether the server ends this request; a plugin that raises the same error means itself."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _header_error(scope: Scope, headers: Headers) -> APIError | None:
    """Return an error for a header that is repeated, or a host that cannot be read."""
    names = [name for name, _ in cast("Any", scope)["headers"]]
    for name in SINGLE_HEADERS:
        if (count := names.count(name)) > 1:
            return APIError(
                400,
                f"the header {name.decode()} was sent {count} times; send it once",
                code="repeated_header",
            )
    if name_of(host := host_of(headers)) is None:
        return APIError(
            400, f"the header host is {host[:64]!r}; it must be NAME or NAME:PORT", code="bad_host"
        )
    return None


def host_of(headers: Headers) -> str:
    return headers.get(b"host", b"").decode("latin-1").lower()


def name_of(host: str) -> str | None:
    """Return ``localhost`` of ``localhost:8000``, ``::1`` of ``[::1]:8000``; ``None`` if malformed."""
    match = HOST.fullmatch(host)
    return None if match is None else match[1] or match[2] or ""


def _netloc(origin: str) -> str | None:
    """Return the host and port of an origin; ``None`` if it is not a URL."""
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return None


async def refuse(
    send: Send, error: APIError, scope: Scope, label: bytes, error_forms: ErrorForms
) -> None:
    body = error_forms.body(error, scope["path"], label.decode())
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        *((k.encode(), v.encode()) for k, v in error.headers.items()),
    ]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})
