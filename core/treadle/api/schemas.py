"""Reading JSON schemas, for backends that must say which keywords they would not enforce."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

__all__ = ("ASSERTIONS", "disjoint", "subschemas", "types_of")

ASSERTIONS = frozenset(
    {
        "$dynamicRef",
        "$recursiveRef",
        "$ref",
        "additionalItems",
        "additionalProperties",
        "allOf",
        "anyOf",
        "const",
        "contains",
        "dependencies",
        "dependentRequired",
        "dependentSchemas",
        "else",
        "enum",
        "exclusiveMaximum",
        "exclusiveMinimum",
        "format",
        "if",
        "items",
        "maxContains",
        "maxItems",
        "maxLength",
        "maxProperties",
        "maximum",
        "minContains",
        "minItems",
        "minLength",
        "minProperties",
        "minimum",
        "multipleOf",
        "not",
        "oneOf",
        "pattern",
        "patternProperties",
        "prefixItems",
        "properties",
        "propertyNames",
        "required",
        "then",
        "type",
        "unevaluatedItems",
        "unevaluatedProperties",
        "uniqueItems",
    }
)
"""Every keyword that constrains values, from draft 4 to 2020-12. Any other only describes."""

ONE = ("additionalProperties", "additionalItems", "contains", "else", "if", "not", "propertyNames",
       "then", "unevaluatedItems", "unevaluatedProperties")  # fmt: skip
SEVERAL = ("allOf", "anyOf", "oneOf", "prefixItems")
NAMED = ("$defs", "definitions", "dependentSchemas", "patternProperties", "properties")


def subschemas(schema: Any) -> Iterator[tuple[str, Any]]:
    """Every schema inside of ``schema`` with its path, itself first (``$``).

    Values of ``const``, ``enum``, ``default`` and the like are data and not visited.
    """
    stack: list[tuple[str, Any]] = [("$", schema)]
    while stack:
        path, found = stack.pop()
        yield path, found
        if not isinstance(found, Mapping):
            continue
        inner: list[tuple[str, Any]] = [(f"{path}.{k}", found[k]) for k in ONE if k in found]
        for keyword in SEVERAL:
            parts = found.get(keyword)
            if isinstance(parts, list):
                inner += [(f"{path}.{keyword}[{i}]", part) for i, part in enumerate(parts)]
        items = found.get("items")
        if isinstance(items, list):
            inner += [(f"{path}.items[{i}]", part) for i, part in enumerate(items)]
        elif items is not None:
            inner.append((f"{path}.items", items))
        for keyword in NAMED:
            parts = found.get(keyword)
            if isinstance(parts, Mapping):
                inner += [(f"{path}.{keyword}.{name}", part) for name, part in parts.items()]
        stack.extend(reversed(inner))


def types_of(schema: Any) -> frozenset[str] | None:
    """The types that a schema allows as far as it says so itself; ``None`` for any.

    ``integer`` counts as ``number``: every integer is a number too.
    """
    if not isinstance(schema, Mapping):
        return None
    if "const" in schema or "enum" in schema:
        values = [schema["const"]] if "const" in schema else schema["enum"]
        return frozenset(map(_type_of, values)) if isinstance(values, list) else None
    named = schema.get("type")
    if isinstance(named, str):
        named = [named]
    if not isinstance(named, list) or not all(isinstance(name, str) for name in named):
        return None
    return frozenset("number" if name == "integer" else name for name in named)


def disjoint(options: Any) -> bool:
    """Whether no value can match two of ``options``, so that ``oneOf`` is the same as ``anyOf``.

    ``True`` only if that is plain to see: different types, different values, or objects that
    require a property with different values.
    """
    if not isinstance(options, list):
        return False
    return all(_apart(a, b) for i, a in enumerate(options) for b in options[:i])


def _apart(a: Any, b: Any) -> bool:
    first, second = types_of(a), types_of(b)
    if first is not None and second is not None and not first & second:
        return True
    left, right = _values(a), _values(b)
    if left is not None and right is not None:
        return not left & right
    if first == second == frozenset({"object"}):
        shared = set(_required(a)) & set(_required(b))
        return any(_apart(_property(a, name), _property(b, name)) for name in shared)
    return False


def _values(schema: Any) -> frozenset[str] | None:
    """The values of ``const`` or ``enum`` as texts."""
    if not isinstance(schema, Mapping):
        return None
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if not isinstance(values, list) or any(isinstance(v, float) for v in values):
        return None  # 1.0 equals 1, but is written otherwise
    return frozenset(json.dumps(value, sort_keys=True) for value in values)


def _required(schema: Any) -> list[str]:
    names = schema.get("required")
    return [n for n in names if isinstance(n, str)] if isinstance(names, list) else []


def _property(schema: Any, name: str) -> Any:
    properties = schema.get("properties")
    return properties.get(name) if isinstance(properties, Mapping) else None


def _type_of(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int() | float():
            return "number"
        case str():
            return "string"
        case list():
            return "array"
        case _:
            return "object"
