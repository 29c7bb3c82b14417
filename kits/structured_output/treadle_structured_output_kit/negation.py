"""The schema that matches exactly what another does not, as far as one can be written."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping
from typing import Any

from treadle_structured_output_kit.json_schema import ASSERTIONS, disjoint, subschemas

__all__ = ("Inexpressible", "Negation", "all_of", "any_of", "other_than")

TYPES = ("null", "boolean", "number", "string", "array", "object")
ALL_TYPES = frozenset(TYPES)
MAX_DEPTH = 12
MAX_STEPS = 20_000
_KEYWORDS = {
    "array": "additionalItems contains items maxContains maxItems minContains minItems prefixItems "
    "unevaluatedItems uniqueItems",
    "number": "exclusiveMaximum exclusiveMinimum maximum minimum multipleOf",
    "object": "additionalProperties dependencies dependentRequired dependentSchemas maxProperties "
    "minProperties patternProperties properties propertyNames required unevaluatedProperties",
    "string": "format maxLength minLength pattern",
}
TYPE_OF = {name: kind for kind, names in _KEYWORDS.items() for name in names.split()}
"""The one type that a keyword is about."""
# Keywords of sizes: the type that they are about, the keyword of the other side, and the step to it.
SIZES = {
    "minLength": ("string", "maxLength", -1),
    "maxLength": ("string", "minLength", 1),
    "minItems": ("array", "maxItems", -1),
    "maxItems": ("array", "minItems", 1),
    "minProperties": ("object", "maxProperties", -1),
    "maxProperties": ("object", "minProperties", 1),
}
RANGES = {
    "minimum": "exclusiveMaximum",
    "maximum": "exclusiveMinimum",
    "exclusiveMinimum": "maximum",
    "exclusiveMaximum": "minimum",
}


# A pattern of one class of characters, of which a text has to have one somewhere.
CLASS = re.compile(r"\[(\^?)((?:[^\[\]\\^]|\\.)+)\]\+?")


class Inexpressible(LookupError):
    """No schema without ``not`` says this."""


def any_of(schemas: Iterable[Any]) -> Any:
    """A schema for what any of ``schemas`` matches."""
    options = [schema for schema in schemas if schema is not False]
    if any(schema is True or schema == {} for schema in options):
        return True
    return False if not options else options[0] if len(options) == 1 else {"anyOf": options}


def all_of(schemas: Iterable[Any]) -> Any:
    """A schema for what all of ``schemas`` match."""
    parts = [schema for schema in schemas if schema is not True and schema != {}]
    if any(schema is False for schema in parts):
        return False
    return True if not parts else parts[0] if len(parts) == 1 else {"allOf": parts}


class Negation:
    """Negates schemas inside ``root``, to whose definitions they may refer."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._steps = MAX_STEPS
        # A reference inside a schema with a name of its own begins there, and not at the root.
        self._has_names = any(
            isinstance(schema, Mapping)
            and path != "$"
            and any(isinstance(schema.get(name), str) for name in ("$id", "id"))
            for path, schema in subschemas(root)
        )

    def of(self, schema: Any, types: frozenset[str] = ALL_TYPES, depth: int = 0) -> Any:
        """A schema of what does not match, among values of ``types``. Raises ``Inexpressible``."""
        self._steps -= 1
        if self._steps < 0:
            raise Inexpressible
        if isinstance(schema, bool):
            return not schema
        if depth > MAX_DEPTH or not isinstance(schema, Mapping):
            raise Inexpressible
        keywords = [name for name in schema if name in ASSERTIONS]
        if "$ref" in keywords and not {"$id", "$anchor"} & schema.keys():
            return any_of(
                [
                    self.of(self.resolve(schema["$ref"]), types, depth + 1),
                    self.of({k: v for k, v in schema.items() if k != "$ref"}, types, depth + 1),
                ]
            )
        return any_of(
            [
                option
                for name in keywords
                if TYPE_OF.get(name) in (None, *types)  # of other values it says nothing
                for option in self._without(name, schema, types, depth + 1)
            ]
        )

    def resolve(self, ref: object) -> Any:
        """What a reference inside the document names."""
        if self._has_names or not isinstance(ref, str) or not re.fullmatch(r"#(/[^%]*)?", ref):
            raise Inexpressible
        current = self._root
        for part in ref[1:].split("/")[1:]:
            name = part.replace("~1", "/").replace("~0", "~")
            if not isinstance(current, Mapping) or name not in current:
                raise Inexpressible
            current = current[name]
        return current

    def _without(
        self, name: str, schema: Mapping[str, Any], types: frozenset[str], depth: int
    ) -> list[Any]:
        """Schemas that together match what fails the keyword ``name`` of ``schema``."""
        value = schema[name]
        match name:
            case "type":
                return [_other_types([value] if isinstance(value, str) else value, types)]
            case "const" | "enum":
                return [other_than(value if name == "enum" else [value])]
            case "not":
                return [value]
            case "allOf":
                return [self.of(part, types, depth) for part in value]
            case "anyOf" | "oneOf" if name == "anyOf" or disjoint(value):
                return [all_of(self.of(part, types, depth) for part in value)]
            case "required":
                return [{"type": "object", "properties": {key: False}} for key in value]
            case "properties":
                negated = {key: self.of(part, depth=depth) for key, part in value.items()}
                return [
                    {"type": "object", "properties": {key: part}, "required": [key]}
                    for key, part in negated.items()
                    if part is not False
                ]
            case "items" | "additionalProperties" | "additionalItems" if (
                value is True or value == {}
            ):
                return []
            case "pattern" if isinstance(value, str) and (single := CLASS.fullmatch(value)):
                others = f"^[{'' if single[1] else '^'}{single[2]}]*$"
                return [{"type": "string", "pattern": others}]
            case _ if name in SIZES and isinstance(value, int):
                kind, other, step = SIZES[name]
                return [{"type": kind, other: value + step}] if value + step >= 0 else []
            case _ if name in RANGES and _is_number(value):
                return [{"type": "number", RANGES[name]: value}]
        raise Inexpressible


