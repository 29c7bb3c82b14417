"""The default backends enforce the schemas that users have."""

from __future__ import annotations

import datetime
import decimal
import enum
import ipaddress
import json
import pathlib
import re
import uuid
from typing import Annotated, Any, Literal

import pydantic
import pytest
from typing_extensions import TypedDict

from treadle.api.kinds import STRUCTURED_OUTPUT
from treadle.api.sampling_params import StructuredOutputsParams
from treadle.api.structured_output import CompiledGrammar, GrammarCompiler
from treadle.plugins import PluginManager
from treadle.structured_output.spec import grammar_spec
from treadle.testing.grammar_vocabulary import SmallTokenizer

TOKENIZER = SmallTokenizer()
DRAFT_4 = "http://json-schema.org/draft-04/schema#"
DRAFT_7 = "http://json-schema.org/draft-07/schema#"


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Cat(pydantic.BaseModel):
    kind: Literal["cat"]
    lives: int


class Dog(pydantic.BaseModel):
    kind: Literal["dog"]
    age: float | None = None


class Point(TypedDict):
    x: int
    y: int


class Node(pydantic.BaseModel):
    value: int
    next: Node | None = None


FIELDS: dict[str, tuple[Any, Any]] = {
    "str": (str, "a"),
    "int": (int, 1),
    "float": (float, 2.5),
    "bool": (bool, True),
    "None": (None, None),
    "bytes": (bytes, "abc"),
    "list": (list[int], [1, 2]),
    "tuple": (tuple[int, str], [1, "a"]),
    "open tuple": (tuple[int, ...], [1, 2, 3]),
    "dict": (dict[str, int], {"a": 1}),
    "dict of numbers": (dict[int, str], {"1": "a"}),
    "Literal": (Literal["a", 1], 1),
    "Enum": (Color, "red"),
    "Optional": (int | None, None),
    "Union": (int | str | list[str], "a"),
    "discriminated union": (
        Annotated[Cat | Dog, pydantic.Field(discriminator="kind")],
        {"kind": "cat", "lives": 9},
    ),
    "TypedDict": (Point, {"x": 1, "y": 2}),
    "model": (Cat, {"kind": "cat", "lives": 1}),
    "recursive model": (Node, {"value": 1, "next": {"value": 2}}),
    "datetime": (datetime.datetime, "2024-02-29T10:11:12Z"),
    "date": (datetime.date, "2024-02-29"),
    "time": (datetime.time, "10:11:12Z"),
    "timedelta": (datetime.timedelta, "P1DT2H"),
    "UUID": (uuid.UUID, "123e4567-e89b-42d3-a456-426614174000"),
    "Decimal": (decimal.Decimal, "1.5"),
    "Path": (pathlib.Path, "/tmp/a"),
    "SecretStr": (pydantic.SecretStr, "secret"),
    "Pattern": (re.Pattern, "a+"),
    "IPv4Address": (ipaddress.IPv4Address, "127.0.0.1"),
    "IPv4Network": (ipaddress.IPv4Network, "10.0.0.0/8"),
    "IPv6Address": (ipaddress.IPv6Address, "::1"),
    "AnyUrl": (pydantic.AnyUrl, "https://example.com/a"),
    "constrained": (Annotated[int, pydantic.Field(ge=1, lt=10, multiple_of=3)], 6),
    "set": (set[int], [1, 2]),
    "frozenset": (frozenset[str], ["a", "b"]),
    "Any": (Any, {"a": [1]}),
}


@pytest.fixture(scope="module")
def backends() -> list[GrammarCompiler]:
    plugins = PluginManager()
    return [
        plugins.create(
            STRUCTURED_OUTPUT, name, tokenizer=TOKENIZER, vocab_size=TOKENIZER.vocab_size
        )
        for name in ("llguidance", "outlines", "lm-format-enforcer")
    ]


def compile_schema(backends: list[GrammarCompiler], schema: Any) -> CompiledGrammar:
    """The grammar of the first backend that can, as the engine takes it."""
    spec = grammar_spec(StructuredOutputsParams(json=schema))
    reasons = []
    for backend in backends:
        try:
            reason = backend.unsupported_reason(spec)
            if reason is None:
                return backend.compile(spec)
        except ValueError as error:
            reason = str(error)
        reasons.append(f"{backend.name}: {reason}")
    raise ValueError("; ".join(reasons))


def accepts(grammar: CompiledGrammar, value: Any) -> bool:
    matcher = grammar.matcher()
    return all(map(matcher.accept_token, TOKENIZER.encode(json.dumps(value)))) and (
        matcher.is_accepting
    )


@pytest.mark.parametrize("field", FIELDS)
def test_fields_of_pydantic(backends: list[GrammarCompiler], field: str) -> None:
    kind, value = FIELDS[field]
    model = pydantic.create_model("Answer", x=(kind, ...))
    model.model_validate_json(json.dumps({"x": value}))
    grammar = compile_schema(backends, model.model_json_schema())
    assert accepts(grammar, {"x": value})
    assert not accepts(grammar, {"y": value}), "x is required"


def type_and(name: str, value: Any, **others: Any) -> dict[str, Any]:
    return {"type": "string", name: value, **others}


