"""What treadle-lm-format-enforcer keeps belongs to one grammar, and is bounded."""

from __future__ import annotations

import json

import pytest
from lmformatenforcer import JsonSchemaParser
from treadle_lm_format_enforcer import state
from treadle_lm_format_enforcer.compiler import Compiler

from treadle.api.types import GrammarMatcher, GrammarSpec
from treadle.testing.grammar_vocabulary import SmallTokenizer
from treadle.testing.structured_output import allowed_ids


@pytest.fixture(scope="module")
def compiler() -> Compiler:
    tokenizer = SmallTokenizer()
    return Compiler(
        tokenizer, tokenizer.vocab_size, strict=True, max_whitespace=2, max_array_length=20
    )


def schema(**properties: object) -> GrammarSpec:
    source = {"type": "object", "properties": properties, "required": sorted(properties)}
    return GrammarSpec("json_schema", json.dumps(source))


def write(matcher: GrammarMatcher, text: str) -> None:
    for token in SmallTokenizer().encode(text):
        assert matcher.accept_token(token), text


def test_a_pattern_is_gone_with_its_grammar(compiler: Compiler) -> None:
    matcher = compiler.compile(schema(a={"type": "string", "pattern": "^x[0-9]{2}$"})).matcher()
    write(matcher, '{"a": "x12"}')
    assert JsonSchemaParser._Context.regex_parser_cache == {}


def test_a_pattern_has_the_alphabet_of_its_own_grammar(compiler: Compiler) -> None:
    """A character outside of the usual ones is in the alphabet of a grammar that writes it."""
    pattern = {"type": "string", "pattern": "^[^a]$"}
    write(compiler.compile(schema(a=pattern)).matcher(), '{"a": "b"}')
    # U+4E00 is in this grammar's text alone
    write(compiler.compile(schema(a=pattern, b={"const": "一"})).matcher(), '{"a": "一')


def test_rows_that_states_share_are_bounded(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    grammar = compiler.compile(GrammarSpec("regex", "[a-c]{40}"))
    matcher = grammar.matcher()
    allowed = allowed_ids(matcher, SmallTokenizer().vocab_size)
    row_bytes = next(iter(grammar._lines.values())).nbytes
    monkeypatch.setattr(state, "MAX_ROW_BYTES", 4 * row_bytes)
    for _ in range(39):
        write(matcher, "a")
        allowed_ids(matcher, SmallTokenizer().vocab_size)
        assert len(grammar._lines) <= 5
    assert allowed_ids(grammar.matcher(), SmallTokenizer().vocab_size) == allowed
