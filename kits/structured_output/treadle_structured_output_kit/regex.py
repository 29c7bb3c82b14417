"""Literal texts as regular expressions, in the dialect of Rust's ``regex`` crate."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ("JSON_WHITESPACE", "choice_regex", "escape_regex")

# Between the parts of a JSON text. Enough for any layout, but bounded: a model with nothing to say
# writes whitespace for ever.
JSON_WHITESPACE = r"[ \t]|\r?\n[ \t]{0,64}"

SPECIAL_CHARACTERS = frozenset(r"\.+*?()|[]{}^$#&-~/")


def escape_regex(text: str) -> str:
    """Return a regular expression that matches exactly ``text``.

    ``re.escape`` does not do: it escapes characters that the crate does not allow to be escaped.
    """
    return "".join(f"\\{c}" if c in SPECIAL_CHARACTERS else c for c in text)


def choice_regex(choices: Iterable[str]) -> str:
    """Return a regular expression that matches exactly the texts in ``choices``."""
    return "|".join(map(escape_regex, choices))
