"""The conformance suite of commands: run as ``treadle`` runs them, in a process of their own.

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
from treadle_cli.testing.child import Ended, Request

__all__ = ("CommandSuite",)

CHILD = "treadle_cli.testing.child"


class CommandSuite(PluginTest):
    """Help that comes at once, and answers to mistakes that are no traceback."""

    accepted: ClassVar[Sequence[Sequence[str]]] = ()
    refused: ClassVar[Sequence[Sequence[str]]] = ()
    seconds: ClassVar[float] = 60.0
    """How long all lines of a check may take."""

    def run(self, lines: Sequence[Sequence[str]]) -> list[Ended]:
        """Run ``treadle KEY …`` for each line, one after another in a new process."""
        plugins = self.host()
        asked = [[self.key, *line] for line in lines]
        return ask(
            CHILD, Request(asked, plugins.selection(), plugins.config), list[Ended], self.seconds
        )

    def application(self, name: str) -> Any:
        """What the hook answers to ``name``."""
        plugins = self.host()
        relay: Any = plugins.hooks_for(self.kind, self.key)
        return relay.treadle_command(name=name, options=plugins.options(self.kind, self.key))

    def paths(self) -> list[list[str]]:
        """The arguments that lead to each subcommand, the command itself first."""
        return list(_paths(typer.main.get_command(self.application(self.key))))

    def test_it_leaves_names_of_others_alone(self) -> None:
        assert self.application(FOREIGN) is None

    def test_help_is_all_that_a_help_page_prints(self) -> None:
        paths = self.paths()
        for path, ended in zip(paths, self.run([[*p, "--help"] for p in paths]), strict=True):
            assert (ended.traceback, ended.err, ended.code) == ("", "", 0)
            name = " ".join(["treadle", self.key, *path])
            assert ended.out.lstrip().startswith(f"Usage: {name} "), ended.out

    def test_help_needs_nothing_heavy(self) -> None:
        """Who asks for help waits for it."""
        (ended,) = self.run([["--help"]])
        assert ended.heavy == [], "import what is heavy where it is used"

    def test_an_unknown_option_is_refused(self) -> None:
        """Else a misspelt one does nothing, and nobody hears of it."""
        paths, option = self.paths(), f"--{FOREIGN}"
        for ended in self.run([[*path, option] for path in paths]):
            assert (ended.traceback, ended.code) == ("", 2)
            assert option in ended.err

    def test_what_it_takes_ends_well(self) -> None:
        if not self.accepted:
            pytest.skip("it was given no arguments to run with")
        for ended in self.run(self.accepted):
            assert (ended.traceback, ended.code) == ("", 0), ended.err

    def test_what_it_refuses_is_said_in_words(self) -> None:
        """2 for wrong options and values, 1 for all else that cannot be; never a traceback."""
        if not self.refused:
            pytest.skip("it was given no arguments that it refuses")
        for ended in self.run(self.refused):
            assert ended.traceback == "" and "Traceback" not in ended.err, (
                "raise an error of treadle"
            )
            assert ended.code in (1, 2) and ended.err.strip()


def _paths(command: Any, before: tuple[str, ...] = ()) -> Iterator[list[str]]:
    yield list(before)
    for name, inner in sorted(getattr(command, "commands", {}).items()):
        yield from _paths(inner, (*before, name))
