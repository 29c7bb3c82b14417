"""Which JSON schemas outlines-core would take without enforcing all of them.

It looks at one keyword of a schema (the first of ``SHAPES`` that is there) and at the companions
that belong to it; whatever else stands beside them is ignored without a word.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from treadle_structured_output_kit.json_schema import ASSERTIONS, disjoint, subschemas, types_of

__all__ = ("refusal",)

# In the library's order, with the companions that it honours.
SHAPES: dict[str, frozenset[str]] = {
    "properties": frozenset({"type", "required", "additionalProperties"}),
    "allOf": frozenset(),
    "anyOf": frozenset(),
    "oneOf": frozenset(),
    "prefixItems": frozenset({"type", "items"}),
    "enum": frozenset({"type"}),
    "const": frozenset({"type"}),
    "$ref": frozenset(),
    "type": frozenset(),
}
OF_TYPE: dict[str, frozenset[str]] = {
    "string": frozenset({"minLength", "maxLength", "pattern", "format"}),
    "integer": frozenset({"format"}),
    "number": frozenset({"format"}),
    "array": frozenset({"items", "minItems", "maxItems"}),
    "object": frozenset({"additionalProperties"}),
    "boolean": frozenset(),
    "null": frozenset(),
}


def refusal(schema: Any) -> str | None:
    """Why the library would not enforce ``schema``, or ``None``."""
    for path, subschema in subschemas(schema):
        if isinstance(subschema, bool) and path.endswith(".additionalProperties"):
            continue  # beside properties it changes nothing, and alone the library refuses it
        if (reason := _reason(subschema)) is not None:
            return f"{reason}, at {path}"
    return None


def _reason(schema: Any) -> str | None:
    if not isinstance(schema, Mapping):
        return "true and false as schemas cannot be enforced"
    keywords = ASSERTIONS & schema.keys()
    shape = next((name for name in SHAPES if name in keywords), None)
    if shape is None:
        return _ignored(keywords)
    supported = SHAPES[shape]
    if shape == "type":
        types = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        supported = supported.union(*(OF_TYPE.get(name, frozenset()) for name in types))
    return _ignored(keywords - supported - {shape}) or CHECKS[shape](schema)


def _ignored(keywords: frozenset[str]) -> str | None:
    return f"{', '.join(sorted(keywords))} would be ignored" if keywords else None


def _no_check(_: Mapping[str, Any]) -> str | None:
    return None


def _properties(schema: Mapping[str, Any]) -> str | None:
    names = schema["properties"]
    if "object" not in (types_of({"type": schema.get("type", "object")}) or ()):
        return "properties of something that is no object"
    if not isinstance(names, Mapping):
        return "properties is no object"
    if any(_escapes(name) for name in names):
        return "a property's name with characters that JSON escapes cannot be enforced"
    if missing := [name for name in schema.get("required", ()) if name not in names]:
        return f"required names {missing[0]!r}, which is not among the properties"
    return None


def _all_of(schema: Mapping[str, Any]) -> str | None:
    schemas = schema["allOf"]
    if isinstance(schemas, list) and len(schemas) == 1:
        return None
    return "allOf cannot be enforced"


def _one_of(schema: Mapping[str, Any]) -> str | None:
    if disjoint(schema["oneOf"]):
        return None
    return "oneOf whose options may overlap cannot be enforced"


def _values(schema: Mapping[str, Any]) -> str | None:
    values = schema.get("enum", [schema.get("const")])
    if not isinstance(values, list) or not values:
        return "enum is empty"
    allowed = types_of({"type": schema["type"]}) if "type" in schema else None
    value_types = types_of({"enum": values}) or frozenset()
    if allowed is not None and not value_types <= allowed:
        return "a value has another type than type says, which would be ignored"
    if "integer" in str(schema.get("type", "")) and any(isinstance(v, float) for v in values):
        return "a value has another type than type says, which would be ignored"
    return None


def _typed(schema: Mapping[str, Any]) -> str | None:
    lengths = {"minLength", "maxLength"} & schema.keys()
    rules = [*sorted(lengths)[:1], *({"pattern", "format"} & schema.keys())]
    if len(rules) > 1:
        return f"{' and '.join(sorted(rules))} together cannot be enforced"
    if "pattern" in schema:
        return _pattern(schema["pattern"])
    return None


def _pattern(pattern: Any) -> str | None:
    """Patterns are put between two quotes as they are."""
    if not isinstance(pattern, str):
        return "pattern is no text"
    if pattern.startswith("^") != pattern.endswith("$"):
        return "a pattern with one anchor cannot be enforced; use both or none"
    depth, in_class, first = 0, False, False
    chars = iter(pattern)
    for char in chars:
        if char == "\\":
            if (next(chars, "") + " ")[0] not in PLAIN_ESCAPES:
                return UNSAFE
        elif in_class:
            if (first and char == "^") or (char in '"-' and _wide(char, pattern)):
                return UNSAFE
            in_class = char != "]"
        elif char == "[":
            in_class = first = True
            continue
        elif char in "()":
            depth += 1 if char == "(" else -1
        elif char == "|" and depth == 0:
            return "a pattern with alternatives must have brackets around them"
        elif char in '."' or char < " ":
            return UNSAFE
        first = False
    return None


def _wide(char: str, pattern: str) -> bool:
    """Whether a range of ``pattern`` holds a quote or a backslash, or ``char`` is a quote itself."""
    if char == '"':
        return True
    dash_positions = [i for i in range(1, len(pattern) - 1) if pattern[i] == "-"]
    return any(
        pattern[i - 1] <= bad <= pattern[i + 1]
        for i in dash_positions
        for bad in ('"', "\\", "\x1f")
    )


def _escapes(text: str) -> bool:
    """Whether a JSON text writes ``text`` with an escape."""
    return any(c in '"\\' or c < " " for c in text)


# Escapes in a pattern that stand for characters which a JSON text need not escape.
PLAIN_ESCAPES = frozenset("dwbB.+*?()|[]{}^$#&-~/ @:,;=!%<>_'`")
UNSAFE = "a pattern that may match quotes, backslashes or control characters cannot be enforced"

CHECKS = {
    "properties": _properties,
    "allOf": _all_of,
    "anyOf": _no_check,
    "oneOf": _one_of,
    "prefixItems": _no_check,
    "enum": _values,
    "const": _values,
    "$ref": _no_check,
    "type": _typed,
}
