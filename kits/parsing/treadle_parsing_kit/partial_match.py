"""Tags that arrive in pieces: where the next one is, and how much of a text may still become one."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import lru_cache

__all__ = ("TagFilter", "find_tag")

Search = Callable[[str, int], "re.Match[str] | None"]


def find_tag(text: str, pos: int, tags: tuple[str, ...]) -> tuple[int, str]:
    """Return where the next of ``tags`` begins, and the tag.

    The tag is ``""`` if there is none: then the rest of the text from there on may be the beginning of
    one. Of two tags that begin at one place it is the longer one, for which the shorter one waits.
    """
    match = _search(tags)(text, pos)
    if match is None:
        return len(text), ""
    return match.start(), match[1] or ""


@lru_cache(maxsize=256)
def _search(tags: tuple[str, ...]) -> Search:
    """Return what finds a tag, or a beginning of one at the end of the text.

    One regular expression: a model writes a few characters at a time, and each piece is searched.
    """
    longest_first = sorted(tags, key=len, reverse=True)
    whole = "|".join(map(re.escape, longest_first)) or "(?!)"
    beginnings = "|".join(f"{_beginning(tag)}\\Z" for tag in longest_first if len(tag) > 1)
    return re.compile(f"{beginnings}|({whole})" if beginnings else f"({whole})").search


def _beginning(tag: str) -> str:
    """Return a pattern of everything that a tag begins with, but for the whole tag."""
    pattern = ""
    for char in reversed(tag[1:-1]):
        pattern = f"(?:{re.escape(char)}{pattern})?"
    return re.escape(tag[0]) + pattern


class TagFilter:
    """Removes the tags of a format from text that comes in pieces.

    Tags are for the parser: where they belong to no call and to no thought, readers do not see them
    either. ``pending`` is the end of the text that may be the beginning of a tag.
    """

    __slots__ = ("_search", "_tags", "pending")

    def __init__(self, tags: Sequence[str]) -> None:
        self._tags = tuple(tags)
        self._search = _search(self._tags)
        self.pending = ""

    def feed(self, text: str) -> str:
        """Return what is certain of ``text``, without tags."""
        if self.pending:
            text = self.pending + text
        if self._search(text, 0) is None:
            self.pending = ""
            return text
        kept, pos = [], 0
        while True:
            start, tag = find_tag(text, pos, self._tags)
            kept.append(text[pos:start])
            if not tag:
                self.pending = text[start:]
                return "".join(kept)
            pos = start + len(tag)

    def finish(self) -> str:
        """Return the pending text: no tag has come of it, but for one that waited for a longer one."""
        text, self.pending = self.pending, ""
        for tag in self._tags:
            text = text.removeprefix(tag)
        return text
