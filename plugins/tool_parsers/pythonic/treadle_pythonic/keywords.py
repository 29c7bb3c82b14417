"""A call's keyword arguments, read while they arrive: ``(city="Paris", days=[1, 2])``."""

from __future__ import annotations

import re
from collections.abc import Callable

from treadle.api.parsers import Delta, ToolCallDelta
from treadle_pythonic.literals import SIMPLE, WORDS, NotLiteral, json_of, literal

__all__ = ("Keywords",)

MAX_DEPTH = 32
PAIRS = {")": "(", "]": "[", "}": "{"}
OCTAL = frozenset("01234567")
HEX = frozenset("0123456789abcdefABCDEF")
HEX_SIZES = {"x": 2, "u": 4, "U": 8}
_blank = re.compile(r"\s*")
_name = re.compile(r"[^\W\d]\w*")
_word = re.compile(r"\w*")
_scalar = re.compile(r"[^,()\[\]{}\"'=]*")
_special = re.compile(r"[\"'()\[\]{}]")
_escaped = re.compile(r'["\\\x00-\x1f\ud800-\udfff]')
_in_string = {'"': re.compile(r'["\\]'), "'": re.compile(r"['\\]")}


class Keywords:
    """A ``ToolCallReader`` (``treadle_parsing_kit.tool_call_parser``).

    A text streams as it comes, and with it all that stands before it. A list or a dictionary is handed
    on once a comma or the end of the call follows it. A call of numbers and words alone, which are
    short, is handed on when it is complete: if it turns out to be none, it is text as a whole.
    """

    def __init__(self, index: int, name: str) -> None:
        self._index = index
        self._call_name: str | None = name
        self._mode: Callable[[str, int], int] = self._read_opening
        self._raw: list[str] = []  # what was read and is in no delta
        self._json: list[str] = []
        self._pieces: list[str] = []  # of the name or the value that is read
        self._keys: set[str] = set()
        self._brackets: list[str] = []
        self._head = ""  # the key of the next value, as JSON
        self._quote = self._escape = ""
        self._is_text = False  # the last value
        self._streams = False  # what was read is handed on behind the last value
        self.begun = self.done = self.failed = False

    @property
    def rest(self) -> str:
        return "" if self.done else "".join(self._raw)

    def feed(self, text: str, pos: int = 0) -> tuple[int, list[Delta]]:
        size = len(text)
        while pos < size and not (self.done or self.failed):
            pos = self._mode(text, pos)
        return pos, self._pop_deltas()

    def finish(self) -> list[Delta]:
        return self._pop_deltas()

    def _pop_deltas(self) -> list[Delta]:
        if not self.begun or not self._json:
            return []
        json, self._json = "".join(self._json), []
        name, self._call_name = self._call_name, None
        return [ToolCallDelta(self._index, name, json)]

    def _take(self, text: str, start: int, end: int) -> int:
        self._raw.append(text[start:end])
        return end

    def _fail(self, pos: int) -> int:
        self.failed = True
        return pos

    def _begin(self) -> None:
        """What was read is in deltas from now on."""
        self.begun = True
        self._raw.clear()

    def _read_opening(self, text: str, pos: int) -> int:
        self._mode = self._read_key
        return self._take(text, pos, pos + 1)

    def _read_key(self, text: str, pos: int) -> int:
        if not self._pieces:
            pos = self._skip_blanks(text, pos)
            if pos == len(text):
                return pos
            if text[pos] == ")":
                return self._end(pos)
        end = _end(_word, text, pos)
        self._pieces.append(text[pos:end])
        if end == len(text):
            return self._take(text, pos, end)
        key = "".join(self._pieces)
        if not _name.fullmatch(key) or key in self._keys or key in WORDS:
            return self._fail(self._take(text, pos, end))
        self._mode = self._read_equals
        return self._take(text, pos, end)

    def _read_equals(self, text: str, pos: int) -> int:
        pos = self._skip_blanks(text, pos)
        if pos == len(text) or text[pos] != "=":
            return pos if pos == len(text) else self._fail(pos)
        key = "".join(self._pieces)
        self._head = f"{', ' if self._keys else '{'}{json_of(key)}: "
        self._keys.add(key)
        self._pieces.clear()
        self._mode = self._read_value
        return self._take(text, pos, pos + 1)

    def _read_value(self, text: str, pos: int) -> int:
        """Read the beginning of a value."""
        pos = self._skip_blanks(text, pos)
        if pos == len(text):
            return pos
        char = text[pos]
        if char in _in_string:
            self._json.append(f'{self._head}"')
            self._begin()
            self._quote, self._mode = char, self._read_text
            self._is_text = self._streams = True
            return pos + 1
        self._is_text, self._streams = False, self.begun or char in "([{"
        self._mode = self._read_nested if char in "([{" else self._read_scalar
        return pos

    def _read_scalar(self, text: str, pos: int) -> int:
        end = _end(_scalar, text, pos)
        self._pieces.append(text[pos:end])
        self._take(text, pos, end)
        return end if end == len(text) else self._convert(end)

    def _read_nested(self, text: str, pos: int) -> int:
        """Read up to the next quote or bracket of a list, a tuple or a dictionary."""
        if self._escape:
            self._escape, end = "", pos + 1
        else:
            match = (_in_string[self._quote] if self._quote else _special).search(text, pos)
            end = len(text) if match is None else match.end()
            char = "" if match is None else match[0]
            if char == "\\":
                self._escape = char
            elif self._quote:
                self._quote = "" if char == self._quote else self._quote
            elif char in _in_string:
                self._quote = char
            elif char in PAIRS:
                self.failed = self._brackets.pop() != PAIRS[char]
            elif char:
                self._brackets.append(char)
                self.failed = len(self._brackets) > MAX_DEPTH
        self._pieces.append(text[pos:end])
        self._take(text, pos, end)
        return end if self._brackets or self.failed else self._convert(end)

    def _convert(self, pos: int) -> int:
        """Take a value that is complete."""
        try:
            self._json.append(self._head + json_of(literal("".join(self._pieces))))
        except NotLiteral:
            return self._fail(pos)
        self._pieces.clear()
        self._mode = self._read_after_value
        return pos

    def _read_text(self, text: str, pos: int) -> int:
        if self._escape:
            return self._read_escape(text, pos)
        match = _in_string[self._quote].search(text, pos)
        end = len(text) if match is None else match.start()
        self._say(text[pos:end])
        if match is None:
            return end
        if match[0] == self._quote:
            self._quote, self._mode = "", self._read_after_value
        else:
            self._escape = "\\"
        return end + 1

    def _read_escape(self, text: str, pos: int) -> int:
        """Read a character of an escape; an unknown one stands for itself."""
        char, kind = text[pos], self._escape[1:2]
        if not kind and char not in OCTAL and char not in HEX_SIZES:
            self._say("" if char == "\n" else SIMPLE.get(char, f"\\{char}"))
            self._escape = ""
            return pos + 1
        if kind in OCTAL and char not in OCTAL:
            return self._say_code(pos, 8)
        if kind in HEX_SIZES and char not in HEX:
            return self._fail(pos)
        self._escape += char
        if self._escape[1] in OCTAL:
            return self._say_code(pos + 1, 8) if len(self._escape) == 4 else pos + 1
        if len(self._escape) < 2 + HEX_SIZES[self._escape[1]]:
            return pos + 1
        return self._say_code(pos + 1, 16)

    def _say_code(self, pos: int, base: int) -> int:
        code = int(self._escape[1 + (base == 16) :], base)
        self._escape = ""
        if code > 0x10FFFF:
            return self._fail(pos)
        self._say(chr(code))
        return pos

    def _say(self, text: str) -> None:
        self._json.append(json_of(text)[1:-1] if _escaped.search(text) else text)

    def _read_after_value(self, text: str, pos: int) -> int:
        pos = self._skip_blanks(text, pos)
        if pos == len(text):
            return pos
        char = text[pos]
        if char in _in_string and self._is_text:  # Python joins texts that stand in a row
            self._quote, self._mode = char, self._read_text
            return pos + 1
        if char not in ",)":
            return self._fail(pos)
        if self._is_text:
            self._json.append('"')
        if self._streams:
            self._begin()
        if char == ")":
            return self._end(pos)
        self._mode = self._read_key
        if not self.begun:
            self._raw.append(char)
        return pos + 1

    def _end(self, pos: int) -> int:
        self._json.append("}" if self._keys else "{}")
        self._begin()
        self.done = True
        return pos + 1

    def _skip_blanks(self, text: str, pos: int) -> int:
        if not text[pos].isspace():
            return pos
        return self._take(text, pos, _end(_blank, text, pos))


def _end(pattern: re.Pattern[str], text: str, pos: int) -> int:
    match = pattern.match(text, pos)
    return pos if match is None else match.end()
