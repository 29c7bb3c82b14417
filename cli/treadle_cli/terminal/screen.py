"""Output for people (a terminal) and for programs (a pipe)."""

from __future__ import annotations

import sys
from typing import TextIO

__all__ = ("Screen",)

ALLOWED_CONTROLS = "\n\t"


class Screen:
    """Writes the model's text to ``out`` and remarks to ``err``; colours only on a terminal."""

    def __init__(self, out: TextIO | None = None, err: TextIO | None = None) -> None:
        self.out, self.err = out or sys.stdout, err or sys.stderr
        self.interactive = self.out.isatty()

    def text(self, text: str) -> None:
        """Write model output at once. A terminal never sees its control characters.

        A model can be made to print escape sequences, which would move the cursor, change the
        title or answer for the user; a pipe gets the text as it is.
        """
        self.out.write(visible(text) if self.interactive else text)
        self.out.flush()

    def line(self, text: str = "") -> None:
        self.text(text + "\n")

    def note(self, text: str) -> None:
        """Write a remark to ``err``, dim on a terminal."""
        colour = self.err.isatty()
        self.err.write(f"\x1b[2m{text}\x1b[0m\n" if colour else f"{text}\n")
        self.err.flush()


def visible(text: str) -> str:
    """Replace control characters, except newline and tab, by their Unicode control pictures."""
    return "".join(c if c in ALLOWED_CONTROLS or c.isprintable() else _picture(c) for c in text)


def _picture(character: str) -> str:
    code = ord(character)
    if code < 0x20:
        return chr(0x2400 + code)
    # Unassigned and private characters are not printable either, but they do not control a terminal.
    return "\N{REPLACEMENT CHARACTER}" if code == 0x7F or 0x80 <= code < 0xA0 else character