@pytest.mark.parametrize(
    ("schema", "valid", "invalid"),
    [
        (type_and("format", "date"), ["2024-02-29", "2000-02-29", "2021-12-31"], ["2021-02-29", "1900-02-29", "2021-04-31", "2021-13-01"]),
        (type_and("format", "date-time"), ["2024-02-29T00:00:00Z"], ["2021-02-29T00:00:00Z", "2024-02-29"]),
        (type_and("format", "json-pointer"), ["", "/a/~0"], ["a", "/~"]),
        (type_and("format", "relative-json-pointer"), ["0", "1/a", "2#"], ["/a", "01"]),
        (type_and("format", "color"), ["any text"], [1]),
        ({"$schema": DRAFT_7, "definitions": {"a": {"type": "string"}}, "properties": {"x": {"$ref": "#/definitions/a", "maxLength": 1}}}, [{"x": "abc"}], [{"x": 1}]),
        ({"$defs": {"a": {"type": "string"}}, "properties": {"x": {"$ref": "#/$defs/a", "maxLength": 1}}}, [{"x": "a"}], [{"x": "abc"}]),
        ({"$schema": DRAFT_4, "type": "integer", "minimum": 1, "exclusiveMinimum": True}, [2], [1]),
        ({"$schema": DRAFT_4, "not": {"type": ["null", "string", "array", "object", "boolean"]}, "oneOf": [{"minimum": 1, "exclusiveMinimum": True}, {"maximum": 9}]}, [1, 10], [2, 9]),
        ({"oneOf": [{"pattern": "^[a-f]{2}$", "type": "string"}, {"enum": [""]}, {"type": "null"}]}, ["", "ab", None], ["a", 1]),
        ({"type": "object", "oneOf": [{"required": ["a"]}, {"required": ["b"]}]}, [{"a": 1}, {"b": 1}], [{}, {"a": 1, "b": 1}]),
        ({"type": "string", "not": {"pattern": "[^a-c]"}}, ["", "abc"], ["d", "abd"]),
        ({"type": "integer", "not": {"enum": [1, 2]}}, [0, 3], [1, 2]),
        ({"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "additionalProperties": False, "minProperties": 1}, [{"a": 1}, {"b": 1}], [{}]),
        ({"type": "object", "properties": {"a": {}, "b": {}}, "if": {"properties": {"a": {"const": 1}}, "required": ["a"]}, "then": {"required": ["b"]}}, [{"a": 2}, {"a": 1, "b": 1}, {}], [{"a": 1}]),
        ({"type": "object", "properties": {"a": {}, "b": {}}, "dependentRequired": {"b": ["a"]}}, [{"a": 2}, {"a": 1, "b": 1}, {}], [{"b": 1}]),
        ({"type": "object", "propertyNames": {"pattern": "^[a-c]+$"}}, [{"ab": 1}], [{"x": 1}]),
    ],
)  # fmt: skip
def test_keywords(
    backends: list[GrammarCompiler], schema: Any, valid: list[Any], invalid: list[Any]
) -> None:
    grammar = compile_schema(backends[:1], schema)
    assert [value for value in valid if not accepts(grammar, value)] == []
    assert [value for value in invalid if accepts(grammar, value)] == []


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        (
            {"type": "string", "pattern": r"^(\S+\s+){0,99}\S+$", "maxLength": 5000},
            "texts of up to 5000 characters",
        ),
        ({"$schema": DRAFT_4, "if": {"required": ["a"]}, "then": {"required": ["b"]}}, "if, then"),
        ({"not": {"multipleOf": 7}}, "not"),
    ],
)
def test_what_it_cannot_hold_is_refused(
    backends: list[GrammarCompiler], schema: Any, reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        compile_schema(backends[:1], schema)


@pytest.mark.parametrize("name", ["llguidance", "outlines", "lm-format-enforcer", "xgrammar"])
@pytest.mark.parametrize("more", [{}, {"additionalProperties": True}])
def test_an_object_that_names_no_property_may_have_any(name: str, more: Any) -> None:
    if name == "xgrammar":
        pytest.importorskip("xgrammar")
    backend = PluginManager().create(
        STRUCTURED_OUTPUT, name, tokenizer=TOKENIZER, vocab_size=TOKENIZER.vocab_size
    )
    schema = {"type": "object", "properties": {}, **more}
    grammar = compile_schema([backend], {**schema, "title": "x"})
    assert accepts(grammar, {}) and accepts(grammar, {"a": 1, "b": "x"})
    assert not accepts(grammar, 1)


@pytest.mark.parametrize("name", ["llguidance", "outlines", "lm-format-enforcer"])
def test_any_value_stands_for_itself_alone(name: str, backends: list[GrammarCompiler]) -> None:
    """outlines-core writes it as alternatives without brackets: one was the whole output."""
    backend = next(backend for backend in backends if backend.name == name)
    schema = {"type": "object", "properties": {"a": {}, "b": {"title": "x"}}, "required": ["a"]}
    spec = grammar_spec(StructuredOutputsParams(json=schema))
    if backend.unsupported_reason(spec) is not None:
        return
    grammar = backend.compile(spec)
    assert accepts(grammar, {"a": 1}) and accepts(grammar, {"a": "x", "b": None})
    for value in (None, ":", 1, [], {"b": 1}):
        assert not accepts(grammar, value), value
