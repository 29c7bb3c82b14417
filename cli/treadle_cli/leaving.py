"""The end of a command: what plugins left running does not keep it, and how to go on without them."""

from __future__ import annotations

import os
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from treadle.errors import EngineDeadError, PluginConflictError, PluginError, TreadleError
from treadle.known_plugins import ALWAYS_ALLOWED, DISTRIBUTIONS
from treadle.plugins.entries import normal, scan

__all__ = ("is_foreign", "leaving_threads", "plugin_hint")

STARTING = frozenset({"batch", "bench", "chat", "generate", "run", "run-batch", "serve"})
"""Commands that start an engine."""


@contextmanager
def leaving_threads() -> Iterator[None]:
    """End the process with the status of a ``SystemExit``, without waiting for threads.

    The interpreter would wait for every thread that is not a daemon, for as long as it runs.
    """
    try:
        yield
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if not (names := _thread_names()):
            raise
        if status and not isinstance(end.code, int):
            print(end.code, file=sys.stderr)
    except BaseException:
        if not (names := _thread_names()):
            raise
        status = 1
        traceback.print_exc()
    print(f"treadle: not waiting for threads that still run: {names}", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _thread_names() -> str:
    threads = [t for t in threading.enumerate() if t is not threading.main_thread()]
    return ", ".join(sorted(t.name for t in threads if not t.daemon))


def plugin_hint(error: TreadleError, argv: Sequence[str]) -> str:
    """Return how to start without the plugins of third parties, which may have failed the start.

    Empty if there are none, or if it was another error.
    """
    is_plugins = isinstance(error, PluginError | PluginConflictError | EngineDeadError)
    if not is_plugins or not STARTING & set(argv[:1]):
        return ""
    owners = sorted({e.dist for e in scan() if is_foreign(e.dist)})
    if not owners:
        return "to start without a --plugin-file, leave it out" if "--plugin-file" in argv else ""
    return (
        f"to start without plugins of others ({', '.join(owners)}): TREADLE_PLUGIN_AUTOLOAD=0; without "
        "one of them: --disable-plugin DIST; to find out which one it is: treadle plugin bisect -- COMMAND"
    )


def is_foreign(dist: str) -> bool:
    return normal(dist) not in DISTRIBUTIONS and normal(dist) not in ALWAYS_ALLOWED
