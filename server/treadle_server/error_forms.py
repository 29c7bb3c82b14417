"""The bodies of error answers: in the form of the OpenAI API, unless a path has a form of its own.

Errors are made in many places: by handlers, by the router, by the gateway before any route is
reached. All of them ask here, so that the clients of a surface see one form.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from treadle_server.errors import APIError

if TYPE_CHECKING:
    from litestar.config.app import AppConfig

__all__ = ("ErrorForm", "ErrorForms", "set_error_form")

log = logging.getLogger("treadle.server")

ErrorForm = Callable[[APIError, str], object]
"""Returns what JSON is made of, for an error and the id of the request."""


class ErrorForms:
    """The forms of one application, by path."""

    def __init__(self) -> None:
        self._forms: dict[str, ErrorForm] = {}

    def set(self, path: str, form: ErrorForm) -> None:
        self._forms[path.rstrip("/")] = form

    def of(self, path: str) -> ErrorForm | None:
        """Return the form of the longest known beginning of ``path``; ``None`` is OpenAI's."""
        known = [p for p in self._forms if path == p or path.startswith(f"{p}/")]
        return self._forms[max(known, key=len)] if known else None

    def body(self, error: APIError, path: str, request_id: str) -> bytes:
        """Return the body of an error answer to ``path``."""
        if (form := self.of(path)) is not None:
            try:
                return msgspec.json.encode(form(error, request_id))
            except Exception:  # the code of a plugin, in the one place where nothing may fail
                log.exception("the error form of %s failed; its clients get that of OpenAI", path)
        return msgspec.json.encode(error.body)


def set_error_form(app: AppConfig, path: str, form: ErrorForm) -> None:
    """Write the errors of ``path``, and of all paths below it, in another form.

    That includes what the server refuses before a route is reached, such as a wrong key.
    """
    app.state.error_forms.set(path, form)
