"""JSON that arrives in pieces: each piece is checked once and returned at once (RFC 8259).

For parsers of tool calls, whose arguments stream to clients: what was returned is always the
beginning of valid JSON. Linear in the text, without recursion, so that nothing a model writes can
stall or crash it.
"""

from __future__ import annotations

import re

__all__ = ("BLANKS", "IncrementalJson")

BLANKS = " \t\n\r"
_blank = re.compile(r"[ \t\n\r]*")
_special = re.compile(r'["\\\x00-\x1f]')
_word = re.compile(r"[-+.\w]*")
_number = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_number_prefix = re.compile(
    r"-?(?:(?:0|[1-9][0-9]*)(?:\.[0-9]*|(?:\.[0-9]+)?[eE][-+]?[0-9]*)?)?", re.ASCII
)
WORDS = ("true", "false", "null")
ESCAPES = frozenset('"\\/bfnrt')
HEX = frozenset("0123456789abcdefABCDEF")
CONTROLS = {"\n": "\\n", "\r": "\\r", "\t": "\\t", "\b": "\\b", "\f": "\\f"}


class IncrementalJson:
    """A checker of one JSON value. ``done``: the value is complete. ``failed``: it is invalid.
    ``has_member``: an object in it has a key and the colon after it.

    Line breaks and other control characters inside a string, which JSON forbids and models write,
    come out escaped. A top-level number or word is complete only with the character after it.
    """

    __slots__ = (
        "_closers", "_escape", "_in_string", "_out", "_state", "_word", "done", "failed", "has_member",
    )  # fmt: skip

    def __init__(self) -> None:
        self.done = self.failed = self.has_member = False
        self._closers: list[str] = []
        self._state = "value"  # or: first key, key, colon, first item, next
        self._in_string = False
        self._escape = ""
        self._word: list[str] = []
        self._out: list[str] = []

    @property
    def pending(self) -> str:
        """What was read and not returned: an incomplete number, word or escape."""
        return self._escape or "".join(self._word)

    def pop_output(self) -> str:
        """Return the valid output since the last call."""
        out, self._out = self._out, []
        return "".join(out)

    def close(self) -> str:
        """The text has ended: return the last output, with ``pending`` if it may begin a value."""
        word = "".join(self._word)
        if not word or _is_prefix(word):
            self._out.append(self.pending)
            self._word.clear()
            self._escape = ""
        return self.pop_output()

    def feed(self, text: str, pos: int = 0) -> int:
        """Read on from ``text[pos]``. Return where reading stopped: at the end of the text, after
        the value, or at the first invalid character."""
        size, out = len(text), self._out
        while pos < size and not (self.done or self.failed):
            if not self._in_string:
                pos = (self._read_word if self._word else self._read_structure)(text, pos)
            elif self._escape:
                pos = self._read_escape(text, pos)
            elif (match := _special.search(text, pos)) is None:
                out.append(text[pos:] if pos else text)
                return size
            else:
                pos = self._read_special(text, pos, match.start())
        return pos

    def _read_special(self, text: str, pos: int, end: int) -> int:
        """Read a string up to the character at ``end``, which ends it, begins an escape, or needs one."""
        char = text[end]
        if end > pos:
            self._out.append(text[pos:end])
        if char == "\\":
            self._escape = char
        elif char == '"':
            self._out.append(char)
            self._in_string = False
            self._end_value()
        else:
            self._out.append(CONTROLS.get(char) or f"\\u{ord(char):04x}")
        return end + 1

    def _read_escape(self, text: str, pos: int) -> int:
        char = text[pos]
        if len(self._escape) == 1:
            if char not in ESCAPES and char != "u":
                self.failed = True
                return pos
        elif char not in HEX:
            self.failed = True
            return pos
        self._escape += char
        if self._escape[1] != "u" or len(self._escape) == 6:
            self._out.append(self._escape)
            self._escape = ""
        return pos + 1

    def _read_word(self, text: str, pos: int) -> int:
        end = _end(_word, text, pos)
        self._word.append(text[pos:end])
        if end < len(text):
            word = "".join(self._word)
            if word in WORDS or _number.fullmatch(word):
                self._word.clear()
                self._out.append(word)
                self._end_value()
            else:
                self.failed = True
        return end

    def _read_structure(self, text: str, pos: int) -> int:
        char, state = text[pos], self._state
        if char in BLANKS:
            end = _end(_blank, text, pos)
            self._out.append(text[pos:end])
            return end
        if char == '"' and state not in ("colon", "next"):
            self._in_string = True
            if state in ("key", "first key"):
                self._state = "colon"
        elif char == ":" and state == "colon":
            self._state, self.has_member = "value", True
        elif char == "," and state == "next":
            self._state = "key" if self._closers[-1] == "}" else "value"
        elif self._closers and char == self._closers[-1] and state.startswith(("first", "next")):
            self._closers.pop()
            self._end_value()
        elif char in "{[" and state in ("value", "first item"):
            self._closers.append("}" if char == "{" else "]")
            self._state = "first key" if char == "{" else "first item"
        elif state in ("value", "first item") and (char in "-tfn" or char in "0123456789"):
            self._word.append(char)
            return pos + 1
        else:
            self.failed = True
            return pos
        self._out.append(char)
        return pos + 1

    def _end_value(self) -> None:
        """Note that a value or a key is complete."""
        if self._state == "colon":
            return
        self._state = "next"
        self.done = not self._closers


def _is_prefix(word: str) -> bool:
    return _number_prefix.fullmatch(word) is not None or any(w.startswith(word) for w in WORDS)


def _end(pattern: re.Pattern[str], text: str, pos: int) -> int:
    match = pattern.match(text, pos)
    return pos if match is None else match.end()
