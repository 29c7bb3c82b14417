"""The conformance suite of commands: run as ``treadle`` runs them, in a separate process.

::

    class TestMine(PluginSuite, CommandSuite):
        plugin = "commands:mine"
        accepted = [["--json"]]             # arguments that it takes, and must end well with
        refused = [["/no/such/folder"]]     # and some that it must refuse
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import pytest
import typer

from treadle.testing.examination.child_process import ask
from treadle.testing.plugin import FOREIGN, PluginTest
from treadle_cli.testing.child import CommandResult, Request

__all__ = ("CommandSuite",)

CHILD = "treadle_cli.testing.child"


class CommandSuite(PluginTest):
    """Checks that help needs no heavy import and that a mistake is reported without a traceback."""

    accepted: ClassVar[Sequence[Sequence[str]]] = ()
    refused: ClassVar[Sequence[Sequence[str]]] = ()
    seconds: ClassVar[float] = 60.0
    """Time limit of all command lines of a check."""

    def run(self, lines: Sequence[Sequence[str]]) -> list[CommandResult]:
        """Run ``treadle KEY …`` for each line, one after another in a new process."""
        plugins = self.plugin_manager()
        command_lines = [[self.key, *line] for line in lines]
        return ask(
            CHILD,
            Request(command_lines, plugins.selection(), plugins.config),
            list[CommandResult],
            self.seconds,
        )

    def application(self, name: str) -> Any:
        """Return the hook's result for ``name``."""
        plugins = self.plugin_manager()
        relay: Any = plugins.hooks_for(self.kind, self.key)
        return relay.treadle_command(name=name, options=plugins.options(self.kind, self.key))

    def paths(self) -> list[list[str]]:
        """The arguments that lead to each subcommand, the command itself first."""
        return list(_paths(typer.main.get_command(self.application(self.key))))

    def test_it_leaves_names_of_others_alone(self) -> None:
        assert self.application(FOREIGN) is None

    def test_help_is_all_that_a_help_page_prints(self) -> None:
        paths = self.paths()
        for path, result in zip(paths, self.run([[*p, "--help"] for p in paths]), strict=True):
            assert (result.traceback, result.err, result.code) == ("", "", 0)
            name = " ".join(["treadle", self.key, *path])
            assert result.out.lstrip().startswith(f"Usage: {name} "), result.out

    def test_help_needs_nothing_heavy(self) -> None:
        """Heavy imports would delay the help page."""
        (result,) = self.run([["--help"]])
        assert result.heavy == [], "import what is heavy where it is used"

    def test_an_unknown_option_is_refused(self) -> None:
        """A misspelt option must not be ignored silently."""
        paths, option = self.paths(), f"--{FOREIGN}"
        for result in self.run([[*path, option] for path in paths]):
            assert (result.traceback, result.code) == ("", 2)
            assert option in result.err

    def test_what_it_takes_ends_well(self) -> None:
        if not self.accepted:
            pytest.skip("set accepted to arguments to run with")
        for result in self.run(self.accepted):
            assert (result.traceback, result.code) == ("", 0), result.err

    def test_what_it_refuses_is_said_in_words(self) -> None:
        """The exit code is 2 for a wrong option or value, 1 for other errors; never a traceback."""
        if not self.refused:
            pytest.skip("set refused to arguments that it refuses")
        for result in self.run(self.refused):
            assert result.traceback == "" and "Traceback" not in result.err, (
                "raise an error of treadle"
            )
            assert result.code in (1, 2) and result.err.strip()


def _paths(command: Any, prefix: tuple[str, ...] = ()) -> Iterator[list[str]]:
    yield list(prefix)
    for name, inner in sorted(getattr(command, "commands", {}).items()):
        yield from _paths(inner, (*prefix, name))
