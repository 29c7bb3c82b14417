"""Messages of several lines: three quotes around a block, or a backslash at the end of a line."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

__all__ = ("is_open", "joined_lines", "plain_text")

QUOTES = '"""'
# A block is the whole message, or the argument of a command.
BLOCK = re.compile(r'(?s)(\s*(?:/\w+!?[ \t]+)?)"""\n?(.*?)\n?"""\s*')
OPENED = re.compile(r'(?s)\s*(?:/\w+!?[ \t]+)?"""')


def is_open(text: str) -> bool:
    """Whether ``text`` begins a block that does not end in it."""
    return OPENED.match(text) is not None and text.count(QUOTES) < 2


def plain_text(text: str) -> str:
    """Return the message that was meant: without the quotes of a block."""
    match = BLOCK.fullmatch(text)
    return text.strip() if match is None else match[1].lstrip() + match[2]


def joined_lines(lines: Iterable[str]) -> Iterator[str]:
    """Yield the messages of a pipe: one for each line, or for each block."""
    pending = ""
    for line in lines:
        pending += line.rstrip("\r\n")
        if is_open(pending):
            pending += "\n"
            continue
        if pending.endswith("\\"):
            pending = pending[:-1] + "\n"
            continue
        if pending.strip():
            yield plain_text(pending)
        pending = ""
    if pending.strip():
        yield plain_text(pending)
