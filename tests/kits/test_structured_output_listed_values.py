"""Values that a schema leaves, listed if they are few, and texts that may become them."""

from __future__ import annotations

from typing import Any

import pytest

from treadle_structured_output_kit.listed_values import begins, listed_values
from treadle_structured_output_kit.negation import Negation

FLAG = {"type": "boolean"}
OBJECT = {"type": "object", "properties": {"a": FLAG}, "additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "values"),
    [
        ({"enum": [1, "a", None]}, (1, "a", None)),
        ({"enum": [1, 2, 3], "minimum": 2}, (2, 3)),
        ({"type": "integer", "minimum": -0.5, "exclusiveMaximum": 2}, (0, 1)),
        ({"type": "integer", "exclusiveMinimum": 0, "maximum": 1}, (1,)),
        ({"type": ["null", "boolean"]}, (None, False, True)),
        (OBJECT, ({}, {"a": False}, {"a": True})),
        ({**OBJECT, "required": ["a"]}, ({"a": False}, {"a": True})),
        ({"type": "array", "items": {"const": 1}, "maxItems": 2}, ([], [1], [1, 1])),
        ({"anyOf": [{"const": 1}, {"$ref": "#/$defs/two"}]}, (1, 2)),
        ({"allOf": [{"type": "integer"}, {"enum": [1, "a"]}]}, (1,)),
        (False, ()),
        ({}, None),
        ({"type": "string"}, None),
        ({"type": "number", "minimum": 0, "maximum": 1}, None),
        ({"type": "integer", "minimum": 0, "maximum": 100_000}, None),
        ({"type": "integer", "minimum": 0}, None),
        ({**OBJECT, "additionalProperties": True}, None),
        ({**OBJECT, "minProperties": 1}, None),
        ({"type": "array", "items": FLAG, "maxItems": 20}, None),
        ({"$ref": "#/$defs/loop"}, None),
    ],
)
def test_listed_values(schema: Any, values: tuple[Any, ...] | None) -> None:
    loop = {"type": "array", "items": {"$ref": "#/$defs/loop"}, "maxItems": 2}
    root = {"$defs": {"two": {"const": 2}, "loop": loop}}
    assert listed_values([schema], Negation(root).resolve) == values


@pytest.mark.parametrize(
    ("value", "beginnings", "others"),
    [
        ("ab", ['"', '"a', '"ab"', '"ab" '], ["a", '"b', '"ab"x']),
        (12, ["1", "12", "12\n"], ["2", "123", "1.", "12.0"]),
        (2, ["2"], ["20", "-"]),
        (1.5, ["1", "1.5"], ["2", "1.55"]),
        (True, ["t", "true"], ["f", "truex"]),
        ([1, [2]], ["[", "[ 1 , [", "[1,[2]]"], ["[2", "[1]", "[1,[2],", "[1, 2"]),
        ({"a": 1, "b": "x"}, ['{"', '{ "b" : "', '{"a": 1, "b":"x"}'], ['{"c', '{"a": 1}', '{"a":1,"a"']),
        ({}, ["{", "{ }"], ['{"']),
    ],
)  # fmt: skip
def test_begins(value: Any, beginnings: list[str], others: list[str]) -> None:
    for text in beginnings:
        assert begins(text.encode(), value), text
    for text in others:
        assert not begins(text.encode(), value), text
