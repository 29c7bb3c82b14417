"""Patterns that mean the same to every library, and the walk through a schema."""

from __future__ import annotations

import json
import re
import warnings

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from treadle.api.structured_output import GrammarSpec
from treadle_structured_output_kit.dialect import (
    ascii_classes,
    normalize_patterns,
    whole_text,
    without_anchors,
)
from treadle_structured_output_kit.json_schema import disjoint, subschemas


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("^a$", "a"),
        ("^a", "a"),
        ("a$", "a"),
        (r"a\$", r"a\$"),
        (r"a\\$", r"a\\"),
        ("^a|b$", "^a|b$"),
        ("^(a|b)$", "(a|b)"),
        ("^[|]$", "[|]"),
        ("^", ""),
    ],
)
def test_anchors_around_a_pattern_go(pattern: str, expected: str) -> None:
    assert without_anchors(pattern) == expected


def test_digits_are_those_of_ascii() -> None:
    assert ascii_classes(r"\d[\d_]\\d\w", "d") == r"[0-9][0-9_]\\d\w"
    assert ascii_classes(r"\w[^\w]", "dw") == r"[A-Za-z0-9_][^A-Za-z0-9_]"
    schema = {"properties": {"pattern": {"pattern": r"^\d\w$"}}}
    spec = normalize_patterns(GrammarSpec("json_schema", json.dumps(schema)))
    assert json.loads(spec.source)["properties"]["pattern"]["pattern"] == "^[0-9][A-Za-z0-9_]$"
    data = GrammarSpec("json_schema", json.dumps({"enum": [{"pattern": r"\d"}]}))
    assert normalize_patterns(data) == data, "that is data"
    assert normalize_patterns(GrammarSpec("regex", r"^\d$")).source == "[0-9]"
    assert normalize_patterns(GrammarSpec("ebnf", r"^\d$")).source == r"^\d$"


@given(st.text(alphabet=r"ab|()[]^$\d", max_size=12))
def test_without_anchors_a_whole_match_is_the_same(pattern: str) -> None:
    try:
        with warnings.catch_warnings(action="ignore"):
            before = re.compile(pattern)
            after = re.compile(without_anchors(pattern))
    except re.error:
        return
    for text in ("", "a", "b", "ab", "ba", "aa", "d", "1", "$", "^", "|"):
        assert (before.fullmatch(text) is None) == (after.fullmatch(text) is None)


def test_subschemas_are_found_and_data_is_not() -> None:
    schema = {
        "properties": {"not": {"items": [{"const": {"not": 1}}, True]}},
        "enum": [{"not": 1}],
        "$defs": {"a": {"anyOf": [{}, {"if": {}, "then": {}}]}},
    }
    assert [path for path, _ in subschemas(schema)] == [
        "$",
        "$.$defs.a",
        "$.$defs.a.anyOf[0]",
        "$.$defs.a.anyOf[1]",
        "$.$defs.a.anyOf[1].if",
        "$.$defs.a.anyOf[1].then",
        "$.properties.not",
        "$.properties.not.items[0]",
        "$.properties.not.items[1]",
    ]


@pytest.mark.parametrize(
    "pattern",
    ["a", "^a", "a$", "^a|b$", "a|^|b", "[$^]", r"^\$", r"a\\$", r"[\[&]a", "(a|b)c", "", "a.b", "^a\nb$",
     r"\<a\>", "[(?=]"],
)  # fmt: skip
@given(text=st.text(alphabet="abc$^&[<>\\\n=", max_size=6))
def test_a_whole_text_is_matched_where_the_pattern_is_found(pattern: str, text: str) -> None:
    assume(not text.endswith("\n"))  # before which Python's $ matches too
    known = pattern.replace(r"\<", "<").replace(r"\>", ">")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = re.search(known, text)
        assert (re.fullmatch(whole_text(pattern), text) is not None) is (found is not None)


@pytest.mark.parametrize(
    "pattern",
    [
        r"\ba",
        r"a\B",
        "(?=a)b",
        "(?!a)b",
        "(?<=a)b",
        "(?<!a)b",
        r"(a)\1",
        "(^a)",
        "a^",
        "$a",
        "[]",
        "[^]",
        r"\ca",
    ],
)
def test_what_looks_around_itself_is_refused(pattern: str) -> None:
    with pytest.raises(ValueError):
        whole_text(pattern)


@pytest.mark.parametrize(
    ("options", "apart"),
    [
        ([{"type": "string"}, {"type": "integer"}], True),
        ([{"type": "integer"}, {"type": "number"}], False),
        ([{"const": 1}, {"const": 2}], True),
        ([{"const": 1}, {"const": 1.0}], False),
        ([{"enum": ["a", "b"]}, {"enum": ["b"]}], False),
        ([{"type": "string"}, {}], False),
        ([{"type": ["string", "null"]}, {"type": "null"}], False),
        ("ab", False),
    ],
)
def test_disjoint(options: object, apart: bool) -> None:
    assert disjoint(options) is apart


def test_objects_are_told_apart_by_a_required_property() -> None:
    def kind(name: str, *required: str) -> dict[str, object]:
        return {"type": "object", "properties": {"k": {"const": name}}, "required": list(required)}

    assert disjoint([kind("a", "k"), kind("b", "k")])
    assert not disjoint([kind("a", "k"), kind("b")])
    assert not disjoint([kind("a", "k"), kind("a", "k")])
