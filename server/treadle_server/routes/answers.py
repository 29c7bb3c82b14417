"""The responses of handlers, with their headers, and error responses."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from litestar import Request, Response
from litestar.exceptions import (
    HTTPException,
    InternalServerException,
    ValidationException,
)

from treadle_server.errors import APIError
from treadle_server.sampling import constraint_of
from treadle_server.wire.common import SamplingFields

__all__ = (
    "answer",
    "handle_disconnect",
    "handle_error",
    "handle_http_error",
    "ignore_fields",
    "name_param",
)

T = TypeVar("T")
FIELD = re.compile(r"\w+")
UNPRINTABLE = re.compile(r"[^A-Za-z0-9_.\-]")
JSON = "application/json"
DISCONNECTED = "client disconnected prematurely"
"""What litestar says of a client that leaves before it has sent its whole body."""
OTHER_MODELS = {
    "/audio/speech": "a model that makes speech",
    "/audio": "a model that reads speech, such as Whisper",
    "/realtime": "a model that reads and makes speech",
    "/images": "a model that makes images",
    "/videos": "a model that makes videos",
    "/moderations": "a model that classifies texts",
    "/classify": "a model that classifies texts",
    "/embeddings": "a model that embeds texts",
    "/embed": "a model that embeds texts",
    "/pooling": "a model that embeds texts",
    "/rerank": "a model that ranks texts, such as a cross-encoder",
    "/reranking": "a model that ranks texts, such as a cross-encoder",
    "/score": "a model that ranks texts, such as a cross-encoder",
}
"""Routes of other servers, below ``/v1`` or not, and the models that would serve them."""
CONSTRAINTS = frozenset(
    {
        "structured_outputs",
        "structural_tag",
        "guided_json",
        "guided_regex",
        "guided_choice",
        "guided_grammar",
    }
)
"""The engine's names of what the output must match, which a client may have given otherwise."""


def answer(
    request: Request[Any, Any, Any], content: T, headers: Mapping[str, str] | None = None
) -> Response[T]:
    """Return an answer that names the fields of the request that were ignored."""
    response_headers = dict(headers or {})
    if ignored := request.state.get("ignored_fields"):
        response_headers["x-ignored-fields"] = ignored
    return Response(content, headers=response_headers)


def ignore_fields(request: Request[Any, Any, Any], names: Sequence[str]) -> None:
    """Add to the fields that the answer names as ignored."""
    known = request.state.get("ignored_fields")
    printable = [UNPRINTABLE.sub("?", name)[:64] for name in names[:32]]
    request.state.ignored_fields = ",".join(([known] if known else []) + printable)


def error_answer(error: APIError, request: Request[Any, Any, Any]) -> Response[bytes]:
    request.state.error = error
    body = request.app.state.error_forms.body(
        error, request.scope["path"], request.state.get("request_id") or ""
    )
    return Response(body, status_code=error.status, headers=error.headers, media_type=JSON)


def handle_error(request: Request[Any, Any, Any], error: Exception) -> Response[bytes]:
    """The exception handler of everything that is not litestar's own."""
    if isinstance(error, InternalServerException) and error.detail == DISCONNECTED:
        return handle_disconnect(request, error)
    owners = request.app.state.context.app_instance.faults
    api_error = owners.error_for_client(error, request.scope)
    name_param(api_error, request.state.get("body"))
    return error_answer(api_error, request)


def name_param(error: APIError, body: object) -> None:
    """Let an error name the parameter at fault as ``body``, the client's request, does."""
    detail = error.detail
    if detail.param in CONSTRAINTS and isinstance(body, SamplingFields):
        detail.param = constraint_of(body) or detail.param
    # A surface that is translated to a chat has other names for fields that the client left out.
    root = FIELD.match(detail.param or "")
    if root is not None and getattr(body, root[0], None) is None:
        detail.param = getattr(body, "CHAT_FIELDS", {}).get(root[0], detail.param)


def handle_disconnect(_: Request[Any, Any, Any], error: Exception) -> Response[bytes]:
    """Return a response that is only counted: the client has disconnected."""
    return Response(b"", status_code=499, media_type=JSON)


def no_route(path: str) -> str:
    """Return the message for a path that is not served, with the models that it would need."""
    name = path.removeprefix("/v1").removeprefix("/v2").removeprefix("/api")
    for beginning, models in OTHER_MODELS.items():
        if name == beginning or name.startswith(f"{beginning}/"):
            return (
                f"{path[:64]} needs {models}; models of treadle make text from text, and no installed "
                "plugin serves this route"
            )
    return "there is no such route; GET /v1/models and POST /v1/chat/completions are"


def handle_http_error(request: Request[Any, Any, Any], error: Exception) -> Response[bytes]:
    """Litestar's exceptions: routes, methods, sizes, and what plugins' handlers raise."""
    if not isinstance(error, HTTPException):
        return handle_error(request, error)
    status = error.status_code
    headers = {k.lower(): v for k, v in (error.headers or {}).items()}
    match status:
        case 404:
            api_error = APIError(404, no_route(request.scope["path"]))
        case 405:
            allowed = headers.get("allow", "")
            api_error = APIError(405, f"this method is not allowed here; allowed: {allowed}")
        case 400 if isinstance(error, ValidationException) and not request.state.get("body"):
            api_error = APIError(400, "the body is empty; send a JSON object")
        case 413:
            api_error = APIError(
                413, "the body is too large; see --max-body-bytes", code="body_too_large"
            )
        case _ if status >= 500:
            api_error = request.app.state.context.app_instance.faults.error_for_client(
                error, request.scope
            )
        case _:
            api_error = APIError(status, error.detail)
    api_error.headers = headers
    return error_answer(api_error, request)
