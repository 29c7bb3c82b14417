"""What no grammar can hold, checked as a value closes: ``uniqueItems``, ``contains``, and the format ``regex``."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from treadle_structured_output_kit.apart import conjuncts, property_schemas, types_left
from treadle_structured_output_kit.array_items import ArrayItems, NextItem, Wanted, first_type
from treadle_structured_output_kit.drafts import map_children
from treadle_structured_output_kit.json_schema import subschemas
from treadle_structured_output_kit.listed_values import are_many, listed_values
from treadle_structured_output_kit.negation import Negation
from treadle_structured_output_kit.plain_values import unreadable

__all__ = ("ValueChecks", "ValueState", "needs_checks", "without_checks")

# Where it depends on other values, or on other parts of the schema, whether a check applies.
CONDITIONAL = ("contains", "else", "if", "not", "oneOf", "patternProperties", "propertyNames", "then",
       "additionalItems", "dependentSchemas", "unevaluatedItems", "unevaluatedProperties")  # fmt: skip
BLANKS = b" \t\r\n"
MAX_DOMAINS = 1024


@dataclass(frozen=True, slots=True)
class _Frame:
    """An array or an object that is open; ``schemas`` all apply to it.

    ``items`` is what its items must be, if an array has checks, and ``next`` what the one that is open, or comes
    next, may be. ``count`` is how many are closed.
    """

    is_array: bool
    schemas: list[Any]
    start: int
    items: ArrayItems | None = None
    next: NextItem | None = None
    count: int = 0
    key: str | None = None


@dataclass(frozen=True, slots=True)
class ValueState:
    """Where a text is. ``schemas`` are those of the text or number that is open."""

    stack: tuple[_Frame, ...] = ()
    mode: str = "value"  # value, key, string, name, scalar, after
    start: int = 0
    schemas: tuple[Any, ...] = ()
    is_escaped: bool = False

    @property
    def is_checked(self) -> bool:
        """Whether the next token may close a value that is checked."""
        return any(frame.items is not None for frame in self.stack) or any(
            map(_has_regex, self.schemas)
        )

    @property
    def is_followed(self) -> bool:
        """Whether an item is checked while it is open."""
        return any(frame.next is not None and not frame.next.is_free for frame in self.stack)

    @property
    def is_unique(self) -> bool:
        """Whether an item is open, or comes next, that must not be there yet, and no list says which are left."""
        frame = self.stack[-1] if self.stack else None
        return (
            self.mode in ("string", "scalar", "value")
            and frame is not None
            and frame.items is not None
            and frame.items.is_unique
            and bool(frame.items.seen)
            and (frame.next is None or frame.next.listed is None)
            and not (self.mode == "value" and frame.items.is_plentiful)
        )

    @property
    def is_plain(self) -> bool:
        """Whether bytes of a text, but for quotes and backslashes, change nothing."""
        return self.mode in ("string", "name") and not self.is_escaped and not self.is_followed

    @property
    def seen(self) -> list[bytes]:
        """The texts of the items that the open one must not equal."""
        items = self.stack[-1].items if self.stack else None
        return [] if items is None else [t.encode("utf-8", "surrogatepass") for t in items.seen]


def needs_checks(schema: Any) -> bool:
    return any(_is_check(part) for _, part in subschemas(schema))


def without_checks(schema: Any) -> Any:
    """``schema`` as far as a grammar holds it."""
    if not isinstance(schema, Mapping):
        return schema
    gone = {"contains", "maxContains", "minContains", "uniqueItems"} | (
        {"format"} if _has_regex(schema) else set()
    )
    kept = {name: value for name, value in schema.items() if name not in gone}
    return map_children(kept, without_checks)


class ValueChecks:
    """The checks of one schema. Raises ``ValueError`` if it cannot be told where they apply."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._resolve = Negation(root).resolve
        self._domains: dict[tuple[int, ...], tuple[Any, ...] | None] = {}
        for path, schema in subschemas(root):
            if isinstance(schema, Mapping) and (name := self._unclear(schema)):
                raise ValueError(
                    f"uniqueItems, contains or the format regex inside {name} at {path}"
                )
            if isinstance(schema, Mapping) and "contains" in schema:
                reason = unreadable(schema["contains"])
                if reason is not None:
                    raise ValueError(f"contains with {reason} at {path}")

    def advance(self, state: ValueState, text: bytearray, pos: int) -> ValueState | None:
        """The state after the byte ``text[pos]``, the last of ``text``; ``None`` if no text goes on so.

        Raises ``ValueError`` or ``IndexError`` for a text that is no JSON.
        """
        current = self._read(state, text, pos)
        return current and _followed(current, text, pos + 1)

    def _read(self, state: ValueState, text: bytearray, pos: int) -> ValueState | None:
        byte = text[pos]
        if state.mode in ("string", "name"):
            if state.is_escaped or byte == ord("\\"):
                return replace(state, is_escaped=not state.is_escaped)
            if byte != ord('"'):
                return state
            if state.mode == "string":
                return self._closed(state, text, pos + 1)
            frame = replace(state.stack[-1], key=json.loads(text[state.start : pos + 1]))
            return ValueState((*state.stack[:-1], frame), "after")
        if state.mode == "scalar":
            if chr(byte).isalnum() or byte in b"+-.":
                return state
            closed = self._closed(state, text, pos)
            return closed and self._read(closed, text, pos)
        if byte in BLANKS:
            return state
        if byte in b"]}":
            items = state.stack[-1].items
            if items is not None and not items.is_complete:
                return None
            outer = replace(state, stack=state.stack[:-1], start=state.stack[-1].start, schemas=())
            return self._closed(outer, text, pos + 1)
        if byte == ord(",") or byte == ord(":"):
            return _separated(state, is_comma=byte == ord(","))
        if state.mode == "key":
            return ValueState(state.stack, "name", pos)
        return self._begin_value(state, chr(byte), pos)

    def _begin_value(self, state: ValueState, first: str, pos: int) -> ValueState | None:
        parent = state.stack[-1] if state.stack else None
        if parent is not None and parent.items is not None and parent.next is None:
            return None  # no item may come
        schemas = self._of_value(state.stack, first_type(first))
        if first in "[{":
            frame = _Frame(first == "[", schemas, pos)
            if first == "[" and (items := self._items(schemas)).has_checks:
                frame = replace(frame, items=items)
                frame = _expecting(frame) or frame
            return ValueState((*state.stack, frame), "value" if first == "[" else "key")
        return ValueState(state.stack, "string" if first == '"' else "scalar", pos, tuple(schemas))

    def _items(self, schemas: list[Any]) -> ArrayItems:
        """What the items of an array must be to which ``schemas`` apply."""

        def domain(index: int) -> tuple[Any, ...] | None:
            return self._listed([_item(part, index) for part in schemas])

        limits = [part["maxItems"] for part in schemas if "maxItems" in part]
        limits += [len(_first(part)) for part in schemas if _is_closed(part)]
        return ArrayItems(
            domain,
            any(map(_is_unique, schemas)),
            tuple(_wanted(part) for part in schemas if "contains" in part),
            max((part["minItems"] for part in schemas if "minItems" in part), default=0),
            min(limits, default=math.inf),
            max((len(_first(part)) for part in schemas), default=0),
            are_many([_item(part, sys.maxsize) for part in schemas], self._resolve),
        )

    def _listed(self, parts: list[Any]) -> tuple[Any, ...] | None:
        key = tuple(map(id, parts))  # parts of the schema, which stays
        if key not in self._domains:
            if len(self._domains) > MAX_DOMAINS:
                self._domains.clear()
            self._domains[key] = listed_values(parts, self._resolve)
        return self._domains[key]

    def _of_value(self, stack: tuple[_Frame, ...], kind: str) -> list[Any]:
        """The schemas of the value that begins here."""
        pending = [self._root]
        if stack and stack[-1].is_array:
            pending = [_item(part, stack[-1].count) for part in stack[-1].schemas]
        elif stack:
            pending = property_schemas(stack[-1].schemas, str(stack[-1].key))
        found: list[Any] = []
        while pending:
            parts = conjuncts(pending, self._resolve)
            found += [part for part in parts if isinstance(part, Mapping)]
            options = [
                part["anyOf"] for part in parts if isinstance(part, Mapping) and "anyOf" in part
            ]
            left = [[o for o in some if kind in types_left([o], self._resolve)] for some in options]
            pending = [some[0] for some in left if len(some) == 1]
        return found

    def _closed(self, state: ValueState, text: bytearray, end: int) -> ValueState | None:
        """A value has ended: its checks, and that of the array that it belongs to."""
        if any(map(_has_regex, state.schemas)):
            try:
                re.compile(json.loads(text[state.start : end]))
            except (re.error, OverflowError, RecursionError):
                return None
        if not state.stack or not state.stack[-1].is_array:
            return ValueState(state.stack, "after")
        frame = state.stack[-1]
        frame = replace(frame, count=frame.count + 1, next=None)
        if frame.items is not None:
            items = frame.items.after(json.loads(text[state.start : end]))
            if items is None:
                return None
            frame = replace(frame, items=items)
        return ValueState((*state.stack[:-1], frame), "after")

    def _unclear(self, schema: Mapping[str, Any]) -> str | None:
        """The keyword of ``schema`` that decides whether a check inside it applies."""
        for name in CONDITIONAL:
            parts = schema.get(name)
            if isinstance(parts, Mapping) and name in ("patternProperties", "dependentSchemas"):
                parts = list(parts.values())
            if self._has_check(parts):
                return name
        options = schema.get("anyOf", [])
        types = [types_left([option], self._resolve) for option in options]
        is_shared = any(a & b for i, a in enumerate(types) for b in types[:i])
        if is_shared and self._has_check(options):
            return "anyOf"
        if schema.get("patternProperties") and self._has_check(schema.get("additionalProperties")):
            return "additionalProperties"
        return None

    def _has_check(self, schemas: Any) -> bool:
        """Whether there is a check in ``schemas`` or in what they refer to."""
        pending, seen = list(schemas) if isinstance(schemas, list) else [schemas], set()
        while pending:
            for _, part in subschemas(pending.pop()):
                if _is_check(part):
                    return True
                ref = part.get("$ref") if isinstance(part, Mapping) else None
                if ref is not None and ref not in seen:
                    seen.add(ref)
                    try:
                        pending.append(self._resolve(ref))
                    except LookupError:
                        return True  # it cannot be told
        return False


