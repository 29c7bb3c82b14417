"""The command ``treadle quantize``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from treadle.api import impl

if TYPE_CHECKING:
    import typer

__all__ = ("treadle_command",)


@impl
def treadle_command(name: str) -> typer.Typer | None:
    if name != "quantize":
        return None
    from treadle_command_quantize.command import application

    return application()
