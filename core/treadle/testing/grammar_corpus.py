"""The grammars of the suite, what is valid for each kind, and the keywords that libraries forget."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from treadle.api.structured_output import GrammarSpec

__all__ = ("VALID", "ignored", "schemas", "specs", "structural_tag", "tagged")

TEXT: dict[str, Any] = {"type": "string"}
WHOLE: dict[str, Any] = {"type": "integer"}


def _object(**properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


schemas: dict[str, Any] = {
    "string": TEXT,
    "integer": WHOLE,
    "number": {"type": "number"},
    "boolean": {"type": "boolean"},
    "null": {"type": "null"},
    "several types": {"type": ["string", "null", "integer"]},
    "enum": {"enum": ["a", "ab", "日本", "é", "a b"]},
    "enum of all kinds": {"enum": ["a", 1, 12, -1.5, None, True, False]},
    "enum that JSON escapes": {"enum": ['a"b', "a\\b", "\n", " a"]},
    "const": {"const": "yes"},
    "const object": {"const": {"a": [1, "b"]}},
    "lengths": {"type": "string", "minLength": 2, "maxLength": 4},
    "lengths of several types": {"type": ["string", "null"], "maxLength": 2},
    "pattern": {"type": "string", "pattern": "^[a-c]{2,3}-[0-9]+$"},
    "pattern with brackets": {"type": "string", "pattern": "^(a|bb)+$"},
    "pattern with alternatives": {"type": "string", "pattern": "^a+|b+$"},
    "pattern of anything": {"type": "string", "pattern": "^a.{1,3}b$"},
    "pattern of a range": {"type": "string", "pattern": "^[!-~]{1,3}$"},
    "pattern of all but": {"type": "string", "pattern": "^[^a]{1,3}$"},
    "pattern of spaces": {"type": "string", "pattern": r"^a\s?b$"},
    "pattern without anchors": {"type": "string", "pattern": "ab"},
    "date": {"type": "string", "format": "date"},
    "uuid": {"type": "string", "format": "uuid"},
    "minimum": {"type": "integer", "minimum": 5, "maximum": 120},
    "fractions": {"type": "number", "exclusiveMinimum": 0, "maximum": 1.5},
    "multiple": {"type": "integer", "multipleOf": 5},
    "object": _object(name=TEXT, age=WHOLE, ok={"type": "boolean"}),
    "optional properties": {"type": "object", "properties": {"a": WHOLE, "b": TEXT, "ab": TEXT}},
    "some required": {"type": "object", "properties": {"a": WHOLE, "b": TEXT}, "required": ["b"]},
    "no properties": {"type": "object", "properties": {}, "additionalProperties": False},
    "names that JSON escapes": _object(**{'a"b': WHOLE, "a\\": WHOLE}),
    "names beyond ASCII": _object(**{"é日": WHOLE, "a b": WHOLE}),
    "required but unnamed": {"type": "object", "properties": {"a": WHOLE}, "required": ["b"]},
    "map": {"type": "object", "additionalProperties": WHOLE},
    "nested": _object(a=_object(b=_object(c={"type": "array", "items": TEXT, "maxItems": 2}))),
    "array": {"type": "array", "items": WHOLE},
    "items": {"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 2, "maxItems": 3},
    "one item": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 1},
    "no items": {"type": "array", "items": WHOLE, "maxItems": 0},
    "array of objects": {"type": "array", "items": _object(a=WHOLE), "minItems": 1, "maxItems": 3},
    "array of anything": {"type": "array", "maxItems": 2},
    "tuple": {"type": "array", "prefixItems": [WHOLE, TEXT], "items": False, "minItems": 2},
    "any of": {
        "anyOf": [WHOLE, _object(a=TEXT), {"type": "null"}, {"type": "array", "items": WHOLE}]
    },
    "one of": {"oneOf": [WHOLE, TEXT]},
    "one of objects": {
        "oneOf": [_object(kind={"const": "a"}, x=WHOLE), _object(kind={"const": "b"}, y=TEXT)]
    },
    "all of": {"allOf": [{"type": "object", "properties": {"a": WHOLE}, "required": ["a"]}]},
    "all of two": {
        "allOf": [{"type": "string", "minLength": 2}, {"type": "string", "maxLength": 3}]
    },
    "reference": {
        "$ref": "#/$defs/a",
        "$defs": {"a": _object(b={"$ref": "#/$defs/c"}), "c": WHOLE},
    },
    "definitions": {"$ref": "#/definitions/a", "definitions": {"a": TEXT}},
    "tree": {
        "$ref": "#/$defs/node",
        "$defs": {
            "node": {
                "type": "object",
                "properties": {
                    "value": WHOLE,
                    "children": {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 2},
                },
                "required": ["value"],
                "additionalProperties": False,
            }
        },
    },
    "anything": {},
    "annotations": {"type": "integer", "title": "n", "description": "d", "default": 3, "x-y": [1]},
}
"""Every one a valid schema; a backend may refuse any of them, but not ignore a part of it."""

specs: dict[str, GrammarSpec] = {
    name: GrammarSpec("json_schema", json.dumps(schema)) for name, schema in schemas.items()
} | {
    "any object": GrammarSpec("json_object", "{}"),
    "a schema with spaces": GrammarSpec(
        "json_schema", json.dumps(schemas["object"]), {"whitespace_pattern": " {0,2}"}
    ),
    "regex": GrammarSpec("regex", r"(a|bb)+[0-9]{2,3}x?"),
    "regex beyond ASCII": GrammarSpec("regex", "[日é]{2}(ü|😀)?"),
    "regex with escapes": GrammarSpec("regex", r"[0-9]+\.[0-9]{2}[ \t]?(\(a\)|\[b\])"),
    "regex with anchors and digits": GrammarSpec("regex", r"^a\d{1,3}$"),
    "regex of all but": GrammarSpec("regex", r'"[^"\\\n]{0,5}"'),
    "choice": GrammarSpec(
        "choice", json.dumps(["yes", "yes sir", "no", "a.b", "日本", "-1\n", "a|b"])
    ),
    "one choice": GrammarSpec("choice", '["abc"]'),
    "grammar": GrammarSpec("ebnf", 'root ::= item ("," item)*\nitem ::= [a-c] | "(" root ")"'),
    "lark": GrammarSpec("ebnf", 'start: item ("," item)*\nitem: /[a-c]/ | "(" start ")"'),
}

# name -> a schema, and a value that it forbids but a library that forgets the keyword would let
# pass.
ignored: dict[str, tuple[Any, Any]] = {
    "minimum": ({"type": "integer", "minimum": 5}, 4),
    "maximum": ({"type": "integer", "maximum": 5}, 6),
    "exclusiveMinimum": ({"type": "number", "exclusiveMinimum": 5}, 5),
    "exclusiveMaximum": ({"type": "number", "exclusiveMaximum": 5}, 5),
    "multipleOf": ({"type": "integer", "multipleOf": 5}, 6),
    "uniqueItems": ({"type": "array", "items": WHOLE, "uniqueItems": True}, [1, 1]),
    "contains": ({"type": "array", "items": {}, "contains": {"type": "null"}}, [1]),
    "not": ({"type": "string", "not": {"const": "a"}}, "a"),
    "if": ({"if": {"type": "string"}, "then": {"minLength": 2}, "type": "string"}, "a"),
    "propertyNames": ({"type": "object", "propertyNames": {"maxLength": 1}}, {"ab": 1}),
    "minProperties": ({"type": "object", "minProperties": 1}, {}),
    "maxProperties": ({"type": "object", "maxProperties": 1}, {"a": 1, "b": 1}),
    "patternProperties": ({"type": "object", "patternProperties": {"^a": WHOLE}}, {"a": "x"}),
    "dependentRequired": (
        {
            "type": "object",
            "properties": {"a": WHOLE, "b": WHOLE},
            "dependentRequired": {"a": ["b"]},
        },
        {"a": 1},
    ),
    "dependentSchemas": (
        {
            "type": "object",
            "properties": {"a": WHOLE},
            "dependentSchemas": {"a": {"required": ["b"]}},
        },
        {"a": 1},
    ),
    "unevaluatedProperties": (
        {"anyOf": [{"type": "object", "properties": {"a": WHOLE}}], "unevaluatedProperties": False},
        {"a": 1, "b": 1},
    ),
    "format": ({"type": "string", "format": "date"}, "abc"),
    "format ipv4": ({"type": "string", "format": "ipv4"}, "abc"),
    "prefixItems": ({"type": "array", "prefixItems": [WHOLE], "items": TEXT}, ["a"]),
    "minItems": ({"type": "array", "items": WHOLE, "minItems": 2}, [1]),
    "maxItems": ({"type": "array", "items": WHOLE, "maxItems": 1}, [1, 2]),
    "minLength": ({"type": "string", "minLength": 2}, "a"),
    "maxLength": ({"type": "string", "maxLength": 2}, "abc"),
    "pattern and length": ({"type": "string", "pattern": "^a+$", "maxLength": 2}, "aaa"),
    "length and pattern": ({"type": "string", "pattern": "^b+$", "maxLength": 3}, "aa"),
    "format and length": ({"type": "string", "format": "date", "maxLength": 3}, "2024-01-02"),
    "enum and length": ({"type": "string", "enum": ["a", "abc"], "maxLength": 2}, "abc"),
    "enum and type": ({"type": "string", "enum": ["a", 1]}, 1),
    "const and type": ({"type": "string", "const": 1}, 1),
    "type and any of": ({"type": "string", "anyOf": [WHOLE, TEXT]}, 1),
    "properties and any of": (
        {
            "type": "object",
            "properties": {"a": WHOLE},
            "anyOf": [{"required": ["a"]}],
        },
        {},
    ),
    "reference and length": (
        {"$ref": "#/$defs/a", "maxLength": 1, "$defs": {"a": TEXT}},
        "ab",
    ),
    "all of": ({"allOf": [{"type": "string", "minLength": 2}, {"type": "string"}]}, "a"),
    "one of that overlap": ({"oneOf": [WHOLE, {"type": "number"}]}, 1),
    "required and unnamed": (
        {"type": "object", "properties": {"a": WHOLE}, "required": ["b"]},
        {"a": 1},
    ),
    "required without properties": ({"type": "object", "required": ["a"]}, {}),
    "additionalProperties": ({"type": "object", "additionalProperties": False}, {"a": 1}),
    "additionalProperties of a type": (
        {"type": "object", "properties": {"a": WHOLE}, "additionalProperties": WHOLE},
        {"a": 1, "b": "x"},
    ),
    "inside of items": ({"type": "array", "items": {"type": "integer", "minimum": 5}}, [4]),
    "inside of a definition": (
        {"$ref": "#/$defs/a", "$defs": {"a": {"type": "array", "items": {}, "uniqueItems": True}}},
        [1, 1],
    ),
    "a property called not": (_object(**{"not": {"type": "integer", "minimum": 5}}), {"not": 4}),
}


def _json(spec: GrammarSpec, text: str) -> None:
    import jsonschema

    value = json.loads(text)
    schema = {"type": "object"} if spec.kind == "json_object" else json.loads(spec.source)
    # Without a checker of formats: no regex knows which years have a February 29.
    jsonschema.Draft202012Validator(schema).validate(value)


def _regex(spec: GrammarSpec, text: str) -> None:
    assert re.fullmatch(spec.source, text, re.ASCII), f"{text!r} does not match {spec.source!r}"


def _choice(spec: GrammarSpec, text: str) -> None:
    assert text in json.loads(spec.source), f"{text!r} is no choice"


def _grammar(spec: GrammarSpec, text: str) -> None:
    """Lists of a, b, c and lists in brackets: what is left after taking these apart is nothing."""
    remaining = text
    while True:
        reduced = re.sub(r"\((?:[abc](?:,[abc])*)\)", "a", remaining)
        if reduced == remaining:
            break
        remaining = reduced
    assert re.fullmatch(r"[abc](?:,[abc])*", remaining), f"{text!r} is not of the grammar"


VALID: dict[str, Callable[[GrammarSpec, str], None]] = {
    "json_schema": _json,
    "json_object": _json,
    "regex": _regex,
    "choice": _choice,
    "ebnf": _grammar,
}

structural_tag: dict[str, Any] = {
    "structures": [
        {
            "begin": f"<f={name}>",
            "schema": {
                "type": "object",
                "properties": {name: {"type": "boolean"}},
                "required": [name],
                "additionalProperties": False,
            },
            "end": "</f>",
        }
        for name in ("a", "b")
    ],
    "triggers": ["<f="],
}
tagged = {
    "free text, with <f and </f>": True,
    "": True,
    '<f=a>{"a":true}</f>': True,
    'text <f=a>{"a":true}</f> and <f=b>{"b":false}</f>.': True,
    '<f=a>{"b":true}</f>': False,
    "text <f=c>": False,
    '<f=a>{"a":true}': False,
    '<f=a>{"a":true}</f> <f=': False,
}
"""Outputs, and whether they obey the tag."""
