"""What handlers return: answers with the headers that they owe, and errors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec
from litestar import Request, Response
from litestar.exceptions import (
    HTTPException,
    InternalServerException,
    ValidationException,
)

from treadle_server.errors import APIError
from treadle_server.sampling import constraint_of
from treadle_server.wire.common import SamplingFields

__all__ = ("answer", "handle_disconnect", "handle_error", "handle_http_error")

T = TypeVar("T")
JSON = "application/json"
DISCONNECTED = "client disconnected prematurely"
"""What litestar says of a client that leaves before it has sent its whole body."""
CONSTRAINTS = frozenset(
    {"structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar"}
)
"""The engine's names of what the output must match, which a client may have given otherwise."""


def answer(
    request: Request[Any, Any, Any], content: T, headers: Mapping[str, str] | None = None
) -> Response[T]:
    """Return an answer that names the fields of the request that were ignored."""
    found = dict(headers or {})
    if ignored := request.state.get("ignored_fields"):
        found["x-ignored-fields"] = ignored
    return Response(content, headers=found)


def error_answer(error: APIError) -> Response[bytes]:
    body = msgspec.json.encode(error.body)
    return Response(body, status_code=error.status, headers=error.headers, media_type=JSON)


def handle_error(request: Request[Any, Any, Any], error: Exception) -> Response[bytes]:
    """The exception handler of everything that is not litestar's own."""
    if isinstance(error, InternalServerException) and error.detail == DISCONNECTED:
        return handle_disconnect(request, error)
    owners = request.app.state.context.served.owners
    shown, body = owners.error_for_client(error, request.scope), request.state.get("body")
    if shown.detail.param in CONSTRAINTS and isinstance(body, SamplingFields):
        shown.detail.param = constraint_of(body) or shown.detail.param
    return error_answer(shown)


def handle_disconnect(_: Request[Any, Any, Any], error: Exception) -> Response[bytes]:
    """Nobody is there to read an answer; the status is for the counters."""
    return Response(b"", status_code=499, media_type=JSON)


def handle_http_error(request: Request[Any, Any, Any], error: Exception) -> Response[bytes]:
    """Litestar's exceptions: routes, methods, sizes, and what plugins' handlers raise."""
    if not isinstance(error, HTTPException):
        return handle_error(request, error)
    status = error.status_code
    headers = {k.lower(): v for k, v in (error.headers or {}).items()}
    match status:
        case 404:
            found = APIError(
                404, "there is no such route; GET /v1/models and POST /v1/chat/completions are"
            )
        case 405:
            allowed = headers.get("allow", "")
            found = APIError(405, f"this method is not allowed here; allowed: {allowed}")
        case 400 if isinstance(error, ValidationException) and not request.state.get("body"):
            found = APIError(400, "the body is empty; send a JSON object")
        case 413:
            found = APIError(
                413, "the body is too large; see --max-body-bytes", code="body_too_large"
            )
        case _ if status >= 500:
            found = request.app.state.context.served.owners.error_for_client(error, request.scope)
        case _:
            found = APIError(status, error.detail)
    found.headers = headers
    return error_answer(found)
