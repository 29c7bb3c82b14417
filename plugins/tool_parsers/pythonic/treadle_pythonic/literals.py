"""Python literals, as JSON.

Nothing is evaluated, and nothing but literals is understood. ``ast`` is not used on what a model
writes: it recurses in C (its documentation warns that it can crash the interpreter), and it warns
about escapes. The tests compare this reader with it.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

__all__ = ("SIMPLE", "WORDS", "NotLiteral", "json_of", "literal")

WORDS = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}
_blank = re.compile(r"\s*")
_word = re.compile(r"[^\W\d]\w*")
_number = re.compile(r"[-+]?(?:[0-9][0-9_]*)?(?:\.[0-9]*)?(?:[eE][-+]?[0-9]+)?")
_whole = re.compile(r"(-?)\+?(0|[1-9](?:_?[0-9])*)")
_in_string = {'"': re.compile(r'["\\]'), "'": re.compile(r"['\\]")}
_escape = re.compile(
    r"\\(?:\n|([0-7]{1,3})|x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))", re.DOTALL
)
_encode = json.JSONEncoder(ensure_ascii=False).encode
_surrogate = re.compile(r"[\ud800-\udfff]")
SIMPLE = {"a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v"}
SIMPLE |= {c: c for c in "\\'\""}


class NotLiteral(ValueError):
    """The text is something else than a literal."""


def json_of(value: Any) -> str:
    """Return JSON in which half a surrogate pair, which cannot be sent, is escaped."""
    text = _encode(value)
    return _surrogate.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def literal(text: str) -> Any:
    """Return the value of one literal. Raises ``NotLiteral``. Brackets must be paired and not be too
    deep: the reader recurses into them."""
    word = text.strip()
    return WORDS[word] if word in WORDS else _Literals(word).whole()


class _Literals:
    def __init__(self, text: str) -> None:
        self._text, self._at = text, 0

    def whole(self) -> Any:
        value = self._value()
        if self._peek():
            raise NotLiteral
        return value

    def _value(self) -> Any:
        char = self._peek()
        if char and char in "\"'":
            return self._string()
        if char == "[":
            return self._items("]")[0]
        if char == "(":
            items, comma = self._items(")")
            return items if comma or not items else items[0]
        if char == "{":
            return self._pairs()
        if word := self._match(_word):
            if word not in WORDS:
                raise NotLiteral
            return WORDS[word]
        return self._read_number()

    def _items(self, end: str) -> tuple[list[Any], bool]:
        """Values up to ``end``, and whether there was a comma."""
        self._at += 1
        values: list[Any] = []
        comma = False
        while self._peek() != end:
            values.append(self._value())
            if self._peek() != end:
                self._take(",")
                comma = True
        self._at += 1
        return values, comma

    def _pairs(self) -> dict[str, Any]:
        self._at += 1
        pairs: dict[str, Any] = {}
        while self._peek() != "}":
            key = self._value()
            self._take(":")
            if not isinstance(key, str):
                raise NotLiteral
            pairs[key] = self._value()
            if self._peek() != "}":
                self._take(",")
        self._at += 1
        return pairs

    def _string(self) -> str:
        """One string or several in a row, which Python joins."""
        parts = []
        while (quote := self._peek()) and quote in "\"'":
            parts.append(self._quoted(quote))
        return "".join(parts)

    def _quoted(self, quote: str) -> str:
        start = self._at = self._at + 1
        while (match := _in_string[quote].search(self._text, self._at)) is not None:
            self._at = match.end()
            if match[0] == quote:
                return _escape.sub(_unescaped, self._text[start : match.start()])
            self._at += 1  # what the backslash escapes
        raise NotLiteral

    def _read_number(self) -> int | float:
        text = self._match(_number)
        try:
            if _whole.fullmatch(text):
                return int(text)
            if not any(char.isdigit() for char in text) or "_" in text or _leading(text):
                raise NotLiteral
            number = float(text)
        except ValueError as error:  # also an int of more digits than Python converts
            raise NotLiteral from error
        if not math.isfinite(number):
            raise NotLiteral
        return number

    def _peek(self) -> str:
        """The next character that is no blank; ``""`` at the end."""
        self._match(_blank)
        return self._text[self._at : self._at + 1]

    def _take(self, char: str) -> None:
        if self._peek() != char:
            raise NotLiteral
        self._at += 1

    def _match(self, pattern: re.Pattern[str]) -> str:
        match = pattern.match(self._text, self._at)
        if match is None:
            return ""
        self._at = match.end()
        return match[0]


def _leading(text: str) -> bool:
    """``007`` is no number of Python."""
    digits = text.lstrip("+-")
    return digits.startswith("0") and digits.isdigit()


def _unescaped(match: re.Match[str]) -> str:
    octal, *codes, char = match.groups()
    if octal:
        return chr(int(octal, 8))
    for code in codes:
        if code:
            number = int(code, 16)
            if number > 0x10FFFF:
                raise NotLiteral
            return chr(number)
    if char is None:
        return ""  # a line that goes on
    if char in "xuU":
        raise NotLiteral
    return SIMPLE.get(char, f"\\{char}")  # an unknown escape stands for itself
