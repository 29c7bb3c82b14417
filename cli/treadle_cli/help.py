"""Help pages by section in plain text: names of flags are never cut, whatever the width."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperCommand

if TYPE_CHECKING:
    from treadle_cli.description import OptionRow

__all__ = ("PluginOptionsCommand", "SectionedCommand", "application", "single_command")

FIRST = "Options"
ENGINE_FLAG = "--max-num-seqs"


class SectionedCommand(TyperCommand):
    """A command whose options are listed under their ``rich_help_panel``.

    If it has the options of an engine, the names that other engines give them are accepted, too.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        from treadle_cli.rewrite import translate_flags

        own = {
            flag: not getattr(param, "is_flag", False)
            for param in self.get_params(ctx)
            for flag in (*param.opts, *param.secondary_opts)
            if flag.startswith("-")
        }
        return super().parse_args(ctx, translate_flags(args, own) if ENGINE_FLAG in own else args)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": [], FIRST: []}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None:
                fallback = FIRST if param.param_type_name == "option" else "Arguments"
                panel = getattr(param, "rich_help_panel", None) or fallback
                sections.setdefault(panel, []).append(record)
        for name, records in sections.items():
            if records:
                with formatter.section(name):
                    formatter.write_dl(records)


class PluginOptionsCommand(SectionedCommand):
    """A command whose help page ends with the options of the plugins that are installed."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        from treadle.plugins import PluginManager
        from treadle_cli.description import all_options

        super().format_options(ctx, formatter)
        records = [(_flag(row), _meaning(row)) for row in all_options(PluginManager())]
        if records:
            with formatter.section("Options of plugins"):
                formatter.write_dl(records)


def _flag(row: OptionRow) -> str:
    return f"{row.flag} <{row.type.replace(' | ', '|').replace(chr(34), '')}>"


def _meaning(row: OptionRow) -> str:
    if row.default in ("null", "[]", "{}", '""'):
        return row.description
    default = row.default if row.default == "(required)" else f"(default: {row.default})"
    return f"{row.description} {default}"


def application(text: str | None = None) -> typer.Typer:
    """A Typer application in the style of treadle: plain text, no flags for shell completion."""
    return typer.Typer(
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        no_args_is_help=text is not None,
        help=text,
    )


def single_command(
    name: str, function: Callable[..., None], cls: type[SectionedCommand] = SectionedCommand
) -> typer.Typer:
    """Return the application of a command without subcommands."""
    app = application()
    app.command(name, cls=cls)(function)
    return app
