"""A sign of life while something takes time."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable

from treadle_cli.terminal.screen import Screen, columns

__all__ = ("Spinner",)

DIM, RESET, CLEAR = "\x1b[2m", "\x1b[0m", "\r\x1b[K"
FRAMES = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
FRAME_SECONDS = 0.1


class Spinner:
    """A sign of life on the last line, drawn by a thread; nothing where the output is a pipe."""

    def __init__(self, screen: Screen) -> None:
        self._screen = screen
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, label: Callable[[], str]) -> None:
        """Show ``label()`` until ``stop``. Has no effect if it is shown already."""
        if self._thread is None and self._screen.animated:
            self._stopped.clear()
            self._thread = threading.Thread(target=self._run, args=(label,), daemon=True)
            self._thread.start()

    def stop(self) -> None:
        if self._thread is not None:
            self._stopped.set()
            self._thread.join()
            self._thread = None

    def _run(self, label: Callable[[], str]) -> None:
        start_time = time.monotonic()
        for frame in itertools.cycle(FRAMES):
            line = f"{frame} {label()} {time.monotonic() - start_time:.0f} s"
            self._screen.raw(f"{CLEAR}{DIM}{line[: columns(self._screen.out) - 1]}{RESET}")
            if self._stopped.wait(FRAME_SECONDS):
                break
        self._screen.raw(CLEAR)
