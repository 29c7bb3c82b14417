"""The errors of the Messages API, in the form of Anthropic."""

from __future__ import annotations

import msgspec

from treadle_server.errors import APIError

__all__ = ("PATH", "AnthropicErrorBody", "is_messages_path", "to_anthropic")

PATH = "/v1/messages"
TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}


class AnthropicError(msgspec.Struct, kw_only=True):
    """``type`` depends on the status alone; clients read it and the message."""

    type: str
    message: str


class AnthropicErrorBody(msgspec.Struct, kw_only=True):
    type: str = "error"
    error: AnthropicError
    request_id: str | None = None


def is_messages_path(path: str) -> bool:
    return path == PATH or path.startswith(PATH + "/")


def to_anthropic(error: APIError, request_id: str | None = None) -> AnthropicErrorBody:
    fallback = "invalid_request_error" if error.status < 500 else "api_error"
    detail = AnthropicError(type=TYPES.get(error.status, fallback), message=error.detail.message)
    return AnthropicErrorBody(error=detail, request_id=request_id or None)
