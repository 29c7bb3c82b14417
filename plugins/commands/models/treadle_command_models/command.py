"""``treadle models``: a table, or JSON, of the models on this machine."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from treadle.plugins import PluginManager
from treadle_command_models.rows import Row, row
from treadle_command_models.sources import ModelCandidate, cached_models, demo_models, models_at

__all__ = ("application", "bytes_text", "print_table")

HEAD = (
    "MODEL",
    "ARCHITECTURE",
    "SIZE",
    "PARAMETERS",
    "DTYPE",
    "CONTEXT",
    "QUANTIZATION",
    "RUNS",
)


def models(
    places: Annotated[
        list[str] | None,
        typer.Argument(
            help="Folders of models, or scheme:path (default: the Hugging Face cache and demo:)."
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON array.")] = False,
    cache_dir: Annotated[
        Path | None,
        typer.Option("--cache-dir", help="Another Hugging Face cache.", show_default=False),
    ] = None,
) -> None:
    """List the models on this machine and whether the installed plugins can run them."""
    plugins = PluginManager()
    candidates: list[ModelCandidate] = []
    if not places or cache_dir is not None:
        candidates += cached_models(cache_dir)
    if not places:
        candidates += demo_models(plugins)
    for text in places or ():
        candidates += models_at(plugins, text)
    rows = [row(plugins, model) for model in candidates]
    if json:
        print(msgspec.json.format(msgspec.json.encode(rows)).decode())
    elif rows:
        print_table([HEAD, *(_cells(row) for row in rows)])
    else:
        print("no models found")


def print_table(lines: Sequence[Sequence[str]]) -> None:
    """Print lines, the first of which is the heading, with columns of equal width."""
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    for line in lines:
        cells = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        sys.stdout.write("  ".join(cells).rstrip() + "\n")


def _cells(row: Row) -> tuple[str, ...]:
    return (
        row.model,
        row.architecture or "-",
        bytes_text(row.bytes),
        "-" if row.parameters is None else _count(row.parameters),
        row.dtype or "-",
        str(row.context or "-"),
        row.quantization or "-",
        row.plugin or "yes" if row.problem is None else f"no: {row.problem}",
    )


def bytes_text(size: int) -> str:
    """``1.4 GiB``."""
    value = float(size)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit in ("B", "KiB") else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def _count(number: int) -> str:
    for limit, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= limit:
            value = number / limit
            return f"{value:.1f} {unit}" if value < 100 else f"{value:.0f} {unit}"
    return str(number)


def application() -> typer.Typer:
    """The application of this one command, in plain text like the others of ``treadle``."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.command("models")(models)
    return app
