"""Which call of a plugin a process is stuck in, for the server when its engine does not answer.

Calls of plugins in a step are too many to write each of them down. So nothing is recorded: a thread of
each process waits at a socket in the folder of ``LoadMonitor``, and tells who connects what the main
thread is doing, which it reads from the frames of the boundary (``treadle.plugins.boundary``). A thread
that fills bitmasks beside the main thread is part of the step, too.

A library that keeps the interpreter's lock keeps this thread from answering. Then a signal asks: its
handler is faulthandler's, which needs no lock, and writes where those threads are to a file.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter, sleep
from types import FrameType
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from treadle.plugins.entries import Entry
    from treadle.plugins.guard import PluginGuard

__all__ = ("CallMonitor", "stuck_call", "stuck_calls")

NUM_LOOKS = 5
SECONDS_BETWEEN_LOOKS = 0.02
ANSWER_SECONDS = 2.0
"""How long a process may take to answer, whose interpreter runs."""
WRITE_SECONDS = 2.0
"""How long the handler of the signal may take to write the file."""
SUFFIX = ".calls"
TRACE_SUFFIX = ".trace"
BOUNDARY = "treadle/plugins/boundary.py"
BITMASKS = "treadle-bitmasks"
"""What the names of threads begin with that fill bitmasks."""
FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)


class CallMonitor:
    """Answers questions of the server in a thread of this process, as long as it lives."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / f"{os.getpid()}{SUFFIX}"
        self._trace: IO[str] | None = None

    def start(self) -> None:
        """Listen. The path of a socket has a maximum length: beyond it nothing is told."""
        listener = socket.socket(socket.AF_UNIX)
        try:
            # Left open: the handler writes to it. It comes first, as who has a socket may be signalled.
            self._trace = self._path.with_suffix(TRACE_SUFFIX).open("w")
            faulthandler.register(signal.SIGUSR2, self._trace)
            listener.bind(str(self._path))
            listener.listen(4)
        except OSError:
            listener.close()
            return
        threading.Thread(target=_answer, args=[listener], name="treadle-calls", daemon=True).start()


def _answer(listener: socket.socket) -> None:
    while True:
        with contextlib.suppress(OSError):
            connection, _ = listener.accept()
            with connection:
                call = next(filter(None, map(stuck_call, _step_threads())), "")
                connection.sendall(call.encode(errors="backslashreplace"))


def _step_threads() -> list[int]:
    """Return the threads that a step waits for, the main thread first."""
    beside = [thread for thread in threading.enumerate() if thread.name.startswith(BITMASKS)]
    return [thread.ident or 0 for thread in (threading.main_thread(), *beside)]


def stuck_call(thread: int) -> str:
    """Return which call of a plugin a thread does not leave, since when and where; ``""`` if none.

    What calls a plugin again and again is not left, and its calls are. So it is looked several times.
    The frames are kept meanwhile: those of new calls are others then.
    """
    frames = list(_stack(thread))
    for _ in range(NUM_LOOKS - 1):
        sleep(SECONDS_BETWEEN_LOOKS)
        present = list(_stack(thread))
        frames = [frame for frame in frames if frame in present]
    calls = [values for frame in frames if (values := _call(frame)) is not None]
    if not calls:
        return ""
    guard, method, _ = calls[0]
    # Some methods are not timed: then it is known how long what called them has been running.
    start_time = next((start for _, _, start in calls if start is not None), None)
    time = "" if start_time is None else f" for {perf_counter() - start_time:.3g} s"
    entry = guard.entry
    own = next((frame for frame in frames if _is_of(entry, frame)), frames[0])
    place = f"{Path(own.f_code.co_filename).name}, line {own.f_lineno}"
    return f"{entry.id} from {entry.owner} has been in {method}{time} ({place})"


def _is_of(entry: Entry, frame: FrameType) -> bool:
    """Return whether a frame is of the plugin's own code."""
    if entry.file is not None:
        return frame.f_code.co_filename == entry.file
    module: str = frame.f_globals.get("__name__", "")
    return module.partition(".")[0] == entry.target.partition(":")[0].partition(".")[0]


def _stack(thread: int) -> Iterator[FrameType]:
    frame = sys._current_frames().get(thread)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _call(frame: FrameType) -> tuple[PluginGuard, str, float | None] | None:
    """Return plugin, method and start of a call, if a frame is one of the boundary."""
    if frame.f_globals.get("__name__") != "treadle.plugins.boundary":
        return None
    values = frame.f_locals
    guard: PluginGuard | None = values.get("guard")
    if guard is None:
        return None
    return guard, values.get("name") or values.get("label", ""), values.get("start_time")


def stuck_calls(folder: Path) -> str:
    """Return what the other processes of ``folder`` are stuck in; ``""`` if in no call of a plugin.

    Waits for their answers, up to ``ANSWER_SECONDS`` for each.
    """
    others = [path for path in folder.glob(f"*{SUFFIX}") if path.stem != str(os.getpid())]
    return " and ".join(filter(None, map(_ask, others)))


def _ask(path: Path) -> str:
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(ANSWER_SECONDS)
            connection.connect(str(path))
            with connection.makefile(errors="replace") as answer:
                return answer.read()
    except TimeoutError:
        if not Path(f"/proc/{path.stem}").exists():
            return ""
        return f"process {path.stem} runs no Python: a library keeps its lock{_place(path)}"
    except OSError:  # it has ended
        return ""


def _place(path: Path) -> str:
    """Return where the step of a process is that does not answer, or ``""``."""
    trace, deadline = path.with_suffix(TRACE_SUFFIX), perf_counter() + WRITE_SECONDS
    with contextlib.suppress(OSError):
        size = trace.stat().st_size
        os.kill(int(path.stem), signal.SIGUSR2)
        while perf_counter() < deadline:
            threads = trace.read_text()[size:].split("\n\n")
            threads.sort(key=lambda text: not text.startswith("Current thread"))  # the main thread
            for frames in map(FRAME.findall, threads):
                # The plugin's method is what the innermost call of the boundary has called.
                below = (n for n, (file, *_) in enumerate(frames) if file.endswith(BOUNDARY))
                if (index := next(below, 0)) > 0:
                    file, line, method = frames[index - 1]
                    return f", called in {method} ({file}, line {line})"
            sleep(SECONDS_BETWEEN_LOOKS)
    return ""
