"""The kind of plugins that the command line declares: subcommands."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from treadle.api.hookspecs import spec
from treadle.api.plugin_kind import PluginKind

if TYPE_CHECKING:
    import typer

__all__ = ("COMMANDS", "CommandHooks")


class CommandHooks:
    """Group ``treadle.commands``: the key is the name of the subcommand."""

    @spec(firstresult=True)
    def treadle_command(self, name: str, options: Mapping[str, Any]) -> typer.Typer | None:
        """Return the Typer application behind ``treadle NAME``.

        Called when the subcommand is run, not for ``treadle --help``; so the module of the entry
        point is where a command may import what it needs.
        """


COMMANDS: PluginKind[typer.Typer] = PluginKind(
    name="commands",
    key="subcommand",
    hook="treadle_command",
    builds=None,  # a class of typer, which not every command line needs
    specs=CommandHooks,
    suite="treadle_cli.testing.commands:CommandSuite",
    owner="treadle-cli",
)
