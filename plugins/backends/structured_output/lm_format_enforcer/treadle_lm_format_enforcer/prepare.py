"""From a JSON schema to one that means the same to lm-format-enforcer.

The library reads some keywords and overlooks others, depending on what stands beside them. What is
made here holds only what it honours, so nothing that is left out goes unnoticed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from treadle_structured_output_kit.json_schema import ASSERTIONS, disjoint

__all__ = ("Unenforceable", "prepared")

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


def prepared(schema: Any, *, strict: bool) -> dict[str, Any]:
    """Raises ``Unenforceable``. Without ``strict`` unknown keywords are left out."""
    return _Preparation(schema, strict).result()


class _Preparation:
    def __init__(self, schema: Any, strict: bool) -> None:
        self._root = schema
        self._strict = strict
        self._definitions: dict[str, Any] = {}

    def result(self) -> dict[str, Any]:
        made = self._schema(self._root, "$")
        return {**made, "definitions": self._definitions} if self._definitions else made

    def _schema(self, schema: Any, path: str) -> dict[str, Any]:
        if schema is True:
            return ANY
        if not isinstance(schema, Mapping):
            raise Unenforceable(f"no value matches the schema at {path}")
        given = ASSERTIONS & schema.keys()
        if not given:
            return ANY
        for keyword, make in (
            ("anyOf", self._any_of),
            ("oneOf", self._one_of),
            ("allOf", self._all_of),
            ("$ref", self._ref),
        ):
            if keyword in given:
                self._check(given - {keyword}, path)
                return make(schema[keyword], path)
        if given & {"enum", "const"}:
            self._check(given - {"enum", "const", "type"}, path)
            return self._values(schema, path)
        return self._typed(schema, given, path)

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

    def _all_of(self, parts: Any, path: str) -> dict[str, Any]:
        if not isinstance(parts, list) or len(parts) != 1:
            raise Unenforceable(f"allOf cannot be enforced, at {path}")
        return self._schema(parts[0], f"{path}.allOf[0]")

    def _ref(self, target: Any, path: str) -> dict[str, Any]:
        """The library looks a name up among the definitions of the whole schema."""
        home, _, name = str(target).removeprefix("#").lstrip("/").partition("/")
        if target == "#":
            key, found = "#", self._root
        elif home in ("$defs", "definitions") and name and not set(name) & set("/~%"):
            key = f"{home} {name}"
            found = self._root.get(home, {}).get(name)
        else:
            raise Unenforceable(f"$ref {target!r} cannot be followed, at {path}")
        if found is None:
            raise Unenforceable(f"$ref {target!r} leads nowhere, at {path}")
        if key not in self._definitions:
            self._definitions[key] = None  # the schema may refer to itself
            self._definitions[key] = self._schema(found, str(target))
        return {"$ref": f"#/definitions/{key}"}

    # ------------------------------------------------------------------------------ values

    def _values(self, schema: Mapping[str, Any], path: str) -> dict[str, Any]:
        values = schema.get("enum", [schema.get("const")])
        if "enum" in schema and "const" in schema:
            values = [v for v in values if v == schema["const"]]
        named = schema.get("type", list(OF_TYPE))
        names = [named] if isinstance(named, str) else named
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

    def _typed(self, schema: Mapping[str, Any], given: frozenset[str], path: str) -> dict[str, Any]:
        named = schema.get("type")
        if named is None:  # a value of another type would match too, but need not be possible
            named = next((name for name, own in OF_TYPE.items() if own & given), None)
        names: list[Any] = named if isinstance(named, list) else [named]
        honoured = frozenset[str]().union(*(OF_TYPE.get(name, ()) for name in names))
        self._check(given - honoured - {"type"}, path)
        if any(name not in OF_TYPE for name in names) or not names:
            raise Unenforceable(f"type is {named!r}, at {path}")
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
        others = schema.get("additionalProperties", True)
        if not isinstance(required, list) or not all(isinstance(n, str) for n in required):
            raise Unenforceable(f"required is no list of names, at {path}")
        if names is None and not required and others is not False:
            made: dict[str, Any] = {"type": "object"}
            if others is not True:
                made["additionalProperties"] = self._schema(others, f"{path}.additionalProperties")
            return made
        if not isinstance(names or {}, Mapping):
            raise Unenforceable(f"properties is no object, at {path}")
        # The library writes no properties but the named ones, so what is required is named too.
        named = {**(names or {}), **{n: others for n in required if n not in (names or {})}}
        if bad := [name for name in named if not _plain(name)]:
            raise Unenforceable(f"{bad[0]!r} cannot be written: JSON escapes it, at {path}")
        inner = {name: self._schema(s, f"{path}.{name}") for name, s in named.items()}
        return {"type": "object", "properties": inner, "required": required}


def _bounds(schema: Mapping[str, Any], least: str, most: str, path: str) -> dict[str, int]:
    found = {name: schema[name] for name in (least, most) if schema.get(name) is not None}
    if any(not isinstance(v, int) or v < 0 for v in found.values()):
        raise Unenforceable(f"{' and '.join(found)} must be whole numbers, at {path}")
    if len(found) == 2 and found[least] > found[most]:
        raise Unenforceable(f"{least} is more than {most}, at {path}")
    return found


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
