"""What code of plugins runs while a process starts: it may hang, or end the process.

The plugin manager logs each step to a logger of its own. The monitor is a handler of that logger, in the
server and in its children: it tells after a second what is waited for, ends a process in which a step
takes too long, and keeps the words of the step in a file, which the parent reads when the child has died.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path

from treadle.processes.logs import SlowStepNotice, steps

__all__ = ("LoadMonitor", "StartWitness", "last_step", "limit_of", "steps_folder")

log = logging.getLogger("treadle.plugins")

LIMIT_SECONDS = 120.0
"""How long an import, or the first call of a hook, may take. Imports read a disk that may be cold."""
LIGHT_LIMIT_SECONDS = 60.0
LIGHT = frozenset(
    {
        "commands",
        "logits_processors",
        "reasoning_parsers",
        "renderers",
        "scheduling_policies",
        "server",
        "stat_loggers",
        "tool_parsers",
    }
)
"""Kinds whose plugins import neither torch nor kernels: half of the time is enough."""
KIND = re.compile(r"^(?:importing|calling \S+ of) (\w+):")


WITNESS = """
cat > /dev/null
if [ -s "$1" ]; then
  printf 'treadle: the process of the server ended %s\\n' "$(cat "$1")" >&2
  printf 'treadle: --disable-plugin DIST starts without a plugin\\n' >&2
fi
rm -rf "$2"
"""
"""Reads until its parent has ended, whose file is the first argument, and the folder the second."""


class LoadMonitor(SlowStepNotice):
    """Watches the imports and the first calls of hooks in this process until it is closed."""

    seconds = 1.0

    def __init__(self, folder: Path, limit: float | None = None) -> None:
        """``folder`` is where the words of the step are kept, in a file with the number of the process.

        ``limit`` is in seconds, by default that of the plugin's kind.
        """
        super().__init__()
        self._file, self._limit = folder / str(os.getpid()), limit

    def start(self) -> None:
        faulthandler.disable()  # enabled again, it takes its signals back from libraries that took them
        faulthandler.enable(sys.__stderr__ or 2)
        for handler in list(steps.handlers):
            steps.removeHandler(handler)
            handler.close()
        steps.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        if (text := record.getMessage()) not in self.seen:
            with contextlib.suppress(OSError):
                self._file.write_text(text)
        super().emit(record)

    def timers(self, text: str) -> Sequence[threading.Timer]:
        limit = limit_of(text) if self._limit is None else self._limit
        return [*super().timers(text), threading.Timer(limit, self._end, (text, limit))]

    def close(self) -> None:
        steps.removeHandler(self)
        for thread in list(self._timers):
            self.cancel(thread)
        self._file.unlink(missing_ok=True)
        super().close()

    def _end(self, text: str, limit: float) -> None:
        log.error(
            "%s has not ended in %g s; this process ends, and was here (--disable-plugin DIST starts "
            "without a plugin, treadle plugin bisect -- COMMAND finds which one it is):",
            text,
            limit,
        )
        faulthandler.dump_traceback(sys.__stderr__ or 2)
        os._exit(1)


class StartWitness:
    """A process that says which code of a plugin this one ran, if this one dies while it starts.

    A stack that overflows in a thread leaves no trace: no handler of its own process can run.
    """

    def __init__(self, folder: Path) -> None:
        """``folder`` is that of ``LoadMonitor``; it is removed if nobody else can do it."""
        command = ["/bin/sh", "-c", WITNESS, "sh", str(folder / str(os.getpid())), str(folder)]
        self._process: subprocess.Popen[bytes] | None = None
        with contextlib.suppress(OSError):  # a system without this shell
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, process_group=0
            )

    def dismiss(self) -> None:
        """End the process: the start is over. May be called twice."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()


def limit_of(text: str) -> float:
    """Return how many seconds the step that ``text`` names may take, by the kind of the plugin."""
    kind = KIND.match(text)
    return LIGHT_LIMIT_SECONDS if kind is not None and kind[1] in LIGHT else LIMIT_SECONDS


def last_step(folder: Path) -> str:
    """Return what the processes that have died were doing; empty if it was nothing of a plugin."""
    texts = []
    for file in filter(lambda file: not file.suffix, folder.iterdir()):
        with contextlib.suppress(OSError):
            if not Path(f"/proc/{file.name}").exists() and (text := file.read_text()):
                texts.append(text)
    return " and ".join(texts)


def steps_folder() -> Path:
    """Make a folder for the files of a server and its children, which only this user can read."""
    return Path(tempfile.mkdtemp(prefix="treadle-steps-"))
