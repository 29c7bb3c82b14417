"""What no grammar can hold is checked as a value closes: masks and acceptance agree on it."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import pytest
import torch

from treadle.api.kinds import STRUCTURED_OUTPUT
from treadle.api.structured_output import CompiledGrammar, GrammarSpec
from treadle.plugins import PluginManager
from treadle.testing.grammar_vocabulary import SmallTokenizer

TOKENIZER = SmallTokenizer()
SIZE = TOKENIZER.vocab_size
STRINGS = {"type": "string", "pattern": "^[ab]{1,2}$"}
SCHEMAS: dict[str, Any] = {
    "numbers": {"type": "integer", "minimum": 1, "maximum": 30},
    "texts": STRINGS,
    "listed": {"$ref": "#/$defs/color"},
    "flags": {"type": "boolean"},
    "objects": {
        "type": "object",
        "properties": {"a": {"type": "boolean"}, "b": STRINGS},
        "additionalProperties": False,
    },
    "sets": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3, "uniqueItems": True},
    "optional": {"anyOf": [{"type": "null"}, {"type": "array", "items": {"type": "boolean"}, "uniqueItems": True}]},
    "regex": {"type": "string", "format": "regex", "pattern": r"^[(\[a+\])]{1,6}$"},
}  # fmt: skip


@pytest.fixture(scope="module")
def compiler() -> Any:
    return PluginManager().create(
        STRUCTURED_OUTPUT, "llguidance", tokenizer=TOKENIZER, vocab_size=SIZE
    )


def unique_items(items: Any) -> dict[str, Any]:
    return {
        "$defs": {"color": {"enum": ["red", "rose", "blue", "black", "green", "grey"]}},
        "type": "array",
        "items": items,
        "uniqueItems": True,
        "maxItems": 6,
    }


def compile_schema(compiler: Any, schema: Any) -> CompiledGrammar:
    spec = GrammarSpec("json_schema", json.dumps(schema), {"whitespace_pattern": " ?"})
    assert compiler.unsupported_reason(spec) is None
    grammar: CompiledGrammar = compiler.compile(spec)
    return grammar


def accepts(grammar: CompiledGrammar, text: str) -> bool:
    matcher = grammar.matcher()
    return all(map(matcher.accept_token, TOKENIZER.encode(text))) and matcher.is_accepting


def mask(matcher: Any) -> list[int]:
    row = torch.zeros(1, -(-SIZE // 32), dtype=torch.int32)
    matcher.fill_bitmask(row, 0)
    return [i for i in range(SIZE) if int(row[0, i // 32]) >> (i % 32) & 1]


@pytest.mark.parametrize("name", SCHEMAS)
def test_outputs_obey(compiler: Any, name: str) -> None:
    grammar = compile_schema(compiler, unique_items(SCHEMAS[name]))
    rng = random.Random(name)
    num_done = 0
    for _ in range(12):
        matcher = grammar.matcher()
        text = b""
        for _ in range(80):
            if matcher.is_accepting and (matcher.is_terminated or rng.random() < 0.5):
                break
            allowed = mask(matcher)
            for token in rng.sample(range(SIZE), 8):  # the mask says what is accepted
                assert matcher.accept_token(token) == (token in allowed)
                if token in allowed:
                    matcher.rollback(1)
            if not allowed:
                break
            token = rng.choice(allowed)
            assert matcher.accept_token(token)
            text += TOKENIZER.token_bytes(token)
        if matcher.is_accepting:
            num_done += 1
            items = json.loads(text)
            assert len({json.dumps(item, sort_keys=True) for item in items}) == len(items)
            if name == "regex":
                list(map(re.compile, items))
    assert num_done, "some walks come to an end"


@pytest.mark.parametrize(
    ("items", "valid", "invalid"),
    [
        ({"type": "number"}, "[1, 10, 2]", "[1, 1.0]"),
        ({"type": "number"}, "[]", "[10, 2, 10]"),
        ({"type": "string"}, '["a", "b", "\\"]"]', '["a", "\\u0061"]'),
        ({}, '[1, true, "1", [1], {"a": 1}]', '[{"a": 1, "b": 2}, {"b": 2, "a": 1}]'),
        ({}, "[[1, 1], [1]]", "[[1], [1]]"),
        ({"type": "array", "uniqueItems": True}, "[[1], [2, 1]]", "[[1, 1]]"),
    ],
)
def test_equal_items(compiler: Any, items: Any, valid: str, invalid: str) -> None:
    grammar = compile_schema(compiler, unique_items(items))
    assert accepts(grammar, valid)
    assert not accepts(grammar, invalid)


def test_only_where_the_schema_says(compiler: Any) -> None:
    values = {"type": "array", "items": {"type": "integer"}}
    schema = {
        "type": "object",
        "properties": {"a": {**values, "uniqueItems": True}, "b": values, "c": {"$ref": "#"}},
    }
    grammar = compile_schema(compiler, schema)
    assert accepts(grammar, '{"a": [1, 2], "b": [1, 1], "c": {"a": [1], "b": [2, 2]}}')
    assert not accepts(grammar, '{"a": [1, 1]}')
    assert not accepts(grammar, '{"c": {"c": {"a": [1, 1]}}}')


def test_a_check_that_depends_on_other_values_is_refused(compiler: Any) -> None:
    options = [{"uniqueItems": True, "maxItems": 3}, {"type": "array", "minItems": 5}]
    spec = GrammarSpec("json_schema", json.dumps({"type": "array", "anyOf": options}))
    assert "inside anyOf at $" in str(compiler.unsupported_reason(spec))


def test_rollback(compiler: Any) -> None:
    grammar = compile_schema(compiler, unique_items({"type": "integer"}))
    matcher = grammar.matcher()
    tokens = TOKENIZER.encode("[1, 2")
    assert all(map(matcher.accept_token, tokens))
    matcher.rollback(len(tokens))
    assert all(map(matcher.accept_token, TOKENIZER.encode("[2, 1]")))
    assert matcher.is_accepting


@pytest.mark.parametrize(
    ("contains", "valid", "invalid"),
    [
        ({}, "[1]", "[]"),
        ({"const": 1}, "[2, 1.0]", "[2, true]"),
        ({"enum": ["a", None]}, '[1, "a", 2]', '["b"]'),
        ({"type": "integer", "minimum": 5, "maximum": 6}, "[1, 5.0]", "[4, 5.5, 7]"),
        ({"properties": {"a": {"const": 1}}, "required": ["a"], "type": "object"},
         '[{}, {"b": 2, "a": 1}]', '[{"a": 2}, {"b": 1}, [1]]'),
        ({"anyOf": [{"type": "null"}, {"type": "array"}]}, "[[]]", "[{}, false]"),
        ({"allOf": [{"minimum": 2}, {"type": "number"}]}, '["a", 2]', '["a", 1]'),
    ],
)  # fmt: skip
def test_contains(compiler: Any, contains: Any, valid: str, invalid: str) -> None:
    schema = {"type": "array", "items": {}, "contains": contains}
    nested = {"type": "object", "properties": {"a": {"$ref": "#/$defs/b"}}, "$defs": {"b": schema}}
    for root, form in ((schema, "%s"), (nested, '{"a": %s}')):
        grammar = compile_schema(compiler, root)
        assert accepts(grammar, form % valid)
        assert not accepts(grammar, form % invalid)


def test_the_last_item_is_one_that_is_wanted(compiler: Any) -> None:
    items = {"enum": ["red", "rose", "blue"]}
    schema = {"type": "array", "items": items, "contains": {"const": "blue"}, "maxItems": 2}
    grammar = compile_schema(compiler, schema)
    assert accepts(grammar, '["red", "blue"]') and accepts(grammar, '["blue"]')
    matcher = grammar.matcher()
    assert all(map(matcher.accept_token, TOKENIZER.encode('["red", "')))
    assert {TOKENIZER.token_bytes(token)[:1] for token in mask(matcher)} == {b"b"}


@pytest.mark.parametrize(
    "contains", [False, {"pattern": "a"}, {"properties": {"a": {"items": {}}}}, {"contains": {}}]
)
def test_what_contains_cannot_read_is_refused(compiler: Any, contains: Any) -> None:
    spec = GrammarSpec("json_schema", json.dumps({"type": "array", "contains": contains}))
    assert "contains" in str(compiler.unsupported_reason(spec))


def test_how_many_items_match(compiler: Any) -> None:
    counted = {
        "type": "array", "items": {"type": "integer"}, "contains": {"minimum": 5, "type": "integer"},
        "minContains": 2, "maxContains": 3,
    }  # fmt: skip
    grammar = compile_schema(compiler, counted)
    for text in ("[5, 1, 6]", "[5, 6, 7]", "[1, 5, 2, 6, 3, 7, 4]"):
        assert accepts(grammar, text)
    for text in ("[]", "[5, 1]", "[5, 6, 7, 8]"):
        assert not accepts(grammar, text)
    none = {**counted, "minContains": 0, "maxContains": 0}
    assert accepts(compile_schema(compiler, none), "[1, 2]")
    assert not accepts(compile_schema(compiler, none), "[1, 5]")
    alone = {"type": "array", "items": {"type": "integer"}, "minContains": 2}
    assert accepts(compile_schema(compiler, alone), "[]"), "without contains it says nothing"


TAGGED = {
    "type": "object",
    "properties": {"k": {"enum": ["a", "b"]}},
    "required": ["k"],
    "additionalProperties": False,
}
LETTERS = {"type": "string", "pattern": "^[ab]$"}
TIGHT: dict[str, dict[str, Any]] = {
    "one of texts": {"items": {"enum": ["red", "rose", "blue", 1]}, "contains": {"const": "rose"}, "maxItems": 2},
    "a type": {"items": {"type": ["string", "null"], "maxLength": 2}, "contains": {"type": "null"}, "maxItems": 2},
    "two of three": {"items": {"enum": [1, 12, 123, True]}, "contains": {"enum": [123, True]}, "minContains": 2,
                     "maxItems": 3},
    "an array": {"items": {"anyOf": [{"type": "array", "maxItems": 1, "items": {"enum": [1]}}, {"enum": [1, 2]}]},
                 "contains": {"type": "array"}, "maxItems": 2},
    "numbers": {"items": {"type": "integer", "minimum": 0, "maximum": 99}, "contains": {"minimum": 50}, "maxItems": 2},
    "many numbers": {"items": {"type": "integer", "minimum": 0, "maximum": 9000}, "contains": {"minimum": 8990},
                     "maxItems": 2},
    "no more": {"items": {"enum": ["x", "y", "z"]}, "contains": {"const": "y"}, "maxContains": 1, "minItems": 3,
                "maxItems": 3},
    "no more numbers": {"items": {"type": "integer", "maximum": 30}, "contains": {"minimum": 5}, "maxContains": 1,
                        "minItems": 2, "maxItems": 3},
    "objects": {"items": TAGGED, "contains": {"properties": {"k": {"const": "b"}}, "required": ["k"]}, "maxItems": 2},
    "open objects": {"items": {**TAGGED, "properties": {"k": {"enum": ["a", "b"]}, "n": {"type": "integer"}}},
                     "contains": {"properties": {"k": {"const": "b"}}, "required": ["k"]}, "maxItems": 1},
    "listed texts in free ones": {"items": {"type": "string", "maxLength": 4}, "contains": {"enum": ["foo", "fob"]},
                                  "maxItems": 2},
    "different flags": {"items": {"type": "boolean"}, "uniqueItems": True, "minItems": 2},
    "different numbers": {"items": {"enum": [1, 2, 1.5]}, "uniqueItems": True, "minItems": 3},
    "fewer than may be": {"items": {"enum": [1, 2, 3]}, "uniqueItems": True, "maxItems": 6},
    "different objects": {"items": TAGGED, "uniqueItems": True, "minItems": 2},
    "different letters": {"items": LETTERS, "uniqueItems": True, "minItems": 2},
    "different words": {"items": {"type": "string", "pattern": "^[ab]{1,2}$"}, "uniqueItems": True, "minItems": 5},
    "both": {"items": {"type": "integer", "minimum": 0, "maximum": 20}, "contains": {"minimum": 18},
             "minContains": 3, "uniqueItems": True, "maxItems": 4},
    "first items": {"prefixItems": [{"enum": ["a", "b"]}, {"enum": ["a", "b"]}], "items": False,
                    "contains": {"const": "b"}, "minItems": 2},
}  # fmt: skip


@pytest.mark.parametrize("name", TIGHT)
def test_no_walk_comes_to_a_dead_end(compiler: Any, name: str) -> None:
    """Nothing begins that could not be closed, and what a mask allows is accepted."""
    grammar = compile_schema(compiler, {"type": "array", **TIGHT[name]})
    for seed in range(12):
        rng, matcher = random.Random(seed), grammar.matcher()
        for _ in range(60):
            if matcher.is_accepting and (matcher.is_terminated or rng.random() < 0.3):
                break
            allowed = mask(matcher)
            assert allowed
            for token in rng.sample(allowed, min(4, len(allowed))):
                assert matcher.accept_token(token)
                matcher.rollback(1)
            token = rng.choice(allowed)
            assert matcher.accept_token(token)


def test_numbers_leave_every_way_that_is_open(compiler: Any) -> None:
    schema = {
        "type": "array",
        "items": {"type": "integer"},
        "contains": {"minimum": 50},
        "maxItems": 2,
    }
    for text in ("[4, 50]", "[50, 4]", "[-7, 400]", "[1, 1000000]"):
        assert accepts(compile_schema(compiler, schema), text)
    objects = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {}}}
    schema = {
        "type": "array", "items": objects, "maxItems": 1,
        "contains": {"properties": {"a": {"minimum": 50}}, "required": ["a"]},
    }  # fmt: skip
    grammar = compile_schema(compiler, schema)
    assert accepts(grammar, '[{"a": 400, "b": {"a": [1, "}"]}, "c": 1}]')
    assert not accepts(grammar, '[{"a": 49, "b": 1}]')


def test_a_token_that_opens_and_closes_an_array_is_checked(compiler: Any) -> None:
    schema = {"type": "array", "items": {}, "contains": {"const": 1}}
    matcher = compile_schema(compiler, schema).matcher()
    assert any(b"[" in text and b"]" in text for text in map(TOKENIZER.token_bytes, range(SIZE)))
    for token in mask(matcher):
        assert matcher.accept_token(token)
        matcher.rollback(1)
