"""The child process of the suite of commands: runs command lines, and says how each ended.

It runs apart because what a command imports would otherwise be in memory already, and because a
command may do anything. The request comes on standard input, the answer leaves on what was standard
output.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import traceback

import msgspec

from treadle.config import PluginConfig
from treadle.plugins import PluginManager
from treadle.plugins.selection import PluginSelection
from treadle.testing.examination.probe import HEAVY
from treadle_cli import main as cli

__all__ = ("Ended", "Request", "main")


class Request(msgspec.Struct, frozen=True):
    """Lines of arguments after ``treadle``, and the plugins to run them with."""

    lines: list[list[str]]
    plan: PluginSelection
    config: PluginConfig


class Ended(msgspec.Struct, frozen=True):
    """What one line printed, its exit code, and the heavy modules that are in memory since.

    ``traceback`` is that of an exception which nobody caught.
    """

    code: int
    out: str
    err: str
    traceback: str
    heavy: list[str]


def run(line: list[str], asked: Request) -> Ended:
    plugins = PluginManager.from_selection(
        asked.plan, asked.config
    )  # of its own, as in a process of its own
    out, err, code, trace = io.StringIO(), io.StringIO(), 1, ""
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            cli.main(line, plugins)
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        except BaseException:  # a plugin may raise anything
            trace = traceback.format_exc()
    heavy = [name for name in HEAVY if name in sys.modules]
    return Ended(code, out.getvalue(), err.getvalue(), trace, heavy)


def main() -> None:
    """Answer one request and exit without running what a command left for the exit."""
    answer = os.dup(1)
    os.dup2(2, 1)
    os.environ["TREADLE_DEBUG"] = "0"  # it would show the traceback of every error of treadle
    asked = msgspec.json.decode(sys.stdin.buffer.read(), type=Request)
    done = msgspec.json.encode([run(line, asked) for line in asked.lines])
    with os.fdopen(answer, "wb") as file:
        file.write(done)
    sys.stderr.flush()
    os._exit(0)
