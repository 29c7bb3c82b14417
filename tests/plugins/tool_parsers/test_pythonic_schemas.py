"""What the pythonic grammar enforces of a schema: all that it does not refuse."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from typing import Any

import jsonschema
import pytest

from treadle.api.kinds import STRUCTURED_OUTPUT, TOOL_PARSERS
from treadle.api.parsers import Tool, ToolCallDelta
from treadle.api.structured_output import GrammarSpec
from treadle.errors import RequestError
from treadle.plugins import PluginManager
from treadle.testing.grammar_corpus import ignored, schemas
from treadle.testing.grammars import ByteTokenizer, sample_texts

PLUGINS = PluginManager()
TOKENIZER: Any = ByteTokenizer()
WHOLE = {"type": "integer"}
SEVERAL: dict[str, Any] = {
    "a part of another": {
        "$ref": "#/$defs/a",
        "properties": {"b": {"type": "string"}},
        "required": ["b"],
        "$defs": {"a": {"type": "object", "properties": {"a": WHOLE}, "required": ["a"]}},
    },
    "options beside what is common": {
        "type": "object",
        "properties": {"kind": {"enum": ["x", "y"]}},
        "required": ["kind"],
        "anyOf": [{"required": ["left"], "properties": {"left": WHOLE}}, {"required": ["right"]}],
    },
    "bounds of both": {
        "allOf": [{"type": "number", "minimum": 2}, {"type": "integer", "maximum": 4}]
    },
    "an enum of one type": {"type": "string", "enum": ["a", 1, None]},
    "a tuple and more": {
        "type": "array",
        "prefixItems": [WHOLE],
        "items": {"type": "null"},
        "minItems": 3,
    },
    "a map of lists": {"type": "object", "additionalProperties": {"type": "array", "items": WHOLE}},
}
ENDLESS = {
    "pattern with alternatives",
    "pattern without anchors",
}  # a walk does not come to their end


def tool(schema: Any, *, strict: bool = True) -> Tool:
    inner = dict(schema)
    definitions = {name: inner.pop(name) for name in ("$defs", "definitions") if name in inner}
    parameters = {
        "type": "object",
        "properties": {"v": inner},
        "required": ["v"],
        "additionalProperties": False,
        **definitions,
    }
    return Tool("f", "", parameters, strict=strict)


def spec_of(tool: Tool, choice: str = "required") -> GrammarSpec:
    parser = PLUGINS.create(TOOL_PARSERS, "pythonic", tokenizer=TOKENIZER, tools=[tool])
    spec = parser.grammar_for_tool_choice(choice)
    assert spec is not None
    return spec


@pytest.mark.parametrize("name", sorted({*schemas, *SEVERAL} - ENDLESS))
def test_a_strict_call_matches_its_schema(name: str) -> None:
    function = tool({**schemas, **SEVERAL}[name])
    spec_of(function, "auto")
    for output in sample_texts(PLUGINS, spec_of(function), 4):
        parser = PLUGINS.create(TOOL_PARSERS, "pythonic", tokenizer=TOKENIZER, tools=[function])
        arguments: dict[int, str] = {}
        for delta in [*parser.feed(output, ()), *parser.finish()]:
            assert isinstance(delta, ToolCallDelta), output
            arguments[delta.index] = arguments.get(delta.index, "") + delta.arguments
        for text in arguments.values():
            checks = jsonschema.FormatChecker()
            jsonschema.validate(json.loads(text), dict(function.parameters), format_checker=checks)


@pytest.mark.parametrize("name", sorted(ignored))
def test_no_keyword_is_forgotten(name: str) -> None:
    """Of a strict function: it is enforced, or refused by name."""
    schema, forbidden = ignored[name]
    try:
        spec = spec_of(tool(schema))
    except RequestError as error:
        assert error.param == "tools" and "cannot be enforced" in str(error)
        assert spec_of(tool(schema, strict=False))
        return
    compiler = PLUGINS.create(STRUCTURED_OUTPUT, "llguidance", tokenizer=TOKENIZER, vocab_size=256)
    try:
        matcher = compiler.compile(spec).matcher()
    except ValueError as error:
        assert "Unsatisfiable schema" in str(error)
        return
    output = f"[f(v={forbidden!r})]"
    assert not all(matcher.accept_token(byte) for byte in output.encode()), output


def test_a_reference_that_does_not_lead_anywhere_is_refused() -> None:
    for pointer in ("#/$defs/none", "https://example.com/schema", "#/properties/v/0"):
        with pytest.raises(RequestError, match="cannot be enforced"):
            spec_of(tool({"$ref": pointer}))
        assert spec_of(tool({"$ref": pointer}, strict=False))


def test_a_schema_without_an_end_is_refused() -> None:
    deep: Any = {"type": "string"}
    for _ in range(60):
        deep = {"type": "array", "items": deep}
    with pytest.raises(RequestError, match="more than its rules can hold"):
        spec_of(tool(deep))
    wide = {
        "type": "object",
        "properties": {f"p{i}": WHOLE for i in range(200)},
        "anyOf": [{"required": [f"p{i}"]} for i in range(200)],
    }
    with pytest.raises(RequestError, match="more than its rules can hold"):
        spec_of(tool(wide))


TWICE: Any = {"type": "object", "anyOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/a"}]}
DOUBLING: dict[str, Any] = {
    "options": {"$ref": "#/$defs/a", "$defs": {"a": TWICE}},
    "wide options": {
        "$ref": "#/$defs/a",
        "$defs": {"a": {**TWICE, "properties": {f"p{i}": WHOLE for i in range(900)}}},
    },
    "parts": {"$ref": "#/$defs/a", "$defs": {"a": {"allOf": TWICE["anyOf"]}}},
    "exclusive options": {"oneOf": [{"const": i} for i in range(5_000)]},
}


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("name", DOUBLING)
def test_a_schema_that_doubles_takes_no_time(name: str, strict: bool) -> None:
    """It is read where requests are read: others would wait for it."""
    start = time.thread_time()
    with suppress(RequestError):
        assert len(spec_of(tool(DOUBLING[name], strict=strict)).source) < 2**21
    assert time.thread_time() - start < 5  # without a limit it would not end


BROKEN: list[Any] = [
    {"type": "array", "prefixItems": 5},
    {"type": "array", "minItems": "x"},
    {"allOf": 5},
    {"type": ["string", ["x"]]},
    {"allOf": [{"minimum": 1}, {"minimum": "x"}]},
    {"$ref": ["x"]},
    {"type": "object", "properties": [1]},
    {"type": "object", "required": 5},
]


@pytest.mark.parametrize("schema", BROKEN, ids=str)
def test_what_is_no_schema_is_the_client_s_fault(schema: Any) -> None:
    for strict in (False, True):
        with pytest.raises(RequestError, match=r"no JSON schema|cannot be enforced") as error:
            spec_of(tool(schema, strict=strict))
        assert error.value.param == "tools"


def test_options_that_exclude_each_other_are_enforced() -> None:
    """As pydantic writes unions that a field tells apart."""
    kinds = {
        kind: {
            "type": "object",
            "properties": {"kind": {"const": kind}, "size": WHOLE},
            "required": ["kind"],
            "additionalProperties": False,
        }
        for kind in ("cat", "dog")
    }
    options = [{"$ref": f"#/$defs/{kind}"} for kind in kinds]
    function = tool({"oneOf": options, "discriminator": {"propertyName": "kind"}, "$defs": kinds})
    seen = {
        text.partition('"kind": "')[2][:3] for text in sample_texts(PLUGINS, spec_of(function), 12)
    }
    assert seen - {""} == set(kinds)
    with pytest.raises(RequestError, match="oneOf"):
        spec_of(tool({"oneOf": [{"type": "integer"}, {"type": "number"}]}))


def test_texts_may_stand_between_either_quotes() -> None:
    compiler = PLUGINS.create(STRUCTURED_OUTPUT, "llguidance", tokenizer=TOKENIZER, vocab_size=256)
    schema = {
        "type": "object",
        "properties": {"city": {"enum": ["Paris"]}, "note": {"type": "string"}},
    }
    for choice in ("auto", "required"):
        grammar = compiler.compile(spec_of(tool(schema), choice))
        for quote in "\"'":
            matcher = grammar.matcher()
            output = "[f(v={'city': 'Paris', 'note': 'one'})]".replace("'", quote)
            assert (
                all(matcher.accept_token(byte) for byte in output.encode()) and matcher.is_accepting
            )
