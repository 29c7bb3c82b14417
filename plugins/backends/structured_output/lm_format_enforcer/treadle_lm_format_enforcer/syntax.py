"""The syntax of JSON, one character at a time.

The library's parsers know the schema, but let some texts pass that are no JSON: a comma before a
closing brace, ``1.e5``. This one stands beside them and has a veto. It also forbids what the
library counts wrongly: exponents (in an integer they make a fraction), ``-0.`` (likewise),
``\\u`` escapes and a space at the start of a string (which do not count in its length).
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ("START", "Syntax")

WHITESPACE = " \t\n\r"
LITERALS = {"t": "rue", "f": "alse", "n": "ull"}
# Modes that expect a value, and those in which a number may end.
VALUE, FIRST_VALUE, KEY, FIRST_KEY, COLON, AFTER = "v", "[", "k", "{", ":", ","
STRING_START, STRING, ESCAPE = "s", "S", "\\"
MINUS, MINUS_ZERO, ZERO, DIGITS, POINT, FRACTION = "-", "o", "0", "1", ".", "f"
NUMBERS = (MINUS_ZERO, ZERO, DIGITS, FRACTION)


@dataclass(frozen=True, slots=True)
class Syntax:
    """Where in a JSON text one is. ``open`` holds the brackets that are open."""

    open: str = ""
    mode: str = VALUE
    literal: str = ""
    """What is left of true, false or null."""
    key: bool = False
    """Whether the string is the name of a property."""

    @property
    def done(self) -> bool:
        """Whether the text is complete."""
        return not self.open and not self.literal and self.mode in (AFTER, *NUMBERS)

    @property
    def in_string(self) -> bool:
        return self.mode in (STRING, STRING_START)

    def step(self, char: str) -> Syntax | None:
        """After ``char``; ``None`` if it must not come here."""
        if self.literal:
            return self._literal(char)
        match self.mode:
            case "s" | "S" | "\\":
                return self._string(char)
            case "-" | "o" | "0" | "1" | "." | "f":
                return self._number(char)
        if char in WHITESPACE:
            # Behind a whole text nothing may come, or it would never end.
            return None if self.mode == AFTER and not self.open else self
        return self._structure(char)

    def _structure(self, char: str) -> Syntax | None:
        mode = self.mode
        if mode == COLON:
            return Syntax(self.open, VALUE) if char == ":" else None
        if mode == AFTER:
            if char == "," and self.open:
                return Syntax(self.open, KEY if self.open[-1] == "{" else VALUE)
            return self._closed(char)
        if mode in (KEY, FIRST_KEY):
            if char == '"':
                return Syntax(self.open, STRING_START, key=True)
            return self._closed(char) if mode == FIRST_KEY else None
        if mode == FIRST_VALUE and char == "]":
            return self._closed(char)
        return self._value(char)

    def _value(self, char: str) -> Syntax | None:
        if char == '"':
            return Syntax(self.open, STRING_START)
        if char in "{[":
            return Syntax(self.open + char, char)
        if char in LITERALS:
            return Syntax(self.open, AFTER, LITERALS[char])
        if char == "-":
            return Syntax(self.open, MINUS)
        if "0" <= char <= "9":
            return Syntax(self.open, ZERO if char == "0" else DIGITS)
        return None

    def _closed(self, char: str) -> Syntax | None:
        if self.open and char == ("}" if self.open[-1] == "{" else "]"):
            return Syntax(self.open[:-1], AFTER)
        return None

    def _literal(self, char: str) -> Syntax | None:
        return Syntax(self.open, AFTER, self.literal[1:]) if char == self.literal[0] else None

    def _string(self, char: str) -> Syntax | None:
        if self.mode == ESCAPE:
            return Syntax(self.open, STRING, key=self.key) if char in '"\\/bfnrt' else None
        if char == '"':
            return Syntax(self.open, COLON if self.key else AFTER)
        if char == "\\":
            return Syntax(self.open, ESCAPE, key=self.key)
        if char < " " or (char == " " and self.mode == STRING_START):
            return None
        return self if self.mode == STRING else Syntax(self.open, STRING, key=self.key)

    def _number(self, char: str) -> Syntax | None:
        mode, digit = self.mode, "0" <= char <= "9"
        if mode == MINUS:
            return Syntax(self.open, MINUS_ZERO if char == "0" else DIGITS) if digit else None
        if mode in (POINT, FRACTION):
            if digit:
                return Syntax(self.open, FRACTION)
        elif mode == DIGITS and digit:
            return self
        elif mode in (ZERO, DIGITS) and char == ".":
            return Syntax(self.open, POINT)
        return None if mode == POINT else Syntax(self.open, AFTER).step(char)


START = Syntax()
