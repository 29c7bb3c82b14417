"""Help pages by section in plain text: names of flags are never cut, whatever the width."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import typer
from typer.core import TyperCommand

__all__ = ("SectionedCommand", "application", "single")

FIRST = "Options"


class SectionedCommand(TyperCommand):
    """A command whose options are listed under their ``rich_help_panel``."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": [], FIRST: []}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None:
                place = FIRST if param.param_type_name == "option" else "Arguments"
                panel = getattr(param, "rich_help_panel", None) or place
                sections.setdefault(panel, []).append(record)
        for name, records in sections.items():
            if records:
                with formatter.section(name):
                    formatter.write_dl(records)


def application(text: str | None = None) -> typer.Typer:
    """A Typer application in the style of weft: plain text, no shell completion of its own."""
    return typer.Typer(
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        no_args_is_help=text is not None,
        help=text,
    )


def single(name: str, function: Callable[..., None]) -> typer.Typer:
    """The application of a subcommand without subcommands."""
    app = application()
    app.command(name, cls=SectionedCommand)(function)
    return app
