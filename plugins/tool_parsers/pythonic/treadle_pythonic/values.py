"""The values of a JSON schema as Python writes them, in rules of Lark as llguidance reads it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from treadle_parsing_kit.tool_choice import lark_string
from treadle_structured_output_kit.formats import dates_as_patterns
from treadle_structured_output_kit.json_schema import ASSERTIONS, disjoint, resolve
from treadle_structured_output_kit.merge import Unmergeable, merge
from treadle_structured_output_kit.plain_values import listed, unreadable

__all__ = ("ANY_VALUE", "Unenforceable", "ValueRules")

ANY_VALUE = r"""
value: STRING | NUMBER | "True" | "False" | "None" | list | dict
list: "[" (value (", " value)*)? "]"
dict: "{" (STRING ": " value (", " STRING ": " value)*)? "}"
STRING: /"([^"\\\x00-\x1f]|\\["\\nrt])*"/ | SINGLE_QUOTED
SINGLE_QUOTED: /'([^'\\\x00-\x1f]|\\['\\nrt])*'/
INTEGER: /-?(0|[1-9][0-9]{0,17})/
NUMBER: /-?(0|[1-9][0-9]{0,17})(\.[0-9]{1,17})?/
"""
SIMPLE = {
    "string": "STRING",
    "integer": "INTEGER",
    "number": "NUMBER",
    "boolean": '("True" | "False")',
    "null": '"None"',
}
KEYWORDS = {
    "string": frozenset({"minLength", "maxLength", "pattern", "format"}),
    "integer": frozenset(
        {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}
    ),
    "array": frozenset({"items", "prefixItems", "minItems", "maxItems"}),
    "object": frozenset({"properties", "required", "additionalProperties"}),
}
KEYWORDS["number"] = KEYWORDS["integer"]
Key = Callable[[str], str]
"""How a member of this name begins, one of any name with ``""``: a Lark expression."""

ENFORCED = frozenset({"type", "enum", "const", "anyOf", "oneOf", "allOf", "$ref"})
ENFORCED = ENFORCED.union(*KEYWORDS.values())
TYPES = ("string", "number", "boolean", "null", "array", "object")
MAX_STEPS = 10_000
"""Schemas that are read for one function, the properties of those that are merged counted too: what refers to
itself twice doubles at each level."""
MAX_DEPTH = 48
MAX_OPTIONS = 64
"""Of ``oneOf``, each of which is compared with all others."""


class Unenforceable(ValueError):
    """The rules cannot hold a part of the schema. The text says which."""


class ValueRules:
    """The rules of the values of one schema, which are added to ``lines``.

    ``strict``: options of ``oneOf`` that do not exclude each other raise ``Unenforceable``, as does each keyword
    that is not held. Without it, any option will do, and the keywords are ignored.
    """

    def __init__(self, lines: list[str], root: Mapping[str, Any], *, strict: bool) -> None:
        self._lines, self._root, self._strict = lines, root, strict
        self._references: dict[str, str] = {}
        self._steps = 0

    def arguments(self, key: Key) -> str:
        """Return a Lark expression of the members of the whole, an object, as arguments of a call."""
        return self.value({**self._root, "type": "object"}, key=key)

    def value(self, schema: Any, depth: int = 0, key: Key | None = None) -> str:
        """Return a Lark expression of the values of ``schema``, or of the arguments with ``key``."""
        if not isinstance(schema, Mapping):
            return "value" if schema is not False else self._give_up("false")
        self._steps += 1
        if depth > MAX_DEPTH or self._steps > MAX_STEPS:
            return self._give_up("more than its rules can hold")
        keywords = schema.keys() & ASSERTIONS
        if not key and keywords == {"$ref"}:
            return self._reference(schema["$ref"], depth)
        for name in keywords - ENFORCED:
            self._give_up(name)
        if not key and ("const" in schema or isinstance(schema.get("enum"), list)):
            return self._listed(schema)
        if parts := [name for name in ("$ref", "allOf", "anyOf", "oneOf") if schema.get(name)]:
            return self._combined(schema, parts[0], depth, key)
        if key:
            return self._members(schema, key, depth)
        types = schema.get("type")
        if types is None:
            if not keywords:
                return "value"
            types = TYPES
        names = [types] if isinstance(types, str) else list(types)
        return _any_of([self._typed(name, schema, depth) for name in names])

    def _listed(self, schema: Mapping[str, Any]) -> str:
        if (name := unreadable(schema)) is not None:
            self._give_up(f"{name} beside the values of an enum")
        values = listed(schema)
        if not values:
            return self._give_up("an enum of which no value is allowed")
        return _any_of([part for value in values for part in _spellings(value)])

    def _typed(self, name: Any, schema: Mapping[str, Any], depth: int) -> str:
        keywords = schema.keys() & KEYWORDS.get(name, frozenset())
        if name == "array":
            return self._array(schema, depth + 1) if keywords else "list"
        if name == "object":
            return f'("{{" {self._members(schema, _key, depth)} "}}")' if keywords else "dict"
        if not keywords or name not in SIMPLE:
            return SIMPLE.get(name) or self._give_up(f"type {name!r}")
        layout = {"lenient": not self._strict}  # what JSON writes of it, Python reads alike
        leaf = {"type": name, **{word: schema[word] for word in keywords}, "x-guidance": layout}
        return self._rule(f"%json {json.dumps(dates_as_patterns(leaf))}")

    def _array(self, schema: Mapping[str, Any], depth: int) -> str:
        """Return an expression of a list. Items that have a schema of their own are always written."""
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        heads = [self.value(item, depth) for item in (schema.get("prefixItems") or [])[:most]]
        others = schema.get("items", True)
        if others is False or most == len(heads):
            if least > len(heads):
                return self._give_up("minItems of more than there can be")
            return " ".join(['("["', ' ", " '.join(heads), '"]")'])
        item = self._rule(self.value(others, depth))
        head = ' ", " '.join(heads) or item
        count = len(heads) or 1
        high = "" if most is None else most - count
        more = "" if high == 0 else f'(", " {item}){{{max(least - count, 0)},{high}}}'
        body = f"{head} {more}"
        return f'("[" {body} "]")' if heads or least else f'("[" ({body})? "]")'

    def _members(self, schema: Mapping[str, Any], key: Key, depth: int) -> str:
        """Return an expression of an object's members, the required ones first.

        ``first_N`` is the members from the N-th on if none stands before them, ``next_N`` if one does:
        so each comma is where it belongs, in rules of linear size.
        """
        members, required = members_of(schema), set(schema.get("required") or ())
        if not members and schema.get("additionalProperties", True) is not False:
            others = self._rule(self.value(schema.get("additionalProperties", True), depth + 1))
            return f'({key("")} {others} (", " {key("")} {others})*)?'
        number = len(self._lines)
        self._lines += [f'{rule}_{number}_{len(members)}: ""' for rule in ("first", "next")]
        for i, (name, value) in enumerate(members.items()):
            member = f"{key(name)} {self.value(value, depth + 1)} next_{number}_{i + 1}"
            for rule, body in (("first", member), ("next", f'", " {member}')):
                skip = "" if name in required else f" | {rule}_{number}_{i + 1}"
                self._lines.append(f"{rule}_{number}_{i}: {body}{skip}")
        return f"first_{number}_0"

    def _combined(self, schema: Mapping[str, Any], name: str, depth: int, key: Key | None) -> str:
        """Return an expression of a schema that others are a part of, under the keyword ``name``."""
        rest = {key: value for key, value in schema.items() if key != name}
        self._steps += len(rest.get("properties") or ())
        try:
            if name == "$ref":
                return self.value(merge(rest, self._resolve(schema[name])), depth + 1, key)
            if name == "allOf":
                for part in schema[name]:
                    rest = merge(rest, self._whole(part))
                return self.value(rest, depth + 1, key)
            options = schema[name]
            if name == "oneOf":
                resolved = [self._whole(option) for option in options]
                if len(resolved) > MAX_OPTIONS or not disjoint(resolved):
                    self._give_up(name)
            if rest.keys() & ASSERTIONS:
                self._steps += len(options) * len(rest.get("properties") or ())
                if self._steps > MAX_STEPS:
                    return self._give_up("more than its rules can hold")
                options = [merge(rest, self._whole(option)) for option in options]
            return _any_of([self.value(option, depth + 1, key) for option in options])
        except Unmergeable as error:
            self._give_up(f"{name} with {error}")
            return self.value(rest, depth + 1, key)

    def _whole(self, part: Any) -> Any:
        is_reference = isinstance(part, Mapping) and part.keys() & ASSERTIONS == {"$ref"}
        return self._resolve(part["$ref"]) if is_reference else part

    def _reference(self, pointer: str, depth: int) -> str:
        """Return the rule of what ``pointer`` names, which may refer to itself."""
        if pointer not in self._references:
            schema = self._resolve(pointer)
            self._references[pointer] = rule = f"named_{len(self._lines)}"
            at = len(self._lines)
            self._lines.append("")
            self._lines[at] = f"{rule}: {self.value(schema, depth + 1)}"
        return self._references[pointer]

    def _resolve(self, pointer: Any) -> Any:
        try:
            return resolve(self._root, pointer)
        except LookupError:
            self._give_up(f"$ref {str(pointer)[:64]!r}")
            return True

    def _rule(self, body: str) -> str:
        """Return the name of a rule for ``body``, which several rules are made of."""
        if body.isidentifier():
            return body
        rule = f"part_{len(self._lines)}"
        self._lines.append(f"{rule}: {body}")
        return rule

    def _give_up(self, name: str) -> str:
        if self._strict:
            raise Unenforceable(name)
        return "value"


def members_of(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schemas of an object's members, the required ones first."""
    properties = schema.get("properties") or {}
    names = dict.fromkeys((*(schema.get("required") or ()), *properties))
    members = {name: properties.get(name, True) for name in names}
    required = set(schema.get("required") or ())
    return {n: value for n, value in members.items() if value is not False or n in required}


def python_literal(value: Any) -> str:
    """Return ``value`` as Python writes it, texts between double quotes."""
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, list):
        return f"[{', '.join(map(python_literal, value))}]"
    if isinstance(value, dict):
        pairs = (f"{python_literal(key)}: {python_literal(item)}" for key, item in value.items())
        return f"{{{', '.join(pairs)}}}"
    return repr(value)


def _key(name: str) -> str:
    return f'{_any_of(_spellings(name))} ": "' if name else 'STRING ": "'


def _spellings(value: Any) -> list[str]:
    """Return Lark strings of a constant: models write texts between single quotes too."""
    literal = python_literal(value)
    texts = [literal]
    if isinstance(value, str) and "'" not in literal and "\\" not in literal:
        texts.append(f"'{literal[1:-1]}'")
    return [lark_string(text) for text in texts]


def _any_of(options: Sequence[str]) -> str:
    options = list(dict.fromkeys(options))
    return options[0] if len(options) == 1 else f"({' | '.join(options)})"
