"""Free text in which tags may come, as Lark in the dialect of llguidance.

Its lexer takes the longest text of a lexeme, so free text and the tag that ends it are one lexeme: a text that
ends with the tag, and has none before.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

__all__ = (
    "Branch",
    "Literal",
    "Part",
    "any_of",
    "between_slashes",
    "end_of",
    "escaped",
    "free_text",
    "quoted",
    "spelled",
)

Part = str | int
"""A text, or the id of a token."""
Literal = tuple[Part, ...]
SAFE = "<>=_\"'`,;:!%@ "
"""Punctuation that patterns take as it is."""


@dataclass(frozen=True, slots=True)
class Branch:
    """What follows in free text: a literal that begins it, and the expression of the rest."""

    literal: Literal
    rest: str = ""


def free_text(
    branches: Sequence[Branch],
    ends: Sequence[Literal],
    excludes: Sequence[str],
    *,
    lexeme: Callable[[str], str],
    text_of: Callable[[int], str] = lambda token: "",
    first: bool = False,
    once: bool = False,
    max_chars: int | None = None,
) -> str:
    """Return free text in which ``branches`` may come, or must at first, or may once only.

    It ends with one of ``ends``, if there are any. ``lexeme`` names a terminal, ``text_of`` spells a token.
    """
    literals = [*(branch.literal for branch in branches), *ends]
    stops = [part[0] for part in literals if isinstance(part[0], str)]
    # Tokens have no text here; spelled out by others, they are as forbidden as texts.
    stops += [text_of(part[0]) for part in literals if isinstance(part[0], int)]
    stops = [text for text in dict.fromkeys([*stops, *excludes]) if text]
    count = "*" if max_chars is None else f"{{0,{max_chars}}}"
    anything = f"/(?s:.{count})/"
    seen = f"(?s:.*({'|'.join(map(escaped, stops))})"
    text = lexeme(f"{anything} & ~/{seen}.*)/" if stops else anything)

    def until(literal: Literal) -> str:
        head, *rest = literal
        if isinstance(head, int):
            return f"{text} <[{head}]> {spelled(tuple(rest))}".strip()
        body = f"/(?s:.{count}{escaped(head)})/ & ~/{seen}.+)/"
        return f"{lexeme(body)} {spelled(tuple(rest))}".strip()

    grouped: dict[Literal, list[str]] = {}
    for branch in branches:
        grouped.setdefault(branch.literal, []).append(branch.rest or quoted(""))
    steps = any_of(f"{until(literal)} {any_of(rests)}" for literal, rests in grouped.items())
    tail = any_of(until(end) for end in ends) if ends else text
    if not grouped:
        return tail
    if once:
        after = f"{steps} {end_of(ends)}".strip()
        return after if first else f"({after} | {tail})"
    return f"{steps}{'+' if first else '*'} {tail}"


def spelled(literal: Literal) -> str:
    """Return a literal as an expression."""
    return " ".join(quoted(x) if isinstance(x, str) else f"<[{x}]>" for x in literal)


def end_of(ends: Sequence[Literal]) -> str:
    """Return the expression of one of ``ends``, of nothing if there are none."""
    return any_of(map(spelled, ends)) if ends else ""


def any_of(options: Iterable[str]) -> str:
    """Return the expression of one of ``options``."""
    unique = list(dict.fromkeys(options))
    return unique[0] if len(unique) == 1 and " " not in unique[0] else f"({' | '.join(unique)})"


def escaped(text: str) -> str:
    """Return a text as a part of a pattern between slashes."""
    is_plain = [char.isalnum() or char in SAFE or ord(char) > 127 for char in text]
    return "".join(
        c if plain else f"\\x{{{ord(c):x}}}" for c, plain in zip(text, is_plain, strict=True)
    )


def between_slashes(pattern: str) -> str:
    """Return a pattern as it is written between slashes."""
    return re.sub(
        r"\\.|/", lambda found: r"\/" if found[0] == "/" else found[0], pattern, flags=re.DOTALL
    )


def quoted(text: str) -> str:
    """Return a text as an expression."""
    return json.dumps(text, ensure_ascii=False)
