"""From a JSON schema to one that means the same to lm-format-enforcer.

The library reads some keywords and overlooks others, depending on what stands beside them. What is
made here holds only what it honours, so nothing that is left out goes unnoticed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from treadle_structured_output_kit.json_schema import ASSERTIONS, disjoint

__all__ = ("Unenforceable", "rewrite_schema")

OF_TYPE: dict[str, frozenset[str]] = {
    "string": frozenset({"minLength", "maxLength", "pattern"}),
    "integer": frozenset(),
    "number": frozenset(),
    "boolean": frozenset(),
    "null": frozenset(),
    "array": frozenset({"items", "minItems", "maxItems"}),
    "object": frozenset({"properties", "required", "additionalProperties"}),
}
ANY: dict[str, Any] = {"anyOf": [{"type": name} for name in OF_TYPE if name != "integer"]}


class Unenforceable(ValueError):
    """The library cannot enforce this schema."""


def rewrite_schema(schema: Any, *, strict: bool) -> dict[str, Any]:
    """Raises ``Unenforceable``. Without ``strict`` unknown keywords are left out."""
    return _SchemaRewriter(schema, strict).result()


class _SchemaRewriter:
    def __init__(self, schema: Any, strict: bool) -> None:
        self._root = schema
        self._strict = strict
        self._definitions: dict[str, Any] = {}

    def result(self) -> dict[str, Any]:
        schema = self._schema(self._root, "$")
        return {**schema, "definitions": self._definitions} if self._definitions else schema

    def _schema(self, schema: Any, path: str) -> dict[str, Any]:
        if schema is True:
            return ANY
        if not isinstance(schema, Mapping):
            raise Unenforceable(f"no value matches the schema at {path}")
        keywords = ASSERTIONS & schema.keys()
        if not keywords:
            return ANY
        for keyword, convert in (
            ("anyOf", self._any_of),
            ("oneOf", self._one_of),
            ("allOf", self._all_of),
            ("$ref", self._ref),
        ):
            if keyword in keywords:
                self._check(keywords - {keyword}, path)
                return convert(schema[keyword], path)
        if keywords & {"enum", "const"}:
            self._check(keywords - {"enum", "const", "type"}, path)
            return self._values(schema, path)
        return self._typed(schema, keywords, path)

    def _check(self, ignored: frozenset[str], path: str) -> None:
        if ignored and self._strict:
            raise Unenforceable(f"{', '.join(sorted(ignored))} would be ignored, at {path}")

    # ------------------------------------------------------------------------ combinations

    def _any_of(self, options: Any, path: str) -> dict[str, Any]:
        if not isinstance(options, list) or not options:
            raise Unenforceable(f"anyOf is no list of schemas, at {path}")
        return {"anyOf": [self._schema(o, f"{path}.anyOf[{i}]") for i, o in enumerate(options)]}

    def _one_of(self, options: Any, path: str) -> dict[str, Any]:
        if self._strict and not disjoint(options):
            raise Unenforceable(f"oneOf whose options may overlap cannot be enforced, at {path}")
        return self._any_of(options, path)

    def _all_of(self, subschemas: Any, path: str) -> dict[str, Any]:
        if not isinstance(subschemas, list) or len(subschemas) != 1:
            raise Unenforceable(f"allOf cannot be enforced, at {path}")
        return self._schema(subschemas[0], f"{path}.allOf[0]")

    def _ref(self, target: Any, path: str) -> dict[str, Any]:
        """The library looks a name up among the definitions of the whole schema."""
        section, _, name = str(target).removeprefix("#").lstrip("/").partition("/")
        if target == "#":
            key, definition = "#", self._root
        elif section in ("$defs", "definitions") and name and not set(name) & set("/~%"):
            key = f"{section} {name}"
            definition = self._root.get(section, {}).get(name)
        else:
            raise Unenforceable(f"$ref {target!r} cannot be followed, at {path}")
        if definition is None:
            raise Unenforceable(f"$ref {target!r} leads nowhere, at {path}")
        if key not in self._definitions:
            self._definitions[key] = None  # the schema may refer to itself
            self._definitions[key] = self._schema(definition, str(target))
        return {"$ref": f"#/definitions/{key}"}

    # ------------------------------------------------------------------------------ values

    def _values(self, schema: Mapping[str, Any], path: str) -> dict[str, Any]:
        values = schema.get("enum", [schema.get("const")])
        if "enum" in schema and "const" in schema:
            values = [v for v in values if v == schema["const"]]
        type_names = schema.get("type", list(OF_TYPE))
        names = [type_names] if isinstance(type_names, str) else type_names
        values = [v for v in values if any(_is(v, name) for name in names)]
        options: list[dict[str, Any]] = []
        if texts := [v for v in values if isinstance(v, str)]:
            if bad := [v for v in texts if not _plain(v)]:
                raise Unenforceable(f"{bad[0]!r} cannot be written: JSON escapes it, at {path}")
            options.append({"type": "string", "enum": texts})
        if any(v is None for v in values):
            options.append({"type": "null"})
        if flags := {v for v in values if isinstance(v, bool)}:
            if len(flags) == 1:
                raise Unenforceable(f"one of true and false alone cannot be enforced, at {path}")
            options.append({"type": "boolean"})
        numbers = [v for v in values if isinstance(v, int | float) and not isinstance(v, bool)]
        if any(not math.isfinite(v) or "e" in str(v) for v in numbers):
            raise Unenforceable(f"a number with an exponent cannot be written, at {path}")
        if numbers:
            options.append({"enum": numbers})
        if any(isinstance(v, list | dict) for v in values):
            raise Unenforceable(f"arrays and objects as values cannot be enforced, at {path}")
        if not options:
            raise Unenforceable(f"no value is allowed, at {path}")
        return options[0] if len(options) == 1 else {"anyOf": options}

    # ------------------------------------------------------------------------------- types

    def _typed(
        self, schema: Mapping[str, Any], assertions: frozenset[str], path: str
    ) -> dict[str, Any]:
        type_name = schema.get("type")
        if type_name is None:  # a value of another type would match too, but need not be possible
            type_name = next(
                (name for name, keywords in OF_TYPE.items() if keywords & assertions), None
            )
        names: list[Any] = type_name if isinstance(type_name, list) else [type_name]
        supported = frozenset[str]().union(*(OF_TYPE.get(name, ()) for name in names))
        self._check(assertions - supported - {"type"}, path)
        if any(name not in OF_TYPE for name in names) or not names:
            raise Unenforceable(f"type is {type_name!r}, at {path}")
        options = [self._of_type(schema, name, path) for name in names]
        return options[0] if len(options) == 1 else {"anyOf": options}

    def _of_type(self, schema: Mapping[str, Any], name: str, path: str) -> dict[str, Any]:
        match name:
            case "string":
                return self._string(schema, path)
            case "array":
                return self._array(schema, path)
            case "object":
                return self._object(schema, path)
            case _:
                return {"type": name}

    def _string(self, schema: Mapping[str, Any], path: str) -> dict[str, Any]:
        lengths = _bounds(schema, "minLength", "maxLength", path)
        if "pattern" not in schema:
            return {"type": "string", **lengths}
        if lengths:
            raise Unenforceable(f"pattern and lengths together cannot be enforced, at {path}")
        return {"type": "string", "pattern": str(schema["pattern"])}

    def _array(self, schema: Mapping[str, Any], path: str) -> dict[str, Any]:
        lengths = _bounds(schema, "minItems", "maxItems", path)
        if lengths.get("maxItems") == 0:
            raise Unenforceable(f"maxItems 0 cannot be enforced, at {path}")
        items = schema.get("items", True)
        return {"type": "array", "items": self._schema(items, f"{path}.items"), **lengths}

    def _object(self, schema: Mapping[str, Any], path: str) -> dict[str, Any]:
        names, required = schema.get("properties"), schema.get("required", [])
        additional = schema.get("additionalProperties", True)
        if not isinstance(required, list) or not all(isinstance(n, str) for n in required):
            raise Unenforceable(f"required is no list of names, at {path}")
        if names in (None, {}) and not required and additional is not False:
            rewritten: dict[str, Any] = {"type": "object"}
            if additional is not True:
                rewritten["additionalProperties"] = self._schema(
                    additional, f"{path}.additionalProperties"
                )
            return rewritten
        if not isinstance(names or {}, Mapping):
            raise Unenforceable(f"properties is no object, at {path}")
        # The library writes no properties but the named ones, so what is required is named too.
        properties = {
            **(names or {}),
            **{n: additional for n in required if n not in (names or {})},
        }
        if bad := [name for name in properties if not _plain(name)]:
            raise Unenforceable(f"{bad[0]!r} cannot be written: JSON escapes it, at {path}")
        property_schemas = {
            name: self._schema(s, f"{path}.{name}") for name, s in properties.items()
        }
        return {"type": "object", "properties": property_schemas, "required": required}


def _bounds(schema: Mapping[str, Any], min_key: str, max_key: str, path: str) -> dict[str, int]:
    bounds = {name: schema[name] for name in (min_key, max_key) if schema.get(name) is not None}
    if any(not isinstance(v, int) or v < 0 for v in bounds.values()):
        raise Unenforceable(f"{' and '.join(bounds)} must be whole numbers, at {path}")
    if len(bounds) == 2 and bounds[min_key] > bounds[max_key]:
        raise Unenforceable(f"{min_key} is more than {max_key}, at {path}")
    return bounds


def _is(value: Any, name: Any) -> bool:
    match name:
        case "string":
            return isinstance(value, str)
        case "null":
            return value is None
        case "boolean":
            return isinstance(value, bool)
        case "integer":
            return isinstance(value, int) and not isinstance(value, bool)
        case "number":
            return isinstance(value, int | float) and not isinstance(value, bool)
        case "array":
            return isinstance(value, list)
        case _:
            return isinstance(value, dict)


def _plain(text: str) -> bool:
    """Whether a JSON text writes ``text`` as it is, and the library counts it right."""
    return not any(c in '"\\' or c < " " for c in text) and not text.startswith(" ")
