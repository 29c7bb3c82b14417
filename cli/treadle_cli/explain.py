"""``--explain``: what a start would choose, as lines of a terminal."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from treadle.config import EngineConfig
    from treadle_cli.choices import ConfigChoice

__all__ = ("Flag", "print_choices", "print_engine")

Flag = Annotated[
    bool, typer.Option("--explain", help="Print what would be chosen, and why, and exit.")
]

INDENT = 30


def print_engine(config: EngineConfig) -> None:
    """Print the choices of an engine. Starts nothing; raises what a start would raise."""
    from treadle.text.assets import open_checkpoint, open_plugins
    from treadle_cli.choices import explain

    plugins = open_plugins(config)
    print_choices(explain(config, plugins, open_checkpoint(config, plugins)))


def print_choices(rows: Iterable[ConfigChoice]) -> None:
    """Print choices, wrapped to the width of the terminal."""
    for line in choice_lines(rows, shutil.get_terminal_size().columns):
        sys.stdout.write(f"{line}\n")


def choice_lines(rows: Iterable[ConfigChoice], width: int) -> Iterator[str]:
    """Yield the lines of each choice: its reason, then its alternatives, grouped by reason."""
    for row in rows:
        yield from _wrapped(row.name, f"{row.choice}: {row.reason}", width)
        reasons: dict[str, list[str]] = {}
        for name, reason in row.alternatives:
            reasons.setdefault(reason, []).append(name)
        for reason, names in reasons.items():
            yield from _wrapped("", f"not {', '.join(names)}: {reason}", width)


def _wrapped(title: str, text: str, width: int) -> list[str]:
    """Wrap text without breaking the names of flags and plugins."""
    return textwrap.wrap(
        text,
        max(width, 2 * INDENT),
        initial_indent=f"{title:<{INDENT}}",
        subsequent_indent=" " * (INDENT + 2),
        break_long_words=False,
        break_on_hyphens=False,
    )
