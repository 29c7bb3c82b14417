"""The lines of the log about one request: that it came, that it ended, that it was refused.

What a client wrote, prompts above all, is in them only if the operator asks for it.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, cast

from litestar.types import Scope

if TYPE_CHECKING:
    from treadle_server.config import ServerConfig
    from treadle_server.errors import APIError
    from treadle_server.generation import Generation

__all__ = ("RequestLog",)

log = logging.getLogger("treadle.server")
access = logging.getLogger("treadle.access")

QUOTING = frozenset({400, 404, 409, 422})
"""Statuses of errors whose message may quote the body of the request."""
DISCONNECTED = 499


class RequestLog:
    """Writes the lines of one server. Storms of refusals and disconnects are one line with a count."""

    def __init__(self, config: ServerConfig) -> None:
        self._config = config

    def begin(self, generation: Generation) -> None:
        """Log a request that goes to the engine, if it was asked for."""
        if not self._config.enable_log_requests:
            return
        limit = self._config.max_log_len
        for index, prompt in enumerate(generation.prompts):
            log.info(
                "%s: prompt %r, ids %s, %r",
                generation.label(index),
                prompt.text and prompt.text[:limit],
                prompt.ids and prompt.ids[:limit],
                generation.params,
            )

    def end(
        self, scope: Scope, status: int, seconds: float, error: APIError | None, *, is_left: bool
    ) -> None:
        """Log what became of an HTTP request. ``is_left`` is set if its client did not wait."""
        fields = cast("dict[str, Any]", scope)
        client = fields.get("client") or ("-",)
        line = f"{fields['method']} {fields['path'][:200]}"
        if self._config.access_log:
            access.info('%s "%s" %d in %.3f s', client[0], line, status, seconds)
        if is_left or status == DISCONNECTED:
            log.info(
                "the client of %s left after %.3f s",
                line,
                seconds,
                extra={"incident": "disconnect", "burst": 1},
            )
        elif status >= 400 or error is not None:
            self._refused(line, client[0], status, error)

    def _refused(self, line: str, client: str, status: int, error: APIError | None) -> None:
        code, message = "", ""
        if error is not None:
            code = error.detail.code or error.detail.type
            if error.status not in QUOTING or self._config.enable_log_requests:
                message = f": {error}"
        what, number = "refused", status
        if status < 400 and error is not None:
            what, number = "broke off", error.status
        log.log(
            logging.WARNING if number >= 500 else logging.INFO,
            "%s %s of %s: %d %s%s",
            what,
            line,
            client,
            number,
            code,
            message,
            extra={"incident": (number, code)},
        )
