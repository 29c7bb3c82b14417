"""The hook that this distribution adds to the plugin host."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from treadle.api.hookspecs import spec

if TYPE_CHECKING:
    import typer

__all__ = ("CommandHooks",)


class CommandHooks:
    """Group ``treadle.commands``: the key is the name of the subcommand."""

    @spec(firstresult=True)
    def treadle_command(self, name: str, options: Mapping[str, Any]) -> typer.Typer | None:
        """Return the Typer application behind ``treadle NAME``.

        Called when the subcommand is run, not for ``treadle --help``; so the module of the entry
        point is where a command may import what it needs.
        """
