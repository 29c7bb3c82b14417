"""The commands ``treadle models``, ``list``, ``pull`` and ``rm``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from treadle.api import impl

if TYPE_CHECKING:
    import typer

__all__ = ("treadle_command",)


@impl
def treadle_command(name: str) -> typer.Typer | None:
    if name == "models":
        from treadle_command_models.command import application

        return application()
    if name in ("list", "pull", "rm"):
        from treadle_command_models.cache import application_of

        return application_of(name)
    return None
