"""The input of a custom tool, read from the arguments of the function that stands for it."""

from __future__ import annotations

import json
import re

__all__ = ("CustomInput",)

START = re.compile(r'\s*\{\s*"input"\s*:\s*"')
# Nothing follows that could fail, so that nothing is tried twice. Python 3.11.2 errs in possessive groups.
WHOLE_CHARACTERS = re.compile(r'(?:[^"\\]+|\\(?:[^u]|u[0-9a-fA-F]{4}))*')
HIGH_SURROGATE = re.compile(r"\\u[dD][89abAB][0-9a-fA-F]{2}\Z")


class CustomInput:
    """Turns pieces of ``{"input": "text"}`` into pieces of the text.

    Arguments of another form are the input as they stand, at the end.
    """

    def __init__(self) -> None:
        self._pending = ""
        self._begun = self._ended = False

    def feed(self, arguments: str) -> str:
        """Return the text that the next piece completes."""
        if self._ended:
            return ""
        self._pending += arguments
        if not self._begun:
            start = START.match(self._pending)
            if start is None:
                return ""
            self._begun, self._pending = True, self._pending[start.end() :]
        match = WHOLE_CHARACTERS.match(self._pending)
        text, rest = self._pending[: match.end()], self._pending[match.end() :]  # type: ignore[union-attr]
        self._ended = rest.startswith('"')
        if not self._ended and (half := HIGH_SURROGATE.search(text)):
            text, rest = text[: half.start()], text[half.start() :] + rest
        self._pending = rest
        return decode(text)

    def finish(self) -> str:
        """Return what was pending."""
        return "" if self._begun else self._pending


def decode(text: str) -> str:
    """Return the text that a piece of a JSON string means, without lone surrogates."""
    try:
        value: str = json.loads(f'"{text}"', strict=False)
    except ValueError:  # an escape that JSON does not have
        return text
    return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
