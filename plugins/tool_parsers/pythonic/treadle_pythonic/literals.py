"""Keyword arguments that are Python literals, as JSON.

Nothing is evaluated, and nothing but literals is understood. ``ast`` is not used on what a model
writes: it recurses in C (its documentation warns that it can crash the interpreter), and it warns
about escapes. The tests compare this reader with it.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

from treadle.api.parsers import Delta, ToolCallDelta

__all__ = ("Keywords", "NotLiteral", "keywords")

MAX_DEPTH = 32
PAIRS = {")": "(", "]": "[", "}": "{"}
WORDS = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}
_special = re.compile(r"[\"'()\[\]{}]")
_blank = re.compile(r"\s*")
_word = re.compile(r"[^\W\d]\w*")
_number = re.compile(r"[-+]?(?:[0-9][0-9_]*)?(?:\.[0-9]*)?(?:[eE][-+]?[0-9]+)?")
_whole = re.compile(r"(-?)\+?(0|[1-9](?:_?[0-9])*)")
_in_string = {'"': re.compile(r'["\\]'), "'": re.compile(r"['\\]")}
_escape = re.compile(
    r"\\(?:\n|([0-7]{1,3})|x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))", re.DOTALL
)
SIMPLE = {"a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v"}
SIMPLE |= {c: c for c in "\\'\""}


class NotLiteral(ValueError):
    """The text is something else than literals given by keyword."""


class Keywords:
    """A ``ToolCallReader`` (``treadle_parsing_kit.tool_call_parser``) of ``(a=1, b="x")``."""

    def __init__(self, index: int, name: str) -> None:
        self._index, self._name = index, name
        self._pieces: list[str] = []
        self._open: list[str] = []
        self._quote = ""  # the string that is read; with a backslash behind it, in an escape
        self.begun = self.done = self.failed = False

    @property
    def rest(self) -> str:
        return "" if self.done else "".join(self._pieces)

    def feed(self, text: str, pos: int = 0) -> tuple[int, list[Delta]]:
        start = pos
        while pos < len(text) and not self.done and not self.failed:
            pos = self._read(text, pos)
        self._pieces.append(text[start:pos])
        if not self.done:
            return pos, []
        try:
            arguments = json_of(keywords("".join(self._pieces)[1:-1]))
        except NotLiteral:
            self.done, self.failed = False, True
            return pos, []
        self.begun = True
        return pos, [ToolCallDelta(self._index, self._name, arguments)]

    def finish(self) -> list[Delta]:
        return []

    def _read(self, text: str, pos: int) -> int:
        """Read up to the next quote or bracket."""
        if len(self._quote) == 2:
            self._quote = self._quote[0]
            return pos + 1
        match = (_in_string[self._quote] if self._quote else _special).search(text, pos)
        if match is None:
            return len(text)
        char = match[0]
        if self._quote:
            self._quote = "" if char == self._quote else self._quote + char
        elif char in _in_string:
            self._quote = char
        elif char in PAIRS:
            if self._open.pop() != PAIRS[char]:
                self.failed = True
            self.done = not self._open and not self.failed
        else:
            self._open.append(char)
            if len(self._open) > MAX_DEPTH:
                self.failed = True
        return match.end()


def json_of(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    if any("\ud800" <= char <= "\udfff" for char in text):  # half a surrogate pair cannot be sent
        return json.dumps(value)
    return text


def keywords(text: str) -> dict[str, Any]:
    """The arguments between the brackets of a call. Raises ``NotLiteral``. Brackets must be paired
    and at most ``MAX_DEPTH`` deep: the reader recurses into them."""
    return _Literals(text).keywords()


class _Literals:
    def __init__(self, text: str) -> None:
        self._text, self._at = text, 0

    def keywords(self) -> dict[str, Any]:
        arguments: dict[str, Any] = {}
        while self._peek():
            name = self._match(_word)
            self._take("=")
            if not name or name in arguments or name in WORDS:
                raise NotLiteral
            arguments[name] = self._value()
            if self._peek():
                self._take(",")
        return arguments

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
    return SIMPLE.get(char, f"\\{char}")  # an unknown escape stands for itself
