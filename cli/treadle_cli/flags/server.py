"""Flags of commands that talk to a server."""

from __future__ import annotations

from typing import Annotated

import typer

__all__ = ("ApiKey", "first_key")

ApiKey = Annotated[
    str | None,
    typer.Option(
        "--api-key",
        envvar=["TREADLE_API_KEY", "OPENAI_API_KEY"],
        help="Key of the server.",
        show_default=False,
    ),
]


def first_key(text: str | None) -> str | None:
    """Return the key to send: ``TREADLE_API_KEY`` may list several, as for ``treadle serve``."""
    return next((key.strip() for key in (text or "").split(",") if key.strip()), None)
