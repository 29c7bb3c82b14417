"""``treadle plugin``: list, show, document, create, test, index and lock plugins, and find the one that fails."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from treadle.api import impl
from treadle.errors import ConfigError
from treadle.plugins import PluginManager, installed_kinds
from treadle.plugins.entries import normal, scan
from treadle_cli.flags import PLUGINS, Options, with_flags
from treadle_cli.help import SectionedCommand, application
from treadle_cli.option_examples import toml_example

if TYPE_CHECKING:
    from treadle.testing.examination.listing import Row
    from treadle_cli.description import Description

__all__ = ("treadle_command",)


@with_flags(PLUGINS)
def list_plugins(
    *,
    kind: Annotated[str | None, typer.Argument(help="Only this kind.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON array.")] = False,
    options: Options,
) -> None:
    """List every plugin with its state. Imports none of them."""
    from treadle.testing.examination.listing import rows

    row_list = list(rows(PluginManager(options.struct(PLUGINS)), kind))
    if json:
        print(msgspec.json.format(msgspec.json.encode(row_list)).decode())
        return
    table = [
        (row.kind, row.key, f"{row.distribution} {row.version}", row.state, row.note)
        for row in row_list
    ]
    print_table(("KIND", "KEY", "DISTRIBUTION", "STATE", "NOTE"), table)


@with_flags(PLUGINS)
def show(
    *,
    id: Annotated[str, typer.Argument(metavar="ID", help="kind:key, or a distribution.")],
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object or array.")] = False,
    options: Options,
) -> None:
    """Import one plugin and show its hooks and options; of a distribution, list its keys."""
    from treadle_cli.description import describe

    plugins = PluginManager(options.struct(PLUGINS))
    if ":" not in id:
        _show_distribution(plugins, id, json)
        return
    kind, _, key = id.partition(":")
    description = describe(plugins, kind, key)
    print(msgspec.json.encode(description).decode()) if json else _print_description(description)


def new(
    kind: Annotated[
        str, typer.Argument(metavar="KIND", help=f"One of: {', '.join(installed_kinds())}.")
    ],
    name: Annotated[str, typer.Argument(metavar="NAME", help="The key that it will provide.")],
    folder: Annotated[
        Path, typer.Option("--folder", help="Where the project's folder is made.")
    ] = Path(),
) -> None:
    """Write the project of a new plugin: it installs, and passes its conformance test."""
    from treadle_cli.templates import render

    project = render(kind, name, folder)
    print(f"{project} is written; its README.md says what to do. To begin:")
    print(f"cd {shlex.quote(str(project))} && pip install -e . pytest && pytest")
    for entry in PluginManager().entries:
        if (entry.kind, entry.key) == (kind, name):
            print(f"{entry.owner} provides {entry.id} too. To replace that, name the entry point")
            print(f'"{kind}.{name}" in the group "treadle.overrides" of pyproject.toml.')


def docs(
    kind: Annotated[
        str, typer.Argument(metavar="KIND", help=f"One of: {', '.join(installed_kinds())}.")
    ],
) -> None:
    """Print the reference page of a kind: hook, types, what a failure costs, a whole plugin."""
    from treadle_cli.plugin_pages import page

    sys.stdout.write(page(kind))


@with_flags(PLUGINS)
def test(
    *,
    id: Annotated[str, typer.Argument(metavar="ID", help="kind:key")],
    timeout: Annotated[
        float, typer.Option("--timeout", metavar="SECONDS", help="Longest run of all tests.", min=1)
    ] = 600.0,
    options: Options,
) -> None:
    """Run the conformance suites on one plugin, without any test file. Needs pytest."""
    from treadle_cli.conformance import run

    config = options.struct(PLUGINS)
    kind, _, key = id.partition(":")
    if not key:
        raise ConfigError(f"{id!r} names no plugin; write kind:key, as in treadle plugin list")
    PluginManager(config).choose(kind, key)
    raise typer.Exit(run(id, config, timeout))


@with_flags(PLUGINS)
def index(
    *,
    distributions: Annotated[
        list[str] | None,
        typer.Argument(metavar="DISTRIBUTION", help="Which to list; without a name, all."),
    ] = None,
    folder: Annotated[Path, typer.Option("--folder", help="Where the page is written.")] = Path(
        "plugin-index"
    ),
    test: Annotated[bool, typer.Option("--test", help="Run the suites of each plugin.")] = False,
    timeout: Annotated[
        float,
        typer.Option("--timeout", metavar="SECONDS", help="Longest run of one plugin.", min=1),
    ] = 600.0,
    options: Options,
) -> None:
    """Write a web page that lists distributions: kinds, generations, results of the suites."""
    from treadle_cli.conformance import run
    from treadle_cli.plugin_index import survey, write

    config = options.struct(PLUGINS)
    passes = (lambda id: run(id, config, timeout) == 0) if test else None
    found = survey(PluginManager(config), distributions or (), passes)
    write(folder, found)
    print(f"{folder / 'index.html'}: {len(found)} distributions")


@with_flags(PLUGINS)
def lock(
    *,
    file: Annotated[Path, typer.Argument(help="The file to write.")] = Path("treadle.lock"),
    allow_editable: Annotated[
        bool, typer.Option("--allow-editable", help="Lock editable installations, too.")
    ] = False,
    options: Options,
) -> None:
    """Write down every plugin with its version and code, for serve --plugin-lock-file FILE."""
    from treadle.testing.examination.integrity import lock_with_code

    plugins = PluginManager(options.struct(PLUGINS))
    plugin_lock = lock_with_code(plugins, allow_editable=allow_editable)
    text = msgspec.json.format(msgspec.json.encode(plugin_lock)) + b"\n"
    try:
        file.write_bytes(text)
    except OSError as error:
        raise ConfigError(f"{file} cannot be written: {error.strerror}") from error
    print(f"{file}: {len(plugin_lock.plugins)} keys")


def bisect(
    *,
    command: Annotated[list[str], typer.Argument(metavar="COMMAND", help="What fails, after --.")],
    timeout: Annotated[
        float, typer.Option("--timeout", metavar="SECONDS", help="A longer run has failed.")
    ] = 60.0,
    until: Annotated[
        str, typer.Option("--until", metavar="TEXT", help="A run that prints it has worked.")
    ] = "",
) -> None:
    """Find the distribution that makes a command fail, by running it without some of them."""
    from treadle_cli.bisect import culprits, succeeds
    from treadle_cli.leaving import is_foreign

    if not until and "serve" in command:
        until = "://"  # the address, in the banner of a server that has started
    candidates = sorted({normal(e.dist) for e in scan() if is_foreign(e.dist)})
    if not candidates:
        raise ConfigError("no plugins of others are installed, so none of them is to blame")

    def works_without(disabled: Collection[str]) -> bool:
        works = succeeds(command, disabled, seconds=timeout, until=until)
        result = "works" if works else "fails"
        print(f"{result} without {', '.join(sorted(disabled)) or 'any switched off'}", flush=True)
        return works

    found = culprits(candidates, works_without)
    if not found:
        print("no plugin is to blame: the command works with all of them, or fails without any")
        raise typer.Exit(1)
    for name in found:
        print(f"{name} is to blame; --disable-plugin {name} starts without it")


def _show_distribution(plugins: PluginManager, name: str, json: bool) -> None:
    from treadle.testing.examination.listing import rows

    row_list: list[Row] = [row for row in rows(plugins) if normal(row.distribution) == normal(name)]
    if not row_list:
        distributions = ", ".join(sorted({e.dist for e in plugins.entries}))
        raise ConfigError(
            f"no plugins come from {name!r}; write kind:key or one of: {distributions}"
        )
    if json:
        print(msgspec.json.encode(row_list).decode())
        return
    print(f"{row_list[0].distribution} {row_list[0].version}")
    table = [(f"{row.kind}:{row.key}", row.target, row.state, row.note) for row in row_list]
    print_table(("ID", "TARGET", "STATE", "NOTE"), table)


def _print_description(description: Description) -> None:
    print(f"{description.id} from {description.distribution} {description.version}")
    print(f"  target    {description.target}")
    print(f"  hooks     {', '.join(description.hooks) or 'none'}")
    if description.wrappers:
        print(f"  wraps     {', '.join(description.wrappers)}")
    if not description.options:
        print("  options   none declared")
        return
    print("  options")
    table = [(o.flag, o.type, o.default, o.description) for o in description.options]
    print_table(("    FLAG", "TYPE", "DEFAULT", ""), [(f"    {row[0]}", *row[1:]) for row in table])
    print("\nIn the file of --config:\n")
    print(toml_example(description.id, description.options), end="")


def print_table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> None:
    """Print columns, each as wide as its longest cell, as plain text."""
    widths = [max(len(line[i]) for line in (head, *lines)) for i in range(len(head))]
    for line in (head, *lines):
        cells = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        sys.stdout.write("  ".join(cells).rstrip() + "\n")


@impl
def treadle_command(name: str) -> typer.Typer | None:
    if name != "plugin":
        return None
    app = application("List, make, test and lock plugins.")
    app.command("list", cls=SectionedCommand)(list_plugins)
    app.command("show", cls=SectionedCommand)(show)
    app.command("docs", cls=SectionedCommand)(docs)
    app.command("new", cls=SectionedCommand)(new)
    app.command("test", cls=SectionedCommand)(test)
    app.command("index", cls=SectionedCommand)(index)
    app.command("lock", cls=SectionedCommand)(lock)
    app.command("bisect", cls=SectionedCommand)(bisect)
    return app
