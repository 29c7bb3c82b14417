"""Whether two schemas exclude each other, as far as it can be seen from types, values and properties."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from treadle_structured_output_kit.json_schema import types_of

__all__ = ("Apart", "conjuncts", "property_schemas", "types_left")

MAX_DEPTH = 8
MAX_STEPS = 20_000
ALL_TYPES = frozenset({"null", "boolean", "number", "string", "array", "object"})
Resolver = Callable[[object], Any]


class Apart:
    """Tells whether schemas exclude each other. ``resolve`` returns what a reference names, and
    raises ``LookupError`` if it cannot say."""

    def __init__(self, resolve: Resolver) -> None:
        self._resolve = resolve
        self._steps = MAX_STEPS

    def __call__(self, first: Sequence[Any], second: Sequence[Any], depth: int = 0) -> bool:
        """Whether no value matches all of ``first`` and all of ``second``; ``False`` if that is not
        seen."""
        self._steps -= 1
        if depth > MAX_DEPTH or self._steps < 0:
            return False
        left, right = conjuncts(first, self._resolve), conjuncts(second, self._resolve)
        if any(part is False for part in (*left, *right)):
            return True
        types = _types(left) & _types(right)
        if not types or _values_differ(left, right):
            return True
        if self._no_option(left, right, depth) or self._no_option(right, left, depth):
            return True
        if types == {"object"}:
            return any(
                self(property_schemas(left, name), property_schemas(right, name), depth + 1)
                for name in sorted(_required(left) | _required(right))
            )
        if types == {"array"} and any(_at_least_one(part) for part in (*left, *right)):
            return self(_items(left), _items(right), depth + 1)
        return False

    def _no_option(self, parts: list[Any], others: list[Any], depth: int) -> bool:
        """Whether ``others`` exclude each option that one of ``parts`` leaves."""
        return any(
            all(self([option], others, depth + 1) for option in part[name])
            for part in parts
            if isinstance(part, Mapping)
            for name in ("anyOf", "oneOf")
            if isinstance(part.get(name), list)
        )


def conjuncts(schemas: Sequence[Any], resolve: Resolver) -> list[Any]:
    """``schemas``, what they refer to and the parts of their ``allOf``: a value matches all of it."""
    found: list[Any] = []
    pending, seen = list(schemas), set()
    while pending:
        schema = pending.pop()
        found.append(schema)
        if not isinstance(schema, Mapping):
            continue
        parts = schema.get("allOf")
        pending += parts if isinstance(parts, list) else []
        ref = schema.get("$ref")
        if isinstance(ref, str) and ref not in seen:
            seen.add(ref)
            try:
                pending.append(resolve(ref))
            except LookupError:
                continue
    return found


def _types(parts: list[Any]) -> frozenset[str]:
    types = ALL_TYPES
    for part in parts:
        for keywords in ({"type"}, {"const"}, {"enum"}):
            if isinstance(part, Mapping) and keywords <= part.keys():
                own = types_of({name: part[name] for name in keywords})
                types = types & own if own is not None else types
    return types


def types_left(schemas: Sequence[Any], resolve: Resolver) -> frozenset[str]:
    """The types of the values that match all of ``schemas``, and perhaps some more."""
    return _types(conjuncts(schemas, resolve))


def _values_differ(left: list[Any], right: list[Any]) -> bool:
    found = [[v for part in parts if (v := _values(part)) is not None] for parts in (left, right)]
    if any(not a & b for a in found[0] for b in found[1]):
        return True
    return any(
        _none_matches(texts, part)
        for values, parts in ((found[0], right), (found[1], left))
        for texts in values
        for part in parts
    )


def _none_matches(texts: frozenset[str], part: Any) -> bool:
    """Whether no one of ``texts``, the JSON of values, matches the pattern of ``part``."""
    pattern = part.get("pattern") if isinstance(part, Mapping) else None
    values = [json.loads(text) for text in texts]
    if not isinstance(pattern, str) or not all(
        # Where dialects of patterns agree on what a letter or a space is.
        isinstance(value, str) and value.isascii() and "\n" not in value
        for value in values
    ):
        return False
    try:
        return not any(re.search(pattern, value, re.ASCII) for value in values)
    except re.error:
        return False


def _values(schema: Any) -> frozenset[str] | None:
    """Return the values of ``const`` or ``enum`` as JSON; ``None`` if there are none."""
    if not isinstance(schema, Mapping):
        return None
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if not isinstance(values, list):
        return None
    texts = frozenset(json.dumps(value, sort_keys=True) for value in values)
    # 1.0 equals 1, but its JSON differs.
    return None if any(re.search(r"[0-9][.e]", text) for text in texts) else texts


def _required(parts: list[Any]) -> set[str]:
    lists = (part.get("required") for part in parts if isinstance(part, Mapping))
    return {name for names in lists if isinstance(names, list) for name in names}


def property_schemas(parts: list[Any], name: str) -> list[Any]:
    """What ``parts`` say of a property that is there: ``False`` where it may not be."""
    found = []
    for part in parts:
        if not isinstance(part, Mapping):
            continue
        properties = part.get("properties", {})
        if isinstance(properties, Mapping) and name in properties:
            found.append(properties[name])
        elif not part.get("patternProperties"):
            found.append(part.get("additionalProperties", True))
    return found


def _at_least_one(part: Any) -> bool:
    size = part.get("minItems", 0) if isinstance(part, Mapping) else 0
    return isinstance(size, (int, float)) and size >= 1


def _items(parts: list[Any]) -> list[Any]:
    """What ``parts`` say of the first item."""
    found = []
    for part in parts:
        if isinstance(part, Mapping) and "prefixItems" not in part:
            items = part.get("items", True)
            found.append(items[0] if isinstance(items, list) and items else items)
    return [part for part in found if not isinstance(part, list)]