def _wanted(schema: Mapping[str, Any]) -> Wanted:
    least, most = schema.get("minContains", 1), schema.get("maxContains", math.inf)
    return Wanted(schema["contains"], least, most)


def _separated(state: ValueState, *, is_comma: bool) -> ValueState | None:
    """Return the state behind a comma or a colon, ``None`` if an array can have no further item."""
    frame: _Frame | None = state.stack[-1]
    if not is_comma or not state.stack[-1].is_array:
        return replace(state, mode="key" if is_comma else "value")
    if state.stack[-1].items is not None:
        frame = _expecting(state.stack[-1])
    return None if frame is None else replace(state, mode="value", stack=(*state.stack[:-1], frame))


def _expecting(frame: _Frame) -> _Frame | None:
    """Return an array before its next item, ``None`` if there can be none."""
    found = None if frame.items is None else frame.items.next_item()
    if found is None:
        return None
    if not found.is_free and found.listed is None:
        schemas = tuple(_item(part, frame.count) for part in frame.schemas)
        found = replace(found, schemas=schemas)
    return replace(frame, next=found)


def _followed(state: ValueState, text: bytearray, end: int) -> ValueState | None:
    """Narrow what the open items may become, ``None`` if one of them can become nothing."""
    if not state.is_followed:
        return state
    starts = [frame.start for frame in state.stack[1:]]
    if state.mode in ("string", "scalar"):
        starts.append(state.start)
    frames = list(state.stack)
    for index, start in enumerate(starts):
        frame = frames[index]
        if frame.next is None or frame.next.is_free:
            continue
        left = frame.next.begun(bytes(text[start:end]))
        if left is None:
            return None
        frames[index] = replace(frame, next=left)
    return replace(state, stack=tuple(frames))


