"""Reading JSON schemas, for backends that must report keywords they would not enforce."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

__all__ = ("ASSERTIONS", "disjoint", "resolve", "subschemas", "types_of")

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

SINGLE = ("additionalProperties", "additionalItems", "contains", "else", "if", "not", "propertyNames",
       "then", "unevaluatedItems", "unevaluatedProperties")  # fmt: skip
LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
MAPPINGS = ("$defs", "definitions", "dependentSchemas", "patternProperties", "properties")


def subschemas(schema: Any) -> Iterator[tuple[str, Any]]:
    """Yield ``(path, schema)`` for ``schema`` itself (``$``) and every schema inside it.

    Values of ``const``, ``enum``, ``default`` and the like are data and not visited.
    """
    stack: list[tuple[str, Any]] = [("$", schema)]
    while stack:
        path, current = stack.pop()
        yield path, current
        if not isinstance(current, Mapping):
            continue
        children: list[tuple[str, Any]] = [
            (f"{path}.{k}", current[k]) for k in SINGLE if k in current
        ]
        for keyword in LISTS:
            values = current.get(keyword)
            if isinstance(values, list):
                children += [(f"{path}.{keyword}[{i}]", value) for i, value in enumerate(values)]
        items = current.get("items")
        if isinstance(items, list):
            children += [(f"{path}.items[{i}]", value) for i, value in enumerate(items)]
        elif items is not None:
            children.append((f"{path}.items", items))
        for keyword in MAPPINGS:
            values = current.get(keyword)
            if isinstance(values, Mapping):
                children += [(f"{path}.{keyword}.{name}", value) for name, value in values.items()]
        stack.extend(reversed(children))


def resolve(root: Any, pointer: Any) -> Any:
    """Return what a reference inside the document ``root`` names. Raises ``LookupError``."""
    head, *names = str(pointer).split("/")
    if head != "#":
        raise LookupError(pointer)
    found = root
    for name in names:
        name = name.replace("~1", "/").replace("~0", "~")
        if not isinstance(found, list | Mapping) or (
            isinstance(found, list) and not name.isdecimal()
        ):
            raise LookupError(pointer)
        found = found[int(name)] if isinstance(found, list) else found[name]
    return found


def types_of(schema: Any) -> frozenset[str] | None:
    """Return the types that the schema itself allows; ``None`` for any type.

    ``integer`` counts as ``number``: every integer is a number too.
    """
    if not isinstance(schema, Mapping):
        return None
    if "const" in schema or "enum" in schema:
        values = [schema["const"]] if "const" in schema else schema["enum"]
        return frozenset(map(_type_of, values)) if isinstance(values, list) else None
    names = schema.get("type")
    if isinstance(names, str):
        names = [names]
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        return None
    return frozenset("number" if name == "integer" else name for name in names)


def disjoint(options: Any) -> bool:
    """Return whether no value can match two of ``options``: ``oneOf`` then equals ``anyOf``.

    ``True`` only in simple cases: different types, different values, or objects that require a
    property with different values.
    """
    if not isinstance(options, list):
        return False
    return all(_exclusive(a, b) for i, a in enumerate(options) for b in options[:i])


def _exclusive(a: Any, b: Any) -> bool:
    first, second = types_of(a), types_of(b)
    if first is not None and second is not None and not first & second:
        return True
    left, right = _values(a), _values(b)
    if left is not None and right is not None:
        return not left & right
    if first == second == frozenset({"object"}):
        shared = set(_required(a)) & set(_required(b))
        return any(_exclusive(_property(a, name), _property(b, name)) for name in shared)
    return False


def _values(schema: Any) -> frozenset[str] | None:
    """Return the values of ``const`` or ``enum`` as JSON; ``None`` if there are none."""
    if not isinstance(schema, Mapping):
        return None
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if not isinstance(values, list) or any(isinstance(v, float) for v in values):
        return None  # 1.0 equals 1, but its JSON differs
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
