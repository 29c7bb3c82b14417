"""The table of what each backend does with the keywords of a JSON schema, measured on examples."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from typing import Any

from treadle.api.kinds import STRUCTURED_OUTPUT
from treadle.api.structured_output import GrammarCompiler, GrammarSpec
from treadle.plugins import PluginManager
from treadle.testing.grammar_vocabulary import SmallTokenizer

__all__ = ("BACKENDS", "BLOCKS", "EXAMPLES", "outcome", "table")

BACKENDS = ("llguidance", "outlines", "lm-format-enforcer", "xgrammar")
TOKENIZER = SmallTokenizer()
A_B = {"a": {"type": "integer"}, "b": {"type": "integer"}}
AB = {"type": "object", "properties": A_B, "additionalProperties": False}
INTEGERS = {"type": "array", "items": {"type": "integer"}}


def text(**keywords: Any) -> dict[str, Any]:
    return {"type": "string", **keywords}


Example = tuple[dict[str, Any], list[Any], list[Any]]
"""A schema, values that match it, and values that do not."""
EXAMPLES: dict[str, list[Example]] = {
    "`type`": [({"type": "integer"}, [1, -2], ["a", None]), ({"type": ["string", "null"]}, [None], [1])],
    "`enum`, `const`": [({"enum": ["a", 1]}, ["a", 1], ["b"]), ({"const": "a"}, ["a"], ["b"])],
    "`properties`, `required`": [({**AB, "required": ["a"]}, [{"a": 1}, {"a": 1, "b": 2}], [{"b": 2}])],
    "`additionalProperties`": [({"type": "object", "additionalProperties": {"type": "integer"}}, [{"x": 1}], [{"x": "a"}])],
    "`patternProperties`": [({"type": "object", "patternProperties": {"^a": {"type": "integer"}}, "additionalProperties": False}, [{"ab": 1}], [{"b": 1}, {"a": "x"}])],
    "`propertyNames`": [({"type": "object", "propertyNames": {"pattern": "^a"}}, [{"ab": 1}], [{"b": 1}])],
    "`minProperties`, `maxProperties` of known properties": [({**AB, "minProperties": 1}, [{"a": 1}, {"b": 1}], [{}]), ({**AB, "maxProperties": 1}, [{}, {"b": 1}], [{"a": 1, "b": 2}])],
    "`dependentRequired`, `dependencies`": [({**AB, "dependentRequired": {"b": ["a"]}}, [{"a": 1}, {"a": 1, "b": 2}], [{"b": 1}]), ({**AB, "dependencies": {"b": ["a"]}}, [{"a": 1}, {"a": 1, "b": 2}], [{"b": 1}])],
    "`items`": [(INTEGERS, [[], [1, 2]], [["a"]])],
    "`prefixItems`": [({"type": "array", "prefixItems": [{"type": "integer"}], "items": False, "minItems": 1}, [[1]], [["a"], [1, 2]])],
    "`minItems`, `maxItems`": [({**INTEGERS, "minItems": 1, "maxItems": 2}, [[1], [1, 2]], [[], [1, 2, 3]])],
    "`uniqueItems`": [({**INTEGERS, "uniqueItems": True}, [[1, 2]], [[1, 1]])],
    "`contains`": [({**INTEGERS, "contains": {"const": 1}}, [[1, 2]], [[2]])],
    "`minContains`, `maxContains`": [({**INTEGERS, "contains": {"const": 1}, "minContains": 2, "maxContains": 3}, [[1, 2, 1], [1, 1, 1]], [[1], [1, 1, 1, 1]])],
    "`minLength`, `maxLength`": [(text(minLength=1, maxLength=2), ["a", "ab"], ["", "abc"])],
    "`pattern`": [(text(pattern="^a[0-9]+$"), ["a1"], ["a", "b1"])],
    "`pattern` with a length": [(text(pattern="^a+$", maxLength=3), ["aa"], ["aaaa", "b"])],
    "`format`: `date`": [(text(format="date"), ["2024-02-29"], ["2021-02-29", "2021-13-01"])],
    "`format`: `date-time`": [(text(format="date-time"), ["2024-02-29T10:11:12Z"], ["2021-02-29T10:11:12Z"])],
    "`format`: `time`": [(text(format="time"), ["10:11:12Z"], ["25:00:00Z"])],
    "`format`: `uuid`": [(text(format="uuid"), ["123e4567-e89b-42d3-a456-426614174000"], ["123"])],
    "`format`: `email`": [(text(format="email"), ["ab@abc.de"], ["ab"])],
    "`format`: `uri`": [(text(format="uri"), ["https://ab.de/a"], ["ab"])],
    "`format`: `ipv4`": [(text(format="ipv4"), ["127.0.0.1"], ["256.0.0.1"])],
    "`format`: `ipv6`": [(text(format="ipv6"), ["::1"], ["1"])],
    "`format`: `duration`": [(text(format="duration"), ["P1DT2H"], ["1 day"])],
    "`format`: `hostname`": [(text(format="hostname"), ["ab.de"], ["a b"])],
    "`format`: `json-pointer`": [(text(format="json-pointer"), ["/a"], ["a"])],
    "`format`: `regex`": [(text(format="regex"), ["a+"], ["("])],
    "`minimum`, `maximum`": [({"type": "integer", "minimum": 1, "maximum": 20}, [1, 20], [0, 21])],
    "`exclusiveMinimum`, `exclusiveMaximum`": [({"type": "integer", "exclusiveMinimum": 1, "exclusiveMaximum": 9}, [2, 8], [1, 9])],
    "`multipleOf`": [({"type": "integer", "multipleOf": 3}, [0, 9], [1])],
    "`anyOf`": [({"anyOf": [{"type": "integer"}, {"type": "null"}]}, [1, None], ["a"])],
    "`oneOf` of options that exclude each other": [({"oneOf": [{"type": "integer"}, {"type": "null"}]}, [1, None], ["a"])],
    "`oneOf` of others": [({**AB, "oneOf": [{"required": ["a"]}, {"required": ["b"]}]}, [{"a": 1}, {"b": 1}], [{}, {"a": 1, "b": 2}])],
    "`allOf`": [({"allOf": [AB, {"required": ["a"]}]}, [{"a": 1}], [{"b": 1}])],
    "`not` of `enum`, `type`, `required`": [({**text(), "not": {"enum": ["a"]}}, ["b"], ["a"]), ({**AB, "not": {"required": ["a", "b"]}}, [{"a": 1}], [{"a": 1, "b": 2}])],
    "`not` of `multipleOf`": [({"type": "integer", "not": {"multipleOf": 3}}, [1], [3])],
    "`if`, `then`, `else`": [({**AB, "if": {"required": ["a"]}, "then": {"required": ["b"]}}, [{}, {"a": 1, "b": 2}], [{"a": 1}])],
    "`$ref`": [({"$defs": {"x": {"type": "integer"}}, "type": "object", "properties": {"a": {"$ref": "#/$defs/x"}}, "required": ["a"], "additionalProperties": False}, [{"a": 1}], [{"a": "b"}])],
    "`$ref` to itself": [({"type": "object", "properties": {"a": {"$ref": "#"}}, "additionalProperties": False}, [{"a": {"a": {}}}], [{"a": 1}])],
    "`unevaluatedProperties`": [({"type": "object", "allOf": [{"properties": A_B}], "unevaluatedProperties": False}, [{"a": 1}], [{"c": 1}])],
}  # fmt: skip


def outcome(compiler: GrammarCompiler, example: Example) -> str:
    """``enforced``, ``refused``, or what the backend gets wrong."""
    schema, valid, invalid = example
    spec = GrammarSpec("json_schema", json.dumps(schema))
    try:
        if compiler.unsupported_reason(spec) is not None:
            return "refused"
        grammar = compiler.compile(spec)
    except ValueError:
        return "refused"

    def accepts(value: Any) -> bool:
        matcher = grammar.matcher()
        tokens = TOKENIZER.encode(json.dumps(value))
        return all(map(matcher.accept_token, tokens)) and matcher.is_accepting

    if any(map(accepts, invalid)):
        return "accepts invalid values"
    return "enforced" if all(map(accepts, valid)) else "rejects valid values"


def table() -> Iterator[list[str]]:
    """The rows: a keyword, and what each backend does with it."""
    plugins = PluginManager()
    compilers = [
        plugins.create(
            STRUCTURED_OUTPUT, name, tokenizer=TOKENIZER, vocab_size=TOKENIZER.vocab_size
        )
        for name in BACKENDS
    ]
    for keyword, examples in EXAMPLES.items():
        row = [keyword]
        for compiler in compilers:
            outcomes = {outcome(compiler, example) for example in examples}
            row.append(", ".join(sorted(outcomes)) if outcomes != {"enforced"} else "✓")
        yield row


@cache
def markdown() -> str:
    rows = [
        ["Keyword", *(f"`{name}`" for name in BACKENDS)],
        ["---"] * (1 + len(BACKENDS)),
        *table(),
    ]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows) + "\n"


BLOCKS = {"schema_keywords": markdown}
