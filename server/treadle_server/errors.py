"""Errors as clients see them: one closed catalogue, in the shape of the OpenAI API.

No text of an unexpected exception ever reaches a client: only messages that treadle wrote do.
"""

from __future__ import annotations

import logging

import msgspec

from treadle.errors import (
    CheckpointError,
    ContextLengthError,
    EngineDeadError,
    EngineError,
    ModelNotFoundError,
    OutOfMemoryError,
    PluginError,
    QueueFullError,
    RequestError,
)

__all__ = ("APIError", "ErrorBody", "ErrorDetail", "error_of", "known_error", "plugin_failed")

log = logging.getLogger("treadle.server")


class ErrorDetail(msgspec.Struct, kw_only=True):
    """What went wrong. ``param`` is the request parameter at fault, if one is."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(msgspec.Struct):
    error: ErrorDetail


class APIError(Exception):
    """An answer that is an error: everything that the client is told about it."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str | None = None,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.headers = headers or {}
        self.detail = ErrorDetail(
            message=message,
            type=type or TYPES.get(status, fallback(status)),
            param=param,
            code=code,
        )

    @property
    def body(self) -> ErrorBody:
        return ErrorBody(self.detail)


TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}


def fallback(status: int) -> str:
    return "invalid_request_error" if status < 500 else "server_error"


def error_of(error: BaseException) -> APIError:
    """Return the answer for an exception. One that treadle did not raise is logged; its answer is a 500."""
    if (api_error := known_error(error)) is not None:
        return api_error
    log.error("a request failed unexpectedly", exc_info=error)
    return APIError(
        500, "the server failed on this request; its log has the details", code="internal_error"
    )


def plugin_failed(id: str) -> APIError:
    """Return the answer for a request on which a plugin's code failed."""
    return APIError(
        500, f"{id} failed on this request; the server's log has the details", code="plugin_failed"
    )


def known_error(error: BaseException) -> APIError | None:
    """Return the answer for an error that treadle raises on purpose, ``None`` for any other."""
    match error:
        case APIError():
            return error
        case ContextLengthError():
            return APIError(400, str(error), param=error.param, code="context_length_exceeded")
        case ModelNotFoundError():
            return APIError(404, str(error), param="model", code="model_not_found")
        case RequestError():
            return APIError(400, str(error), param=error.param)
        case CheckpointError():  # the model has no tokenizer, and the request needs one
            return APIError(400, str(error))
        case QueueFullError():
            return APIError(429, str(error), code="queue_full", headers={"retry-after": "1"})
        case EngineDeadError():
            return APIError(
                503, "the engine has stopped; the server must be restarted", code="engine_dead"
            )
        case OutOfMemoryError():
            return APIError(503, str(error), code="out_of_memory", headers={"retry-after": "5"})
        case EngineError():
            log.error("a request failed in the engine", exc_info=error)
            return APIError(500, str(error), code="request_failed")
        case PluginError(plugin=str(id)):
            log.error("a request failed in a plugin", exc_info=error)
            return plugin_failed(id)
        case _:
            return None
