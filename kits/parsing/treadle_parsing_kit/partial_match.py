"""Tags that arrive in pieces: how much of a text may still become one."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache

__all__ = ("TagFilter", "partial_match_len")


def partial_match_len(text: str, tags: Sequence[str]) -> int:
    """Return how many characters at the end of ``text`` may be the beginning of one of ``tags``."""
    max_size, first_char = _beginnings(tuple(tags))
    tail = text[-max_size:] if max_size else ""
    for match in first_char.finditer(tail):
        end = tail[match.start() :]
        if any(len(tag) > len(end) and tag.startswith(end) for tag in tags):
            return len(end)
    return 0


@lru_cache(maxsize=256)
def _beginnings(tags: tuple[str, ...]) -> tuple[int, re.Pattern[str]]:
    """Return the length of the longest beginning of a tag, and what matches a first character."""
    chars = "|".join(sorted({re.escape(tag[0]) for tag in tags})) or r"(?!)"
    return max(map(len, tags), default=1) - 1, re.compile(chars)


class TagFilter:
    """Removes the tags of a format from text that comes in pieces.

    Tags are for the parser: where they belong to no call and to no thought, readers do not see them
    either. ``pending`` is the end of the text that may be the beginning of a tag.
    """

    __slots__ = ("_first_char", "_pattern", "_tags", "pending")

    def __init__(self, tags: Sequence[str]) -> None:
        self._tags = tuple(tags)
        self._first_char = _beginnings(self._tags)[1]
        longest_first = sorted(self._tags, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self.pending = ""

    def feed(self, text: str) -> str:
        """Return what is certain of ``text``, without tags."""
        if not self.pending and self._first_char.search(text) is None:
            return text
        *before, text = self._pattern.split(self.pending + text)
        num_pending = partial_match_len(text, self._tags)
        self.pending = text[len(text) - num_pending :]
        return "".join(before) + text[: len(text) - num_pending]

    def finish(self) -> str:
        """Return the pending text: no tag has come of it."""
        text, self.pending = self.pending, ""
        return text
