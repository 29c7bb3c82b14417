"""What no grammar can hold, checked as a value closes: ``uniqueItems``, ``contains``, and the format ``regex``."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from treadle_structured_output_kit.apart import conjuncts, property_schemas, types_left
from treadle_structured_output_kit.drafts import map_children
from treadle_structured_output_kit.json_schema import subschemas
from treadle_structured_output_kit.negation import Negation
from treadle_structured_output_kit.plain_values import canonical, matches, unreadable

__all__ = ("ValueChecks", "ValueState", "needs_checks", "without_checks")

# Where it depends on other values, or on other parts of the schema, whether a check applies.
CONDITIONAL = ("contains", "else", "if", "not", "oneOf", "patternProperties", "propertyNames", "then",
       "additionalItems", "dependentSchemas", "unevaluatedItems", "unevaluatedProperties")  # fmt: skip
TYPE_OF_FIRST = {
    '"': "string",
    "{": "object",
    "[": "array",
    "t": "boolean",
    "f": "boolean",
    "n": "null",
}
BLANKS = b" \t\r\n"


@dataclass(frozen=True, slots=True)
class _Wanted:
    """A ``contains`` of an array: how many more items must match it, and how many may."""

    schema: Any
    least: float
    most: float

    def after(self, item: Any) -> _Wanted:
        if not matches(self.schema, item):
            return self
        return replace(self, least=self.least - 1, most=self.most - 1)


@dataclass(frozen=True, slots=True)
class _Frame:
    """An array or an object that is open; ``schemas`` all apply to it.

    ``wanted`` is what items it still needs, and ``max_items`` is how many it may have.
    """

    is_array: bool
    schemas: list[Any]
    start: int
    is_unique: bool
    wanted: tuple[_Wanted, ...] = ()
    max_items: float = math.inf
    seen: tuple[str, ...] = ()
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
        return any(f.is_unique or f.wanted for f in self.stack) or any(
            map(_has_regex, self.schemas)
        )


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
        for path, schema in subschemas(root):
            if isinstance(schema, Mapping) and (name := self._unclear(schema)):
                raise ValueError(
                    f"uniqueItems, contains or the format regex inside {name} at {path}"
                )
            if isinstance(schema, Mapping) and "contains" in schema:
                reason = unreadable(schema["contains"])
                if reason is not None:
                    raise ValueError(f"contains with {reason} at {path}")

    def advance(self, state: ValueState, text: bytearray, begin: int) -> ValueState | None:
        """The state after ``text[begin:]``; ``None`` if it closes a value that fails its check."""
        current: ValueState | None = state
        for pos in range(begin, len(text)):
            if current is None:
                return None
            current = self._read(current, text, pos)
        if current is None or not self._has_unused(current, text) or not _may_match(current, text):
            return None
        return current

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
            if any(wanted.least > 0 for wanted in state.stack[-1].wanted):
                return None
            outer = replace(state, stack=state.stack[:-1], start=state.stack[-1].start, schemas=())
            return self._closed(outer, text, pos + 1)
        if byte == ord(",") or byte == ord(":"):
            is_value = byte == ord(":") or state.stack[-1].is_array
            return replace(state, mode="value" if is_value else "key")
        if state.mode == "key":
            return ValueState(state.stack, "name", pos)
        return self._begin_value(state, chr(byte), pos)

    def _begin_value(self, state: ValueState, first: str, pos: int) -> ValueState:
        schemas = self._of_value(state.stack, TYPE_OF_FIRST.get(first, "number"))
        if first in "[{":
            is_unique = first == "[" and any(map(_is_unique, schemas))
            frame = _Frame(first == "[", schemas, pos, is_unique)
            if first == "[":
                wanted = tuple(_wanted(part) for part in schemas if "contains" in part)
                limits = [part["maxItems"] for part in schemas if "maxItems" in part]
                frame = replace(frame, wanted=wanted, max_items=min(limits, default=math.inf))
            return ValueState((*state.stack, frame), "value" if first == "[" else "key")
        return ValueState(state.stack, "string" if first == '"' else "scalar", pos, tuple(schemas))

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
        frame = replace(frame, count=frame.count + 1)
        if frame.is_unique:
            value = canonical(json.loads(text[state.start : end]))
            if value in frame.seen:
                return None
            frame = replace(frame, seen=(*frame.seen, value))
        if frame.wanted:
            item = json.loads(text[state.start : end])
            wanted = tuple(part.after(item) for part in frame.wanted)
            left = frame.max_items - frame.count
            if any(part.most < 0 or part.least > left for part in wanted):
                return None  # it is one too many, or not enough could follow it
            frame = replace(
                frame, wanted=tuple(p for p in wanted if p.least > 0 or p.most < math.inf)
            )
        return ValueState((*state.stack[:-1], frame), "after")

    def _has_unused(self, state: ValueState, text: bytearray) -> bool:
        """Whether what has begun can become one of the listed values that are not there yet."""
        if (
            state.mode not in ("string", "scalar")
            or not state.stack
            or not state.stack[-1].is_unique
        ):
            return True
        begun, seen = bytes(text[state.start :]), state.stack[-1].seen
        lists = [part["enum"] for part in state.schemas if isinstance(part.get("enum"), list)]
        return all(
            any(
                canonical(value) not in seen
                and json.dumps(value, ensure_ascii=False).encode().startswith(begun)
                for value in values
            )
            for values in lists
            if all(isinstance(value, str) and value.isalnum() for value in values)
        )

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


def _wanted(schema: Mapping[str, Any]) -> _Wanted:
    least, most = schema.get("minContains", 1), schema.get("maxContains", math.inf)
    return _Wanted(schema["contains"], least, most)


def _may_match(state: ValueState, text: bytearray) -> bool:
    """Whether the items that are open can become what their arrays still need: if there is room for no
    others, each must match."""
    begun = [bytes(text[frame.start : frame.start + 1]) for frame in state.stack[1:]]
    if state.mode in ("string", "scalar"):
        begun.append(bytes(text[state.start :]))
    return all(
        _can_become(wanted.schema, item)
        for frame, item in zip(state.stack, begun, strict=False)
        for wanted in frame.wanted
        if wanted.least > 0 and wanted.least >= frame.max_items - frame.count
    )


def _can_become(schema: Any, begun: bytes) -> bool:
    """Whether a value that begins with ``begun`` may match, as far as its type and listed values tell."""
    if not isinstance(schema, Mapping):
        return True
    kind = TYPE_OF_FIRST.get(chr(begun[0]), "number")
    types = schema.get("type", kind)
    if kind not in [
        {"integer": "number"}.get(x, x) for x in ([types] if isinstance(types, str) else types)
    ]:
        return False
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if not isinstance(values, list):
        return True
    texts = (json.dumps(value, ensure_ascii=False).encode() for value in values)
    return any(text.startswith(begun) for text in texts)


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