def _first(part: Any) -> list[Any]:
    """The schemas of the first items, each of its own."""
    items = part.get("items") if isinstance(part, Mapping) else None
    first = items if isinstance(items, list) else part.get("prefixItems", [])
    return first if isinstance(first, list) else []


def _is_closed(part: Mapping[str, Any]) -> bool:
    """Whether no items follow the first ones."""
    items = part.get("items", True)
    return (part.get("additionalItems", True) if isinstance(items, list) else items) is False


def _item(part: Any, index: int) -> Any:
    """What ``part`` says of the item at ``index``."""
    if not isinstance(part, Mapping):
        return True
    items = part.get("items", True)
    first = items if isinstance(items, list) else part.get("prefixItems", [])
    if index < len(first):
        return first[index]
    return part.get("additionalItems", True) if isinstance(items, list) else items


def _is_unique(schema: Mapping[str, Any]) -> bool:
    return schema.get("uniqueItems") is True


def _has_regex(schema: Mapping[str, Any]) -> bool:
    return schema.get("format") == "regex"


def _is_check(schema: Any) -> bool:
    return isinstance(schema, Mapping) and (
        _is_unique(schema)
        or _has_regex(schema)
        or not schema.keys().isdisjoint(("contains", "maxContains", "minContains"))
    )
