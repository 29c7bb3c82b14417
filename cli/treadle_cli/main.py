"""The entry point of ``treadle``: subcommands from plugins, and errors as one line.

Nothing here imports torch, so that ``treadle --version`` and ``treadle --help`` answer at once.
"""

from __future__ import annotations

import faulthandler
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

import treadle
from treadle.config import debug_enabled
from treadle.errors import (
    ConfigError,
    PluginNotFoundError,
    RequestError,
    TreadleError,
)
from treadle.processes.logs import SlowStepNotice, steps
from treadle_cli.lazy import Commands
from treadle_cli.leaving import leaving_threads, plugin_hint
from treadle_cli.rewrite import rewrite_flags

if TYPE_CHECKING:
    from treadle.plugins import PluginManager

__all__ = ("app", "main")

app = typer.Typer(
    name="treadle",
    cls=Commands,
    help="An LLM inference engine assembled from plugins.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _version(value: bool) -> None:
    if value:
        print(f"treadle {treadle.__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """An LLM inference engine assembled from plugins."""


WRONG_VALUES = (ConfigError, RequestError, PluginNotFoundError)


def main(arguments: Sequence[str] | None = None, plugins: PluginManager | None = None) -> NoReturn:
    """Run the command line and exit. ``plugins`` has the subcommands, by default all installed ones.

    The exit code is 0, 2 for a wrong option or value, 1 for every other error of treadle, and 130
    after Ctrl-C. ``TREADLE_DEBUG=1`` shows the traceback of an error of treadle.
    """
    if arguments is not None:
        _run(list(arguments), plugins)
    faulthandler.enable()  # code of a plugin that crashes is named by its file
    steps.addHandler(SlowStepNotice())
    with leaving_threads():
        _run(sys.argv[1:], plugins)


def _run(argv: Sequence[str], plugins: PluginManager | None) -> NoReturn:
    commands: Any = typer.main.get_command(app)
    if plugins is not None:
        commands.plugins = plugins
    try:
        commands(args=rewrite_flags(argv), prog_name="treadle")
    except TreadleError as error:
        if debug_enabled():
            raise
        print(f"treadle: {error}", file=sys.stderr)
        if hint := plugin_hint(error, argv):
            print(f"treadle: {hint}", file=sys.stderr)
        sys.exit(2 if isinstance(error, WRONG_VALUES) else 1)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        # The reader has left (``treadle generate | head``); what is buffered cannot be written.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    sys.exit(0)
