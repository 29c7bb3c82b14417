"""A command with a subcommand, and what may be wrong with one."""

from __future__ import annotations

from mutants.specimen import Mutant, Specimen
from treadle_cli.testing.commands import CommandSuite

SOURCE = """
import typer

from treadle.api import impl
from treadle.errors import ConfigError

TREADLE = {"commands": ["mine"]}


def build():
    app = typer.Typer(add_completion=False, no_args_is_help=True, help="Counts.")

    @app.command("up")
    def up(to: int):
        if to < 0:
            raise ConfigError(f"TO is {to}; it must be at least 0")
        for number in range(to):
            typer.echo(str(number))

    @app.command("down")
    def down(begin: int = 3):
        raise typer.Exit(0)

    return app


@impl
def treadle_command(name):
    return build() if name == "mine" else None
"""


class Command(CommandSuite):
    accepted = (["up", "2"], ["down"])
    refused = (["up"], ["up", "--", "-3"], ["up", "x"])


SPECIMENS = (
    Specimen(
        suite=Command,
        plugin="commands:mine",
        source=SOURCE,
        mutants=(
            Mutant("test_it_leaves_names_of_others_alone", {' if name == "mine" else None': ""}),
            Mutant(
                "test_help_is_all_that_a_help_page_prints",
                {"def build():": 'def build():\n    print("counting")'},
            ),
            Mutant(
                "test_help_needs_nothing_heavy",
                {"import typer\n\n": "import numpy\nimport typer\n\n"},
            ),
            Mutant(
                "test_an_unknown_option_is_refused",
                {
                    'app.command("down")': 'app.command("down", context_settings={"ignore_unknown_options": True, "allow_extra_args": True})'
                },
            ),
            Mutant("test_what_it_takes_ends_well", {"typer.Exit(0)": "typer.Exit(1)"}),
            Mutant(
                "test_what_it_refuses_is_said_in_words", {"raise ConfigError": "raise ValueError"}
            ),
            Mutant("test_what_it_refuses_is_said_in_words", {"raise ConfigError": "return print"}),
        ),
    ),
)