def other_than(values: list[Any]) -> Any:
    """A schema for every value that is not among ``values``, which are scalars."""
    if not all(value is None or isinstance(value, (bool, int, float, str)) for value in values):
        raise Inexpressible
    options: list[Any] = [{"type": "array"}, {"type": "object"}]
    if None not in values:
        options.append({"type": "null"})
    options += [{"enum": [flag]} for flag in (True, False) if not any(v is flag for v in values)]
    texts = [value for value in values if isinstance(value, str)]
    options.append({"type": "string", "pattern": f"^{_none_of(texts)}$"} if texts else _STRING)
    numbers = sorted({value for value in values if _is_number(value)})
    if not numbers:
        return any_of([*options, {"type": "number"}])
    options.append({"type": "number", "exclusiveMaximum": numbers[0]})
    options += [
        {"type": "number", "exclusiveMinimum": low, "exclusiveMaximum": high}
        for low, high in itertools.pairwise(numbers)
    ]
    return any_of([*options, {"type": "number", "exclusiveMinimum": numbers[-1]}])


_STRING = {"type": "string"}


def _none_of(texts: list[str]) -> str:
    """A regular expression of every text that is not among ``texts``."""
    children: dict[str, list[str]] = {}
    for text in texts:
        if text:
            children.setdefault(text[0], []).append(text[1:])
    options = [] if "" in texts else [""]
    heads = "".join(rf"\u{ord(c):04x}" if ord(c) < 1 << 16 else c for c in sorted(children))
    options.append(rf"[^{heads}][\s\S]*" if heads else r"[\s\S]+")
    options += [re.escape(c) + _none_of(rest) for c, rest in sorted(children.items())]
    return f"(?:{'|'.join(options)})"


def _other_types(names: Any, types: frozenset[str]) -> Any:
    if not isinstance(names, list) or (
        "integer" in names and "number" not in names and "number" in types
    ):
        raise Inexpressible  # the numbers that are not whole have no name
    return any_of({"type": name} for name in TYPES if name in types and name not in names)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
