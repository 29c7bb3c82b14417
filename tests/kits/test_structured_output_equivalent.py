"""A schema that was rewritten accepts what ``jsonschema`` accepts of the original."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from jsonschema import Draft7Validator, Draft202012Validator

from treadle.api.kinds import STRUCTURED_OUTPUT
from treadle.api.structured_output import GrammarSpec
from treadle.plugins import PluginManager
from treadle.testing.grammar_vocabulary import SmallTokenizer
from treadle_structured_output_kit.equivalent import rewrite
from treadle_structured_output_kit.json_schema import subschemas

DRAFT_7 = "http://json-schema.org/draft-07/schema#"
NAMES = ("a", "b", "c")
SCALARS = (None, True, False, 0, 1, 2.5, 3, "", "a", "b", "ab", "zz", "2024-02-29", "2021-02-29")
TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
GONE = {
    "not",
    "if",
    "oneOf",
    "dependencies",
    "dependentRequired",
    "dependentSchemas",
    "propertyNames",
}


class Generator:
    """Random schemas of the keywords that are rewritten and of those that this brings about."""

    def __init__(self, seed: int, draft: int) -> None:
        self.random = random.Random(seed)
        self.is_draft_7 = draft == 7
        self.has_definitions = True

    def root(self) -> dict[str, Any]:
        self.has_definitions = False
        definitions = {name: self.schema(1) for name in "xy"}  # they refer to nothing
        self.has_definitions = True
        head = {"$schema": DRAFT_7} if self.is_draft_7 else {}
        return {**head, **self.schema(3), "definitions": definitions}

    def schema(self, depth: int) -> dict[str, Any]:
        known = self.keywords(depth)
        return {name: known[name]() for name in self.random.sample(sorted(known), self.size(1, 4))}

    def size(self, low: int = 0, high: int = 3) -> int:
        return self.random.randint(low, high)

    def part(self, depth: int) -> Any:
        if depth == 0 or self.random.random() < 0.1:
            return self.random.choice((True, False, {"type": "string"}, {"enum": ["a", 1]}))
        return self.schema(depth - 1)

    def names(self) -> list[str]:
        return self.random.sample(NAMES, self.size(0, 2))

    def mapping(self, value: Callable[[], Any]) -> dict[str, Any]:
        return {name: value() for name in self.names()}

    def keywords(self, depth: int) -> dict[str, Callable[[], Any]]:
        def part() -> Any:
            return self.part(depth)

        def parts() -> list[Any]:
            return [part() for _ in range(self.size(1, 3))]

        choice = self.random.choice
        found: dict[str, Callable[[], Any]] = {
            "type": lambda: choice((choice(TYPES), self.random.sample(TYPES, 2))),
            "enum": lambda: self.random.sample(SCALARS, self.size(1, 3)),
            "const": lambda: choice((*SCALARS, ["a"], {"a": 1})),
            "items": part,
            "minItems": self.size,
            "maxItems": self.size,
            "uniqueItems": lambda: choice((True, False)),
            "minLength": self.size,
            "maxLength": self.size,
            "pattern": lambda: choice(("[^a-b]", "^a", "[a-y]")),
            "minimum": self.size,
            "exclusiveMaximum": self.size,
            "format": lambda: choice(("color", "date")),
            "minProperties": self.size,
            "maxProperties": self.size,
            "required": self.names,
            "properties": lambda: self.mapping(part),
            "additionalProperties": lambda: choice((False, part())),
            "propertyNames": lambda: choice(
                (True, False, {"enum": self.names()}, {"pattern": "^[ab]"}, {"maxLength": 0})
            ),
        }
        if self.has_definitions:
            found["$ref"] = lambda: choice(("#/definitions/x", "#/definitions/y"))
        if depth:
            found |= {"oneOf": parts, "anyOf": parts, "allOf": parts, "not": part}
            found["if"] = found["then"] = found["else"] = part
            if self.is_draft_7:
                found["dependencies"] = lambda: self.mapping(lambda: choice((self.names(), part())))
            else:
                found["dependentRequired"] = lambda: self.mapping(self.names)
                found["dependentSchemas"] = lambda: self.mapping(part)
        return found

    def value(self, depth: int = 2) -> Any:
        kind = self.size(0, 4) if depth else 0
        if kind < 2:
            return self.random.choice(SCALARS)
        if kind == 2:
            return [self.value(depth - 1) for _ in range(self.size(0, 3))]
        names = self.random.sample(NAMES, self.size(0, 3))
        return {name: self.value(depth - 1) for name in names}


def names_of(schema: Any) -> Counter[str]:
    found: Counter[str] = Counter()
    for _, part in subschemas(schema):
        found.update(list(part) if isinstance(part, dict) else [])
    return found


@pytest.mark.parametrize(("draft", "validator"), [(7, Draft7Validator), (12, Draft202012Validator)])
def test_it_accepts_the_same(draft: int, validator: type[Any], num_schemas: int = 400) -> None:
    generator = Generator(1, draft)
    before: Counter[str] = Counter()
    after: Counter[str] = Counter()
    for _ in range(num_schemas):
        schema = generator.root()
        new = rewrite(schema)
        before += names_of(schema)
        after += names_of(new)
        checker = validator.FORMAT_CHECKER
        old_validator = validator(schema, format_checker=checker)
        new_validator = validator(new, format_checker=checker)
        for _ in range(12):
            value = generator.value()
            assert new_validator.is_valid(value) == old_validator.is_valid(value), (
                f"{json.dumps(value)} and {json.dumps(schema)}, rewritten {json.dumps(new)}"
            )
    for name in GONE & before.keys():
        assert after[name] < before[name], f"{name} is rewritten"


@pytest.mark.parametrize(("draft", "validator"), [(7, Draft7Validator), (12, Draft202012Validator)])
def test_what_is_compiled_accepts_nothing_else(draft: int, validator: type[Any]) -> None:
    tokenizer = SmallTokenizer()
    compiler = PluginManager().create(
        STRUCTURED_OUTPUT, "llguidance", tokenizer=tokenizer, vocab_size=tokenizer.vocab_size
    )
    generator = Generator(2, draft)
    num_accepted = 0
    for _ in range(150):
        schema = generator.root()
        spec = GrammarSpec("json_schema", json.dumps(schema))
        try:
            if compiler.unsupported_reason(spec) is not None:
                continue
            grammar = compiler.compile(spec)
        except ValueError:
            continue
        for _ in range(4):
            value, matcher = generator.value(), grammar.matcher()
            tokens = tokenizer.encode(json.dumps(value))
            if all(map(matcher.accept_token, tokens)) and matcher.is_accepting:
                num_accepted += 1
                assert validator(schema, format_checker=validator.FORMAT_CHECKER).is_valid(value), (
                    f"{json.dumps(value)} and {json.dumps(schema)}"
                )
    assert num_accepted > 100
