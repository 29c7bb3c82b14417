"""Answers as bytes: encoded here once, so that litestar only passes them on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec
from litestar import Request, Response
from litestar.exceptions import HTTPException, InternalServerException

from treadle_server.decode import Reader
from treadle_server.errors import APIError
from treadle_server.flights import ClientGone
from treadle_server.sampling import constraint_of
from treadle_server.wire.common import SamplingFields

__all__ = ("handle_error", "handle_gone", "handle_http_error", "json_answer", "read")

T = TypeVar("T", bound=msgspec.Struct)
ENCODER = msgspec.json.Encoder()
JSON = "application/json"
CONSTRAINTS = frozenset(
    {"guided", "guided_json", "guided_regex", "guided_choice", "guided_grammar"}
)
"""The engine's names of what the output must match, which a client may have given otherwise."""


def json_answer(
    content: Any, *, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response[bytes]:
    return Response(
        ENCODER.encode(content), status_code=status, headers=dict(headers or {}), media_type=JSON
    )


def error_answer(error: APIError) -> Response[bytes]:
    return json_answer(error.body, status=error.status, headers=error.headers)


async def read(request: Request[Any, Any, Any], reader: Reader[T]) -> tuple[T, dict[str, str]]:
    """The typed body, and the headers that the answer owes to it.

    Raises ``APIError``, and ``ClientGone`` if the body does not end.
    """
    encoding = request.headers.get("content-encoding", "identity")
    if encoding != "identity":
        raise APIError(415, "compressed bodies are not accepted; send the JSON as it is")
    try:
        body = await request.body()
    except InternalServerException:  # litestar's word for a client that left inside of its body
        raise ClientGone from None
    found, ignored = reader.read(body)
    request.state.asked = found
    return found, {"x-ignored-fields": ignored} if ignored else {}


def handle_error(request: Request[Any, Any, Any], error: Exception) -> Response[bytes]:
    """The exception handler of everything that is not litestar's own."""
    owners = request.app.state.context.served.owners
    shown, asked = owners.answer(error, request.scope), request.state.get("asked")
    if shown.detail.param in CONSTRAINTS and isinstance(asked, SamplingFields):
        shown.detail.param = constraint_of(asked) or shown.detail.param
    return error_answer(shown)


def handle_gone(_: Request[Any, Any, Any], error: Exception) -> Response[bytes]:
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
        case 413:
            found = APIError(
                413, "the body is too large; see --max-body-bytes", code="body_too_large"
            )
        case _ if status >= 500:
            found = request.app.state.context.served.owners.answer(error, request.scope)
        case _:
            found = APIError(status, error.detail)
    found.headers = headers
    return error_answer(found)
