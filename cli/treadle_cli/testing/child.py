"""The child process of the suite of commands: runs command lines and returns the result of each.

It is a separate process because modules that a command imports must not be in memory already, and
because a command may do anything to its process. It reads the request from standard input and writes
the results to the original standard output.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import traceback

import msgspec

from treadle.config import PluginConfig
from treadle.plugins import PluginManager, PluginSelection
from treadle.testing.examination.probe import HEAVY
from treadle_cli import main as cli

__all__ = ("CommandResult", "Request", "main")


class Request(msgspec.Struct, frozen=True):
    """Lines of arguments after ``treadle``, and the plugins to run them with."""

    lines: list[list[str]]
    selection: PluginSelection
    config: PluginConfig


class CommandResult(msgspec.Struct, frozen=True):
    """The output of one command line, its exit code, and the heavy modules in memory afterwards.

    ``traceback`` is that of an uncaught exception.
    """

    code: int
    out: str
    err: str
    traceback: str
    heavy: list[str]


def run(line: list[str], request: Request) -> CommandResult:
    plugins = PluginManager.from_selection(
        request.selection, request.config
    )  # a new one for each line, as in a separate process
    out, err, code, trace = io.StringIO(), io.StringIO(), 1, ""
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            cli.main(line, plugins)
        except SystemExit as exit_error:
            code = (
                exit_error.code
                if isinstance(exit_error.code, int)
                else int(exit_error.code is not None)
            )
        except BaseException:  # a plugin may raise anything
            trace = traceback.format_exc()
    heavy = [name for name in HEAVY if name in sys.modules]
    return CommandResult(code, out.getvalue(), err.getvalue(), trace, heavy)


def main() -> None:
    """Answer one request and exit without running what a command left for the exit."""
    answer = os.dup(1)
    os.dup2(2, 1)
    os.environ["TREADLE_DEBUG"] = "0"  # it would show the traceback of every error of treadle
    request = msgspec.json.decode(sys.stdin.buffer.read(), type=Request)
    reply = msgspec.json.encode([run(line, request) for line in request.lines])
    with os.fdopen(answer, "wb") as file:
        file.write(reply)
    sys.stderr.flush()
    os._exit(0)
