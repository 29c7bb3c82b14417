"""Whether a value matches a schema, for the schemas that can be read without a grammar."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from treadle_structured_output_kit.json_schema import ASSERTIONS

__all__ = ("canonical", "listed", "matches", "unreadable")

LISTS = ("allOf", "anyOf")
READ = frozenset({"const", "enum", "maximum", "minimum", "properties", "required", "type", *LISTS})


def unreadable(schema: Any) -> str | None:
    """What of ``schema`` keeps ``matches`` from reading it."""
    if not isinstance(schema, Mapping):
        return None if schema is True else str(schema)
    if unknown := sorted((ASSERTIONS & schema.keys()) - READ):
        return unknown[0]
    parts = [*schema.get("properties", {}).values()]
    for name in LISTS:
        parts += schema.get(name, [])
    return next((reason for part in parts if (reason := unreadable(part)) is not None), None)


def listed(schema: Mapping[str, Any]) -> list[Any]:
    """The values that ``const`` or ``enum`` of a schema lists, as far as the rest of it allows them; of a
    schema that is ``unreadable``, all that it lists."""
    name = "const" if "const" in schema else "enum"
    values = [schema[name]] if name == "const" else schema[name]
    if unreadable(schema) is not None:
        return list(values)
    rest = {key: value for key, value in schema.items() if key != name}
    return [value for value in values if matches(rest, value)]


def matches(schema: Any, value: Any) -> bool:
    """Whether ``value`` matches ``schema``, of which nothing is ``unreadable``."""
    if not isinstance(schema, Mapping):
        return True
    if "type" in schema:
        types = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        if not any(_has_type(value, name) for name in types):
            return False
    for values in ([schema["const"]] if "const" in schema else None, schema.get("enum")):
        if values is not None and canonical(value) not in map(canonical, values):
            return False
    if not _is_inside(schema, value):
        return False
    if not all(matches(part, value) for part in schema.get("allOf", [])):
        return False
    return "anyOf" not in schema or any(matches(part, value) for part in schema["anyOf"])


def _is_inside(schema: Mapping[str, Any], value: Any) -> bool:
    """Whether a number is within its bounds, and an object has the properties that it must have."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        if "minimum" in schema and value < schema["minimum"]:
            return False
        if "maximum" in schema and value > schema["maximum"]:
            return False
    if isinstance(value, Mapping):
        if not all(name in value for name in schema.get("required", [])):
            return False
        properties = schema.get("properties", {})
        if not all(matches(properties[name], value[name]) for name in properties.keys() & value):
            return False
    return True


def _has_type(value: Any, name: str) -> bool:
    match value:
        case bool():
            return name == "boolean"
        case int() | float():
            return name == "number" or (
                name == "integer" and (isinstance(value, int) or value.is_integer())
            )
        case None:
            return name == "null"
        case str():
            return name == "string"
        case list():
            return name == "array"
    return name == "object"


def canonical(value: Any) -> str:
    """The same text for values that are equal: 1.0 is 1, and the order of keys says nothing."""
    return json.dumps(_plain(value), sort_keys=True, ensure_ascii=False)


def _plain(value: Any) -> Any:
    match value:
        case float() if value.is_integer():
            return int(value)
        case list():
            return [_plain(item) for item in value]
        case dict():
            return {key: _plain(item) for key, item in value.items()}
    return value
