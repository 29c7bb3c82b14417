"""Keeps special tokens out of what users wrote: only a template inserts markers.

A chat template joins its own markers and the users' words into one text, and encoding that text
would turn ``<|im_end|>`` in a message into the token that ends a turn. So before rendering, every
marker inside a user's string gets a *break*, a Unicode noncharacter after its first character.
The rendered text is then cut at the breaks and each part is encoded alone: no part holds a user's
marker, so none can become a token, while the text itself stays as it was.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from itertools import pairwise
from typing import Any

from treadle.errors import RequestError

__all__ = ("MarkerEscaper", "Markers", "RenderedPrompt")

# Unicode promises never to give these to a character; templates treat them as ordinary letters.
NONCHARACTERS = "".join(map(chr, range(0xFDD0, 0xFDF0)))


class RenderedPrompt(str):
    """A rendered prompt. ``escape_positions`` are the positions at which it is cut before it is encoded."""

    escape_positions: tuple[int, ...] = ()

    @classmethod
    def of(cls, text: str, break_mark: str) -> RenderedPrompt:
        """Take the break marks out of ``text`` and remember where they were."""
        pieces = text.split(break_mark)
        prompt = cls("".join(pieces))
        pos, positions = 0, []
        for piece in pieces[:-1]:
            pos += len(piece)
            positions.append(pos)
        prompt.escape_positions = tuple(positions)
        return prompt

    def parts(self) -> list[str]:
        """The text, cut at the breaks. Empty parts are left out."""
        edges = [0, *self.escape_positions, len(self)]
        return [self[begin:end] for begin, end in pairwise(edges) if begin < end]


class Markers:
    """A set of markers, found in time linear in the text. Immutable."""

    def __init__(self, markers: Collection[str]) -> None:
        # A marker of one character cannot be cut. No published chat model has one.
        self._markers = frozenset(m for m in markers if len(m) > 1 and not m.isspace())
        self._lengths = sorted({len(m) for m in self._markers})
        self._prefixes = frozenset(m[:n] for m in self._markers for n in range(1, len(m)))
        first = "".join(sorted({m[0] for m in self._markers}))
        self._first = re.compile(f"[{re.escape(first)}]") if first else None

    def starts(self, text: str) -> list[int]:
        """Where markers begin in ``text``, those inside of other markers too."""
        if self._first is None:
            return []
        positions = (m.start() for m in self._first.finditer(text))
        return [
            i for i in positions if any(text[i : i + n] in self._markers for n in self._lengths)
        ]

    def may_begin_at_end(self, text: str) -> bool:
        """Whether ``text`` ends in the beginning of a marker."""
        max_length = max(self._lengths, default=0)
        return any(text[-n:] in self._prefixes for n in range(1, min(max_length, len(text) + 1)))


class MarkerEscaper:
    """Puts breaks into the strings of one request.

    ``mark`` and ``tail`` are two noncharacters that occur nowhere in the request; ``tail`` is for
    the renderer's own use.
    """

    def __init__(self, *values: Any) -> None:
        used = _noncharacters(values)
        free = [c for c in NONCHARACTERS if c not in used]
        if len(free) < 2:
            raise RequestError(
                "the messages hold all of the noncharacters U+FDD0 to U+FDEF, of which rendering "
                "needs two; remove them",
                param="messages",
            )
        self.mark, self.tail = free[:2]

    def escape(self, value: Any, markers: Markers) -> Any:
        """A copy of ``value`` (text, list or mapping, nested) whose markers are broken, keys too."""
        if isinstance(value, str):
            return self._broken(value, markers)
        if isinstance(value, Mapping):
            return {self.escape(k, markers): self.escape(v, markers) for k, v in value.items()}
        if isinstance(value, list | tuple):
            items = [self.escape(item, markers) for item in value]
            return [self._closed(item, markers) for item in items[:-1]] + items[-1:]
        return value

    def _broken(self, text: str, markers: Markers) -> str:
        starts = markers.starts(text)
        if not starts:
            return text
        edges = [0, *(i + 1 for i in starts), len(text)]
        return self.mark.join(text[begin:end] for begin, end in pairwise(edges))

    def _closed(self, part: Any, markers: Markers) -> Any:
        """Templates join the parts of a content: no marker may begin in one and end in the next."""
        if isinstance(part, str):
            return part + self.mark if markers.may_begin_at_end(part) else part
        if isinstance(part, dict) and isinstance(part.get("text"), str):
            return {**part, "text": self._closed(part["text"], markers)}
        return part


def _noncharacters(value: Any) -> set[str]:
    if isinstance(value, str):
        # isascii() reads a flag: most texts are done here.
        return set() if value.isascii() else {c for c in value if "\ufdd0" <= c <= "\ufdef"}
    if isinstance(value, Mapping):
        return _noncharacters([*value.keys(), *value.values()])
    if isinstance(value, list | tuple):
        return set().union(*map(_noncharacters, value))
    return set()
