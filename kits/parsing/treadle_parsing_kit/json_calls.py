"""Tool calls written as JSON objects, read while they arrive."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import lru_cache

from treadle.api.parsers import Delta, ToolCallDelta
from treadle_parsing_kit.incremental_json import BLANKS, IncrementalJson

__all__ = ("ArgumentsReader", "JsonToolCallReader", "is_name")

ARGUMENTS = ("arguments", "parameters")
MAX_NAME_LEN = 128


def is_name(name: str) -> bool:
    """Return whether a function can have this name. Half a surrogate pair cannot be sent."""
    return 0 < len(name) <= MAX_NAME_LEN and name.isprintable()


class JsonToolCallReader:
    """A ``ToolCallReader`` of JSON objects: ``{"name": "f", "arguments": {…}}``.

    ``parameters`` means the same as ``arguments``. Keys may come in any order, with others between
    them. ``begun`` is set once the name and the first key of the arguments are known: from then on the
    arguments stream as they come, and cannot be taken back. Others are a call when the object is
    complete. ``accepts`` may refuse a name; ``keys``, if given, are all keys that such an object may
    have. Arguments may be ``null``, which means none, or a string of JSON, which is unpacked; an object
    without them is no call.
    """

    __slots__ = (
        "_accepts", "_arguments", "_expect", "_has_arguments", "_index", "_key", "_keys", "_kind",
        "_name", "_name_sent", "_raw", "_value", "begun", "done", "failed",
    )  # fmt: skip

    def __init__(
        self,
        index: int,
        accepts: Callable[[str], bool] = is_name,
        keys: frozenset[str] | None = None,
    ) -> None:
        self._index, self._accepts, self._keys = index, accepts, keys
        self._expect = "{"  # then: first, key, strict key, colon, value, next
        self._value: IncrementalJson | None = None
        self._kind = ""  # of the value: key, name, object, string, null, other
        self._key = ""
        self._name: str | None = None
        self._name_sent = False  # the name is in a delta
        self._arguments: list[str] = []
        self._has_arguments = False
        self._raw: list[str] = []
        self.begun = self.done = self.failed = False

    @property
    def rest(self) -> str:
        """What was read and is in no delta; empty if the call is ``done``."""
        streams = self.begun and self._kind == "object" and self._value is not None
        return "".join(self._raw) + (self._value.pending if streams and self._value else "")

    def feed(self, text: str, pos: int = 0) -> tuple[int, list[Delta]]:
        """Read on from ``text[pos]``. Return where reading stopped, and the deltas.

        Reading stops at the end of the text, after the call (``done``), or at the first character
        that cannot belong to a call (``failed``).
        """
        size, value = len(text), self._value
        if value is not None and self._name_sent and self._kind == "object":
            pos = value.feed(text, pos)
            if not (value.done or value.failed):
                output = value.pop_output()
                return pos, [ToolCallDelta(self._index, None, output)] if output else []
            pos = self._take_value(value, pos)
        while pos < size and not (self.done or self.failed):
            value = self._value
            if value is None:
                pos = self._read_between(text, pos)
            else:
                pos = self._read_value(value, text, pos)
        return pos, self._pop_deltas() if self.begun else []

    def finish(self) -> list[Delta]:
        """The output has ended. Return the last deltas; ``rest`` must come out as text."""
        if self.begun and self._kind == "object" and self._value is not None:
            self._arguments.append(self._value.close())
        if self.begun and not "".join(self._raw).strip(BLANKS + "},"):
            self._raw.clear()
        return self._pop_deltas()

    def _pop_deltas(self) -> list[Delta]:
        text = "".join(self._arguments)
        self._arguments.clear()
        if not self.begun or (self._name_sent and not text):
            self._arguments.append(text)
            return []
        name = None if self._name_sent else self._name
        self._name_sent = True
        return [ToolCallDelta(self._index, name, text)]

    def _read_between(self, text: str, pos: int) -> int:
        """Read whitespace, punctuation, or a character of a key that must be one of ``keys``."""
        char, expect = text[pos], self._expect
        if expect == "strict key":
            self._key += char
            if self._key not in _beginnings(self._keys or frozenset()):
                self.failed = True
                return pos
            if char == '"':
                self._key = self._key[:-1]
                self._expect = "colon"
        elif char in BLANKS:
            pass
        elif expect == "value":
            return self._begin_value(char, pos)
        elif char == '"' and expect in ("first", "key"):
            if self._keys is None:
                self._value, self._kind = IncrementalJson(), "key"
                return pos
            self._expect, self._key = "strict key", ""
        elif char == "}" and expect in ("first", "next"):
            return self._close(pos)
        elif (expect, char) in AFTER:
            self._expect = AFTER[expect, char]
        else:
            self.failed = True
            return pos
        self._raw.append(char)
        return pos + 1

    def _begin_value(self, char: str, pos: int) -> int:
        kind = "other"
        if self._key == "name":
            kind = "name" if char == '"' and self._name is None else ""
        elif self._key in ARGUMENTS:
            kind = (
                ""
                if self._has_arguments
                else {"{": "object", '"': "string", "n": "null"}.get(char, "")
            )
        self.failed = not kind
        self._kind = kind
        if kind:
            self._value = IncrementalJson()
        return pos

    def _read_value(self, value: IncrementalJson, text: str, pos: int) -> int:
        end = value.feed(text, pos)
        if self._kind != "object" or not self.begun:
            self._raw.append(text[pos:end])
        return self._take_value(value, end)

    def _take_value(self, value: IncrementalJson, end: int) -> int:
        self.failed = value.failed
        if self._kind == "object":
            self._arguments.append(value.pop_output())
            if not self.begun and self._name is not None and value.has_member:
                self._begin()
        if value.done:
            self._value = None
            self._expect = "colon" if self._kind == "key" else "next"
            self._complete(value.pop_output())
        return end

    def _complete(self, text: str) -> None:
        """Take the complete value, which has the kind ``_kind``."""
        if self._kind == "key":
            self._key = json.loads(text)
        elif self._kind == "name":
            self._name = json.loads(text)
            self.failed = not is_name(self._name or "") or not self._accepts(self._name or "")
        elif self._kind != "other":
            self._has_arguments = True
            if self._kind == "string":
                self._unpack(json.loads(text))
            elif self._kind == "null":
                self._arguments.append("{}")

    def _unpack(self, text: str) -> None:
        reader = IncrementalJson()
        text = text.strip(BLANKS)
        is_complete = text.startswith("{") and reader.feed(text) == len(text) and reader.done
        self._arguments.append(reader.pop_output())
        # A delta holds no half of a surrogate pair: it could not be sent.
        self.failed = not is_complete or any("\ud800" <= char <= "\udfff" for char in text)

    def _close(self, pos: int) -> int:
        if self._name is None or not self._has_arguments:
            self.failed = True
            return pos
        self.begun = self.done = True
        self._raw.clear()
        return pos + 1

    def _begin(self) -> None:
        self.begun = True
        self._raw.clear()


@lru_cache(maxsize=64)
def _beginnings(keys: frozenset[str]) -> frozenset[str]:
    """Return everything that one of ``keys`` with its quote begins with."""
    return frozenset(f'{key}"'[:end] for key in keys for end in range(len(key) + 2))


AFTER = {
    ("{", "{"): "first",
    ("colon", ":"): "value",
    ("next", ","): "key",
}


class ArgumentsReader:
    """A ``ToolCallReader`` of the arguments of a call whose name stands before them."""

    __slots__ = ("_index", "_name", "_raw", "_value", "begun", "done", "failed")

    def __init__(self, index: int, name: str) -> None:
        self._index = index
        self._name: str | None = name
        self._raw: list[str] = []
        self._value = IncrementalJson()
        self.begun = self.done = self.failed = False

    @property
    def rest(self) -> str:
        return self._value.pending if self.begun else "".join(self._raw)

    def feed(self, text: str, pos: int = 0) -> tuple[int, list[Delta]]:
        end = self._value.feed(text, pos)
        self.done, self.failed = self._value.done, self._value.failed
        self.begun = self.begun or self.done or self._value.has_member
        if not self.begun:
            self._raw.append(text[pos:end])
        return end, self._pop_deltas()

    def finish(self) -> list[Delta]:
        if not self.begun:
            return []
        closing = self._value.close()
        return self._pop_deltas(closing)

    def _pop_deltas(self, closing: str = "") -> list[Delta]:
        if not self.begun or not (text := self._value.pop_output() + closing):
            return []
        name, self._name = self._name, None
        return [ToolCallDelta(self._index, name, text)]
