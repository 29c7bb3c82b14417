"""Every backend reads anchors and classes of patterns alike."""

from __future__ import annotations

import json

import pytest

from treadle.api.kinds import STRUCTURED_OUTPUT
from treadle.api.structured_output import GrammarSpec
from treadle.plugins import PluginManager
from treadle.testing.grammar_vocabulary import SmallTokenizer

TOKENIZER = SmallTokenizer()
SPECS = {
    "regex": (GrammarSpec("regex", r"^a\d$"), "a{}"),
    "schema": (
        GrammarSpec("json_schema", json.dumps({"type": "string", "pattern": r"^a\d$"})),
        '"a{}"',
    ),
}


@pytest.mark.parametrize("backend", ["llguidance", "lm-format-enforcer", "outlines", "xgrammar"])
@pytest.mark.parametrize("name", SPECS)
def test_a_digit_is_one_of_ascii(backend: str, name: str) -> None:
    compiler = PluginManager().create(
        STRUCTURED_OUTPUT, backend, tokenizer=TOKENIZER, vocab_size=TOKENIZER.vocab_size
    )
    spec, text = SPECS[name]
    assert compiler.unsupported_reason(spec) is None
    grammar = compiler.compile(spec)

    def accepts(text: str) -> bool:
        matcher = grammar.matcher()
        return all(matcher.accept_token(i) for i in TOKENIZER.encode(text)) and matcher.is_accepting

    assert accepts(text.format("7"))
    assert not accepts(text.format("\N{ARABIC-INDIC DIGIT SEVEN}"))
