"""The command ``weft models``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.api import impl

if TYPE_CHECKING:
    import typer

__all__ = ("weft_command",)


@impl
def weft_command(name: str) -> typer.Typer | None:
    if name != "models":
        return None
    from weft_command_models.command import application

    return application()
