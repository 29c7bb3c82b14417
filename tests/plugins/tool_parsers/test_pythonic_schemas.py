"""What the pythonic grammar enforces of a schema: all that it does not refuse."""

from __future__ import annotations

import json
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
