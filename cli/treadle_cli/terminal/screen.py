"""Output for people (a terminal) and for programs (a pipe)."""

from __future__ import annotations

import os
import sys
from functools import cached_property
from typing import TextIO

__all__ = ("Screen", "columns")

ALLOWED_CONTROLS = "\n\t"
DEFAULT_COLUMNS = 80


class Screen:
    """Writes the model's text to ``out`` and remarks to ``err``; colours only on a terminal.

    ``animated`` is whether ``out`` is a terminal that moves its cursor.
    """

    def __init__(self, out: TextIO | None = None, err: TextIO | None = None) -> None:
        self.out, self.err = out or sys.stdout, err or sys.stderr
        self.interactive = self.out.isatty()

    @cached_property
    def animated(self) -> bool:
        return self.interactive and not is_dumb()

    def text(self, text: str) -> None:
        """Write model output at once. A terminal never sees its control characters.

        A model can be made to print escape sequences, which would move the cursor, change the
        title or answer for the user; a pipe gets the text as it is.
        """
        self.raw(visible(text) if self.interactive else text)

    def raw(self, text: str) -> None:
        """Write escape sequences of treadle, and text that is known to have none."""
        self.out.write(text)
        self.out.flush()

    def line(self, text: str = "") -> None:
        self.text(text + "\n")

    def wait_for(self, model: str) -> None:
        """Say on a terminal what the user waits for: the imports of a start alone take seconds."""
        if self.err.isatty():
            self.note(f"loading {model or 'the model'} ...")

    def note(self, text: str) -> None:
        """Write a remark to ``err``, dim and wrapped on a terminal."""
        if self.err.isatty() and not is_dumb():
            from treadle_cli.terminal.wrapping import Wrapper

            lines = Wrapper(lambda: columns(self.err)).feed(visible(text))
            text = f"\x1b[2m{lines}\x1b[0m"
        self.err.write(f"{text}\n")
        self.err.flush()


def is_dumb() -> bool:
    """Whether the terminal only prints (``TERM=dumb``)."""
    from prompt_toolkit.utils import is_dumb_terminal

    return is_dumb_terminal()


def columns(stream: TextIO) -> int:
    """The width of a terminal now, for people change it; 80 where there is none."""
    try:
        return os.get_terminal_size(stream.fileno()).columns or DEFAULT_COLUMNS
    except (OSError, ValueError):
        return DEFAULT_COLUMNS


def visible(text: str) -> str:
    """Replace control characters, except newline and tab, by their Unicode control pictures."""
    return "".join(c if c in ALLOWED_CONTROLS or c.isprintable() else _picture(c) for c in text)


def _picture(character: str) -> str:
    code = ord(character)
    if code < 0x20:
        return chr(0x2400 + code)
    # Unassigned and private characters are not printable either, but they do not control a terminal.
    return "\N{REPLACEMENT CHARACTER}" if code == 0x7F or 0x80 <= code < 0xA0 else character
