"""All values that a schema leaves, if they are few, and whether a text may still become one of them."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from treadle_structured_output_kit.apart import Resolver, conjuncts
from treadle_structured_output_kit.json_schema import ASSERTIONS
from treadle_structured_output_kit.plain_values import canonical, matches, unreadable

__all__ = ("are_many", "begins", "listed_values")

MAX_VALUES = 256
MAX_DEPTH = 6
BLANKS = b" \t\r\n"
DESCRIBED = frozenset({"$comment", "$defs", "$id", "$schema", "default", "definitions", "description",
       "examples", "title"})  # fmt: skip


def listed_values(
    schemas: Sequence[Any], resolve: Resolver, depth: int = 0
) -> tuple[Any, ...] | None:
    """Return the values that match all of ``schemas``, and perhaps some more; ``None`` if they are too many."""
    parts = conjuncts(schemas, resolve)
    lists = [found for part in parts if (found := _listed(part, resolve, depth)) is not None]
    if not lists:
        return None
    readable = [part for part in parts if unreadable(part) is None]
    values = {
        canonical(value): value
        for value in min(lists, key=len)
        if all(matches(part, value) for part in readable)
    }
    return tuple(values.values())


def are_many(schemas: Sequence[Any], resolve: Resolver) -> bool:
    """Whether it is plain to see that so many values match all of ``schemas`` that they never run out."""
    parts = [part for part in conjuncts(schemas, resolve) if part is not True and part != {}]
    if any(part is False for part in parts):
        return False
    rules = [{k: part[k] for k in part.keys() & (ASSERTIONS - {"$ref", "allOf"})} for part in parts]
    rules = [part for part in rules if part]
    names = [part.get("type") for part in rules]
    if not rules or names == ["number"] or names == ["integer"]:
        return not rules or set(rules[0]) == {"type"}
    free = {"type", "minLength", "maxLength"}
    return names == ["string"] and set(rules[0]) <= free and rules[0].get("maxLength", 99) >= 8


def _listed(part: Any, resolve: Resolver, depth: int) -> list[Any] | None:
    if part is False:
        return []
    if not isinstance(part, Mapping) or depth > MAX_DEPTH:
        return None
    values = [part["const"]] if "const" in part else part.get("enum")
    if isinstance(values, list):
        return values if len(values) <= MAX_VALUES else None
    options = part.get("anyOf")
    if isinstance(options, list):
        return _joined([listed_values([option], resolve, depth + 1) for option in options])
    types = part.get("type")
    names = [types] if isinstance(types, str) else types
    if not isinstance(names, list):
        return None
    return _joined([_of_type(name, part, resolve, depth) for name in names])


def _joined(lists: Sequence[Sequence[Any] | None]) -> list[Any] | None:
    known = [values for values in lists if values is not None]
    if len(known) < len(lists) or sum(map(len, known)) > MAX_VALUES:
        return None
    return [value for values in known for value in values]


def _of_type(
    name: Any, part: Mapping[str, Any], resolve: Resolver, depth: int
) -> Sequence[Any] | None:
    match name:
        case "null":
            return [None]
        case "boolean":
            return [False, True]
        case "integer":
            return _integers(part)
        case "object":
            return _objects(part, resolve, depth)
        case "array":
            return _arrays(part, resolve, depth)
    return None


def _integers(part: Mapping[str, Any]) -> Sequence[int] | None:
    least = max(part.get("minimum", -math.inf), part.get("exclusiveMinimum", -math.inf))
    most = min(part.get("maximum", math.inf), part.get("exclusiveMaximum", math.inf))
    if not most - least <= MAX_VALUES:
        return None
    first = math.floor(least) + 1 if part.get("exclusiveMinimum") == least else math.ceil(least)
    last = math.ceil(most) - 1 if part.get("exclusiveMaximum") == most else math.floor(most)
    return range(first, last + 1)


def _objects(part: Mapping[str, Any], resolve: Resolver, depth: int) -> list[Any] | None:
    properties, required = part.get("properties", {}), part.get("required", [])
    known = {"type", "properties", "required", "additionalProperties"} | DESCRIBED
    if part.get("additionalProperties") is not False or not part.keys() <= known:
        return None
    if not set(required) <= properties.keys():
        return []
    members: list[list[tuple[str, Any] | None]] = []
    for key, schema in properties.items():
        values = listed_values([schema], resolve, depth + 1)
        if values is None:
            return None
        absent: list[tuple[str, Any] | None] = [] if key in required else [None]
        members.append(absent + [(key, value) for value in values])
    if math.prod(map(len, members)) > MAX_VALUES:
        return None
    return [dict(m for m in chosen if m is not None) for chosen in itertools.product(*members)]


def _arrays(part: Mapping[str, Any], resolve: Resolver, depth: int) -> list[Any] | None:
    most = part.get("maxItems", math.inf)
    items = part.get("items", True)
    if isinstance(items, list) or "prefixItems" in part or most > MAX_VALUES:
        return None
    values = listed_values([items], resolve, depth + 1)
    if values is None:
        return None
    sizes = range(int(part.get("minItems", 0)), int(most) + 1)
    if sum(len(values) ** size for size in sizes) > MAX_VALUES:
        return None
    return [list(chosen) for size in sizes for chosen in itertools.product(values, repeat=size)]


# ---------------------------------------------------------------------------------- texts


class _Over(Exception):
    """The text ends before the value does: it may become it."""


def begins(text: bytes, value: Any) -> bool:
    """Whether a JSON text of ``value`` may begin with ``text``, whatever blanks are in it."""
    try:
        end = _follow(text, 0, value)
    except _Over:
        return True
    return end is not None and not text[end:].strip(BLANKS)


def _follow(text: bytes, pos: int, value: Any) -> int | None:
    """Return the position behind ``value``, ``None`` if something else stands at ``pos``."""
    pos = _skip(text, pos)
    match value:
        case float() if "e" in repr(value):
            raise _Over  # it has several spellings
        case list():
            return _follow_list(text, pos, value)
        case dict():
            return _follow_object(text, pos, value)
    return _follow_text(text, pos, json.dumps(value, ensure_ascii=False).encode())


def _follow_text(text: bytes, pos: int, wanted: bytes) -> int | None:
    found = text[pos : pos + len(wanted)]
    if found == wanted:
        return pos + len(wanted)
    if pos + len(found) == len(text) and wanted.startswith(found):
        raise _Over
    return None


def _follow_list(text: bytes, pos: int, values: list[Any]) -> int | None:
    after: int | None = _follow_text(text, pos, b"[")
    for index, value in enumerate(values):
        if after is not None and index:
            after = _follow_text(text, _skip(text, after), b",")
        if after is not None:
            after = _follow(text, after, value)
    return None if after is None else _follow_text(text, _skip(text, after), b"]")


def _follow_object(text: bytes, pos: int, value: dict[str, Any]) -> int | None:
    """Follow an object, whose keys may come in any order."""
    after = _follow_text(text, pos, b"{")
    left = dict(value)
    while left and after is not None:
        if len(left) < len(value):
            after = _follow_text(text, _skip(text, after), b",")
            if after is None:
                return None
        start = _skip(text, after)
        keys = {key: json.dumps(key, ensure_ascii=False).encode() for key in left}
        rest = text[start:]
        key = next((key for key, name in keys.items() if rest.startswith(name)), None)
        if key is None:
            if any(name.startswith(rest) for name in keys.values()):
                raise _Over
            return None
        after = _follow_text(text, _skip(text, start + len(keys[key])), b":")
        if after is not None:
            after = _follow(text, after, left.pop(key))
    return None if after is None else _follow_text(text, _skip(text, after), b"}")


def _skip(text: bytes, pos: int) -> int:
    while pos < len(text) and text[pos] in BLANKS:
        pos += 1
    if pos == len(text):
        raise _Over
    return pos
