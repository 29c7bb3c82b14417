"""Tool calls written as JSON objects, read while they arrive."""

from __future__ import annotations

import json
from collections.abc import Callable

from treadle.api.jsontext import BLANKS, JsonText
from treadle.api.parsers import Delta, ToolCallDelta

__all__ = ("CallReader", "is_name")

ARGUMENTS = ("arguments", "parameters")
LONGEST_NAME = 128


def is_name(name: str) -> bool:
    """Whether a function may be called so. Half a surrogate pair, for one, cannot be sent."""
    return 0 < len(name) <= LONGEST_NAME and name.isprintable()


class CallReader:
    """One call as a JSON object: ``{"name": "f", "arguments": {…}}``, with ``parameters`` for
    ``arguments`` as well, the keys in any order, other keys between them.

    ``begun`` once the name and the opening of the arguments are known: from then on the arguments
    stream as they come, and cannot be taken back. ``accepts`` may refuse a name; ``keys``, if
    given, are all keys that such an object may have. Arguments may be missing or ``null``, which
    means none, or a string of JSON, which is unpacked.
    """

    __slots__ = (
        "_accepts", "_arguments", "_expect", "_given", "_index", "_key", "_keys", "_kind",
        "_name", "_named", "_raw", "_text", "_value", "begun", "done", "failed",
    )  # fmt: skip

    def __init__(
        self,
        index: int,
        accepts: Callable[[str], bool] = is_name,
        keys: frozenset[str] | None = None,
    ) -> None:
        self._index, self._accepts, self._keys = index, accepts, keys
        self._expect = "{"  # then: first, key, strict key, colon, value, next
        self._value: JsonText | None = None
        self._kind = ""  # of the value: key, name, object, string, null, other
        self._key = ""
        self._text: list[str] = []
        self._name: str | None = None
        self._named = False  # the name was said
        self._arguments: list[str] = []
        self._given = False
        self._raw: list[str] = []
        self.begun = self.done = self.failed = False

    @property
    def rest(self) -> str:
        """What was read and no delta answers for; of a call that is ``done``, nothing."""
        streams = self.begun and self._kind == "object" and self._value is not None
        return "".join(self._raw) + (self._value.held if streams and self._value else "")

    def feed(self, text: str, at: int = 0) -> tuple[int, list[Delta]]:
        """Read on from ``text[at]``. Returns where reading stopped: at the end of the text, behind
        the call (``done``), or at the character that makes it none (``failed``)."""
        while at < len(text) and not self.done and not self.failed:
            at = self._inside(text, at) if self._value is not None else self._between(text, at)
        return at, self._said()

    def finish(self) -> list[Delta]:
        """The output has ended. Afterwards ``rest`` is what must come out as text."""
        if self.begun and self._kind == "object" and self._value is not None:
            self._arguments.append(self._value.cut())
        if self.begun and not "".join(self._raw).strip(BLANKS + "},"):
            self._raw.clear()
        return self._said()

    def _said(self) -> list[Delta]:
        if not self.begun or (self._named and not any(self._arguments)):
            return []
        name = None if self._named else self._name
        self._named = True
        text = "".join(self._arguments)
        self._arguments.clear()
        return [ToolCallDelta(self._index, name, text)]

    def _between(self, text: str, at: int) -> int:
        """Read blanks, a sign, or a character of a key that must be one of ``keys``."""
        char, expect = text[at], self._expect
        if expect == "strict key":
            self._key += char
            if all(not f'{key}"'.startswith(self._key) for key in self._keys or ()):
                self.failed = True
                return at
            if char == '"':
                self._key = self._key[:-1]
                self._expect = "colon"
        elif char in BLANKS:
            pass
        elif expect == "value":
            return self._begin_value(char, at)
        elif char == '"' and expect in ("first", "key"):
            if self._keys is None:
                self._value, self._kind = JsonText(), "key"
                return at
            self._expect, self._key = "strict key", ""
        elif char == "}" and expect in ("first", "next"):
            return self._close(at)
        elif (expect, char) in AFTER:
            self._expect = AFTER[expect, char]
        else:
            self.failed = True
            return at
        self._raw.append(char)
        return at + 1

    def _begin_value(self, char: str, at: int) -> int:
        kind = "other"
        if self._key == "name":
            kind = "name" if char == '"' and self._name is None else ""
        elif self._key in ARGUMENTS:
            kind = "" if self._given else {"{": "object", '"': "string", "n": "null"}.get(char, "")
        self.failed = not kind
        self._kind = kind
        if kind:
            self._value = JsonText()
        if kind == "object" and self._name is not None:
            self._begin()
        return at

    def _inside(self, text: str, at: int) -> int:
        value = self._value
        if value is None:
            return at
        end = value.feed(text, at)
        if self._kind == "object":
            self._arguments.append(value.take())
        else:
            self._text.append(value.take())
        if self._kind != "object" or not self.begun:
            self._raw.append(text[at:end])
        self.failed = value.failed
        if value.done:
            self._value = None
            self._expect = "colon" if self._kind == "key" else "next"
            self._complete("".join(self._text))
            self._text.clear()
        return end

    def _complete(self, text: str) -> None:
        """The value of the kind ``_kind`` is there."""
        if self._kind == "key":
            self._key = json.loads(text)
        elif self._kind == "name":
            self._name = json.loads(text)
            self.failed = not is_name(self._name or "") or not self._accepts(self._name or "")
            if self._given and not self.failed:
                self._begin()
        elif self._kind != "other":
            self._given = True
            if self._kind == "string":
                self._unpack(json.loads(text))
            elif self._kind == "null":
                self._arguments.append("{}")
            if self._name is not None and not self.failed and not self.begun:
                self._begin()

    def _unpack(self, text: str) -> None:
        inner = JsonText()
        text = text.strip(BLANKS)
        whole = text.startswith("{") and inner.feed(text) == len(text) and inner.done
        self._arguments.append(inner.take())
        # A delta holds no half of a surrogate pair: it could not be sent.
        self.failed = not whole or any("\ud800" <= char <= "\udfff" for char in text)

    def _close(self, at: int) -> int:
        if self._name is None:
            self.failed = True
            return at
        if not self._given:
            self._arguments.append("{}")
            self._begin()
        self.done = True
        self._raw.clear()
        return at + 1

    def _begin(self) -> None:
        self.begun = True
        self._raw.clear()


AFTER = {
    ("{", "{"): "first",
    ("colon", ":"): "value",
    ("next", ","): "key",
}
