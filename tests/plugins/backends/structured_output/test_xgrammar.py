"""What the backend ``xgrammar`` refuses, when it is tried, and what it says without its library."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from typing import Any

import pytest
from treadle_xgrammar import compiler as module
from treadle_xgrammar.compiler import Compiler

from treadle.api.structured_output import GrammarSpec
from treadle.plugins import PluginManager
from treadle.structured_output.manager import preferred_order
from treadle.testing.grammar_vocabulary import SmallTokenizer

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"type": "object", "required": ["a"]}, "which is no property"),
    ({"type": "number", "multipleOf": 1.0}, "numbers that are not whole"),
    ({"type": "string", "pattern": "^a"}, "without anchors"),
    ({"type": "string", "pattern": "^a$", "minLength": 1}, "another rule"),
    ({"type": "string", "format": "uri-reference"}, "format uri-reference"),
    ({"properties": {"a": {}}}, "without a type"),
    ({"type": ["string", "integer"], "minimum": 1}, "several types"),
    ({"$ref": "#there", "type": "object"}, r"beside \$ref"),
    ({"properties": {"a": {"$ref": "#there"}}, "type": "object"}, "a path in the schema"),
    ({"enum": [{"a": 1}]}, "objects and lists"),
    ({"enum": ["a", 1], "type": "string"}, "type beside enum"),
    ({"anyOf": [{"type": "string"}], "type": "object"}, "type beside anyOf"),
    ({"not": {"type": "string"}}, "^not, at"),
    (
        {"type": "array", "items": {"type": "string", "maxLength": 1001}},
        "more than 1000 characters, at",
    ),
    ({"type": "string", "minLength": 1001}, "more than 1000 characters"),
    ({"type": "string", "pattern": "^[^@]{0,255}$"}, "counts more than 20 characters"),
]


def compiler() -> Compiler:
    return Compiler(SmallTokenizer(), 512, strict=True)


@pytest.mark.parametrize(("schema", "message"), REFUSED, ids=range(len(REFUSED)))
def test_what_the_library_would_ignore_is_refused(schema: dict[str, Any], message: str) -> None:
    reason = compiler().unsupported_reason(GrammarSpec("json_schema", json.dumps(schema)))
    assert re.search(message, reason or "")
    lenient = GrammarSpec("json_schema", json.dumps(schema), {"strict": False})
    assert compiler().unsupported_reason(lenient) is None


@pytest.mark.parametrize(
    "schema",
    [
        {"minLength": 1},
        {"maxLength": 255},
        {"minLength": 1, "maxLength": 3},
        {"pattern": "^.{0,20}$"},
    ],
    ids=range(4),
)
def test_texts_with_a_length_are_json(schema: dict[str, Any]) -> None:
    """The library alone takes control characters there."""
    pytest.importorskip("xgrammar")
    root = {"type": "object", "properties": {"maxLength": {"type": "string", **schema}}}
    tokenizer = SmallTokenizer()
    grammar = compiler().compile(GrammarSpec("json_schema", json.dumps(root)))
    for text, is_valid in (
        ("a", True),
        ("é日", True),
        ("", "minLength" not in schema),
        ("\x01", False),
        ("日\n", False),
        ('a"b', False),
        ("\n", False),
    ):
        matcher = grammar.matcher()
        tokens = tokenizer.encode(f'{{"maxLength": "{text}"}}')
        assert (all(map(matcher.accept_token, tokens)) and matcher.is_accepting) == is_valid, text


def test_special_tokens_are_no_text() -> None:
    tag = {"format": {"type": "const_string", "value": "<tool>"}}
    spec = GrammarSpec("structural_tag", json.dumps(tag))
    assert "<tool>" in (compiler().unsupported_reason(spec) or "")


def test_it_is_tried_by_name_only() -> None:
    assert "xgrammar" not in preferred_order(PluginManager())
    assert "xgrammar" in PluginManager().keys("structured_output")


def test_without_its_library_it_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    reason = compiler().unsupported_reason(GrammarSpec("regex", "a"))
    assert "pip install" in (reason or "")


CRASH = """
import faulthandler
from treadle.testing.grammar_vocabulary import SmallTokenizer
from treadle_xgrammar.compiler import Compiler
faulthandler.enable()
Compiler(SmallTokenizer(), 512, strict=True)
faulthandler._sigsegv()
"""


def test_a_crash_still_names_its_line() -> None:
    """The library has a handler of its own, which knows nothing of Python."""
    pytest.importorskip("xgrammar")
    process = subprocess.run(
        [sys.executable, "-c", CRASH], capture_output=True, text=True, check=False
    )
    assert process.returncode == -signal.SIGSEGV
    assert (
        "Fatal Python error: Segmentation fault" in process.stderr and "<string>" in process.stderr
    )
