"""Choices as lines of a terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from weft.engine.explain import Explained

__all__ = ("explained",)

INDENT = 19


def explained(rows: Iterable[Explained], width: int) -> Iterator[str]:
    """What was chosen and why, then the others; those with one reason share a line."""
    for row in rows:
        yield from _wrapped(row.what, f"{row.choice}: {row.reason}", width)
        reasons: dict[str, list[str]] = {}
        for name, why in row.others:
            reasons.setdefault(why, []).append(name)
        for why, names in reasons.items():
            yield from _wrapped("", f"not {', '.join(names)}: {why}", width)


def _wrapped(title: str, text: str, width: int) -> list[str]:
    """Names of flags and plugins are never cut."""
    return textwrap.wrap(
        text,
        max(width, 2 * INDENT),
        initial_indent=f"{title:<{INDENT}}",
        subsequent_indent=" " * (INDENT + 2),
        break_long_words=False,
        break_on_hyphens=False,
    )
