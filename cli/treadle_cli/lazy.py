"""The group of subcommands, resolved from entry points when one is run.

``treadle --help`` prints every name from metadata and imports no command.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperCommand, TyperGroup

from treadle.api.result_checks import unexpected
from treadle.errors import PluginConflictError, PluginNotFoundError
from treadle_cli.hookspecs import COMMANDS

if TYPE_CHECKING:
    from treadle.plugins import PluginManager

__all__ = ("HELP", "Commands")

KIND = "commands"
HELP = {
    "generate": "Complete a prompt, streaming to the terminal.",
    "run": "Complete a file of prompts.",
    "batch": "Answer a file of requests, in the batch format of the OpenAI API.",
    "run-batch": "The same as batch.",
    "chat": "Talk to a model in the terminal.",
    "serve": "Start the HTTP server.",
    "ps": "List the servers that run on this machine.",
    "pull": "Download a model.",
    "list": "List the models that were downloaded.",
    "rm": "Delete models that were downloaded.",
    "models": "List the models on this machine, and whether they can run.",
    "bench": "Measure throughput and latency.",
    "plugin": "List, make, test and lock plugins.",
    "doctor": "Check every plugin, the device and the versions.",
}


class Commands(TyperGroup):
    """Subcommands of ``treadle.commands``. One instance runs one command line."""

    @cached_property
    def plugins(self) -> PluginManager:
        from treadle.plugins import PluginManager

        return PluginManager()

    def list_commands(self, ctx: Any) -> list[str]:
        names = self.plugins.keys(KIND)
        return [*(n for n in HELP if n in names), *(n for n in names if n not in HELP)]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """A stub with the help line; the help page asks for every command."""
        if cmd_name not in self.plugins.keys(KIND):
            return None
        text = self._help(cmd_name)
        return TyperCommand(name=cmd_name, help=text, short_help=text, callback=lambda: None)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Import the command that is run."""
        if args and args[0] in self.plugins.keys(KIND):
            app = self.plugins.create(COMMANDS, args[0])
            try:
                if not isinstance(app, typer.Typer):
                    raise unexpected(app, "a Typer application")
                command = typer.main.get_command(app)
            except Exception as error:  # an application without commands is none
                self.plugins.guard(COMMANDS, args[0]).fail("treadle_command", error)
            return args[0], command, args[1:]
        return super().resolve_command(ctx, args)

    def _help(self, name: str) -> str:
        try:
            entry = self.plugins.choose(KIND, name)
        except (PluginConflictError, PluginNotFoundError) as error:
            return str(error)
        help_text = HELP.get(name, "")
        return (
            help_text
            if help_text and entry.dist == "treadle-cli"
            else f"{help_text} (from {entry.owner})".strip()
        )
