"""A process on a pseudo-terminal of some size, and what a person would see on its screen."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable

import pyte

__all__ = ("Terminal",)

PASTE = "\x1b[200~{}\x1b[201~"


class Screen(pyte.HistoryScreen):
    """A screen that answers what programs ask a terminal."""

    def __init__(self, columns: int, rows: int, answer: Callable[[str], None]) -> None:
        super().__init__(columns, rows, history=1000)
        self._answer = answer

    def write_process_input(self, data: str) -> None:
        self._answer(data)


class Terminal:
    """Runs ``treadle`` with ``arguments``; a context that ends the process."""

    def __init__(self, *arguments: str, columns: int = 80, rows: int = 24, **env: str) -> None:
        self.master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "treadle_cli", *arguments],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
            env={**os.environ, "TERM": "xterm-256color", **env},
        )
        os.close(slave)
        self.screen = Screen(columns, rows, self.type)
        self._stream = pyte.ByteStream(self.screen)

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self.master)

    @property
    def lines(self) -> list[str]:
        """What was scrolled away and what is on the screen, without empty lines at the end."""
        above = [
            "".join(row[i].data for i in range(self.screen.columns))
            for row in self.screen.history.top
        ]
        lines = [line.rstrip() for line in (*above, *self.screen.display)]
        while lines and not lines[-1]:
            lines.pop()
        return lines

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    def is_at_prompt(self) -> bool:
        return self.lines[-1:] == [">"]

    def type(self, text: str) -> None:
        os.write(self.master, text.encode())

    def paste(self, text: str) -> None:
        """As a terminal with bracketed paste sends it."""
        self.type(PASTE.format(text.replace("\n", "\r")))

    def resize(self, columns: int, rows: int = 24) -> None:
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self.screen.resize(rows, columns)
        os.killpg(self.process.pid, signal.SIGWINCH)

    def wait_for(self, condition: str | Callable[[], bool], seconds: float = 60.0) -> None:
        """Read until the text is on the screen, or the condition holds."""
        is_met = condition if callable(condition) else lambda: condition in self.text
        until = time.monotonic() + seconds
        while not is_met():
            if not self._read(max(0.0, until - time.monotonic())):
                raise AssertionError(f"{condition!r} did not come; there was\n{self.text}")

    def ends(self, seconds: float = 60.0) -> int:
        """Read to the end of the process and return its exit code."""
        until = time.monotonic() + seconds
        while self._read(max(0.0, until - time.monotonic())):
            pass
        return self.process.wait(max(1.0, until - time.monotonic()))

    def _read(self, seconds: float) -> bool:
        ready, _, _ = select.select([self.master], [], [], seconds)
        try:
            data = os.read(self.master, 65536) if ready else b""
        except OSError:  # nobody has the other end open any more
            return False
        self._stream.feed(data)
        return bool(data)
