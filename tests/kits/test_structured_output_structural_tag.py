"""Structural tags as grammars: which texts obey them. Special tokens are written as ``\\0<name>``."""

from __future__ import annotations

import json
from typing import Any

import pytest

from treadle.testing.grammar_vocabulary import SmallTokenizer
from treadle_structured_output_kit.llguidance import LLGuidanceCompiler
from treadle_structured_output_kit.structural_tag_lark import structural_tag_lark

VOCAB = 512


class WithCall(SmallTokenizer):
    """Two more special tokens: ``<call>`` and ``</call>``."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = {"<call>": len(self._tokens), "</call>": len(self._tokens) + 1}
        self._tokens += [name.encode() for name in self.calls]
        self._special |= set(self.calls.values())


TOKENIZER = WithCall()
COMPILER = LLGuidanceCompiler(TOKENIZER, VOCAB)
OBJECT = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}


def ids_of(text: str) -> list[int]:
    ids: list[int] = []
    while text:
        name = next((n for n in TOKENIZER.calls if text.startswith(f"\0{n}")), None)
        if name is not None:
            ids.append(TOKENIZER.calls[name])
            text = text[len(name) + 1 :]
        else:
            ids += map(TOKENIZER.of_byte, text[0].encode())
            text = text[1:]
    return ids


def obeys(tag: dict[str, Any], text: str) -> bool:
    lark = structural_tag_lark(json.dumps(tag), TOKENIZER, VOCAB)
    matcher = COMPILER.compile_grammar(lark).matcher()
    return all(map(matcher.accept_token, ids_of(text))) and matcher.is_accepting


def tag(begin: Any = "<c>", end: Any = "</c>", **content: Any) -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def const(text: str) -> dict[str, Any]:
    return {"type": "const_string", "value": text}


A_TAG = {"type": "triggered_tags", "triggers": ["<c"], "tags": [tag(type="regex", pattern="a+")]}
ANY: dict[str, Any] = {"type": "any_text"}
CALL = tag("<call>f", "</call>", type="json_schema", json_schema=OBJECT)
FORMATS: list[tuple[dict[str, Any], list[str], list[str]]] = [
    (ANY, ["", "a b\n</c>"], []),
    ({**ANY, "excludes": ["bad", "/"], "max_chars": 6}, ["ok", "ba d"], ["a bad", "1/2", "1234567"]),
    (tag(**ANY), ["<c></c>", "<c>a <c> b</c>"], ["<c>a", "x<c></c>", "<c></c>x", ""]),
    (tag(end=["</c>", "!"], **ANY), ["<c>a!", "<c>a</c>"], ["<c>a</c>!", "<c>!!"]),
    (tag(end="", type="regex", pattern="[0-9]+"), ["<c>12"], ["<c>", "<c>a"]),
    (tag(type="json_schema", json_schema=OBJECT), ['<c>{"a": 1}</c>'], ['<c>{"b": 1}</c>', "<c></c>"]),
    (A_TAG, ["", "x < c", "<c>a</c>", "x <c>aa</c> y <c>a</c>"], ["<cx", "<c>b</c>", "<c>a</c><c"]),
    ({**A_TAG, "at_least_one": True}, ["x<c>a</c>y"], ["", "x"]),
    ({**A_TAG, "stop_after_first": True}, ["x", "x<c>a</c>"], ["<c>a</c>x", "<c>a</c><c>a</c>"]),
    (
        {**A_TAG, "stop_after_first": True, "at_least_one": True, "excludes": ["no"]},
        ["x<c>a</c>"],
        ["x", "no<c>a</c>"],
    ),
    (tag("<t>", "</t>", **A_TAG), ["<t>x <c>a</c></t>", "<t></t>"], ["<t><c>a</t>", "<t>x</t>y"]),
    (
        {"type": "triggered_tags", "triggers": ["<call>"], "tags": [CALL]},
        ["x", 'x\0<call>f{"a":1}\0</call>y'],
        ["<call>", '\0<call>g{"a":1}\0</call>', '\0<call>f{"a":1}</call>'],
    ),
    (
        {"type": "tags_with_separator", "tags": [tag(**ANY)], "separator": ", "},
        ["", "<c>a</c>", "<c></c>, <c>b</c>"],
        ["<c>a</c>, ", "<c>a</c><c>b</c>", "x"],
    ),
    (
        {"type": "tags_with_separator", "tags": [tag(**ANY)], "separator": ",", "at_least_one": True,
         "stop_after_first": True},
        ["<c>a</c>"],
        ["", "<c>a</c>,<c>a</c>"],
    ),
    (
        {"type": "sequence", "elements": [ANY, const("\n/A"), {"type": "regex", "pattern": "[0-9]/?"}]},
        ["\n/A1", "x\n/A1/"],
        ["x", "x\n/Ab"],
    ),
    (
        {"type": "sequence", "elements": [{"type": "regex", "pattern": "[a-z]*"}, tag(**ANY), ANY]},
        ["<c></c>", "ab<c>x</c> y"],
        ["ab", "AB<c></c>"],
    ),
    (
        {"type": "or", "elements": [const("yes"), {"type": "grammar", "grammar": 'root ::= "n" "o"+'}]},
        ["yes", "noo"],
        ["n", "yesno"],
    ),
    ({"type": "repeat", "min": 2, "max": 3, "content": const("ab")}, ["abab", "ababab"], ["ab", "abababab"]),
    ({"type": "repeat", "min": 1, "max": -1, "content": const("ab")}, ["ab", "ababab"], [""]),
    ({"type": "plus", "content": const("ab")}, ["ab", "abab"], [""]),
    ({"type": "star", "content": const("ab")}, ["", "abab"], ["aba"]),
    ({"type": "optional", "content": const("ab")}, ["", "ab"], ["abab"]),
    (
        {"type": "sequence", "elements": [{"type": "token", "token": "<call>"}, const("x")]},
        ["\0<call>x"],
        ["x", "<call>x"],
    ),
    (
        tag({"type": "token", "token": TOKENIZER.calls["<call>"]}, {"type": "token", "token": "</call>"}, type="any_tokens"),
        ["\0<call>\0</call>", "\0<call>ab\0</call>"],
        ["\0<call>ab", "\0<call>\0</call>a"],
    ),
    ({"type": "exclude_token", "exclude_tokens": ["<call>"]}, ["a"], ["\0<call>", "", "ab"]),
    (
        {"type": "token_triggered_tags", "trigger_tokens": ["<call>"],
         "tags": [tag({"type": "token", "token": "<call>"}, "</call>", **const("x"))]},
        ["a", "a\0<call>x\0</call>b"],
        ["\0<call>y", "<call>"],
    ),
    ({"type": "dispatch", "rules": [["!", const("go")]]}, ["a", "!go", "!go!go"], ["!", "!no"]),
    ({"type": "dispatch", "rules": [["!", const("go")]], "loop": False}, ["a", "b!go"], ["!go!go"]),
]  # fmt: skip


@pytest.mark.parametrize(("form", "accepted", "refused"), FORMATS, ids=range(len(FORMATS)))
def test_which_texts_obey(form: dict[str, Any], accepted: list[str], refused: list[str]) -> None:
    document = {"type": "structural_tag", "format": form}
    assert [text for text in accepted if not obeys(document, text)] == []
    assert [text for text in refused if obeys(document, text)] == []


def test_the_older_form() -> None:
    document = {
        "structures": [{"begin": "<f=a>", "schema": OBJECT, "end": "</f>"}],
        "triggers": ["<f="],
    }
    assert obeys(document, 'x<f=a>{"a":1}</f>')
    assert not obeys(document, "x<f=b>")


WRONG: list[tuple[Any, str]] = [
    ({}, "needs a format"),
    ([], "structural tag is wrong"),
    ({"format": {"type": "poem"}}, r"Invalid value 'poem' - at `\$.format.type`"),
    ({"format": {**ANY, "length": 1}}, "unknown field `length`"),
    ({"format": ANY, "triggers": ["x"]}, "not both"),
    ({"format": {"type": "sequence", "elements": [ANY, ANY]}}, "last element of a sequence"),
    ({"format": {"type": "token", "token": "<x>"}}, "no special token"),
    ({"format": {"type": "token", "token": VOCAB}}, "not in the vocabulary of 512"),
    ({"format": tag("", **ANY)}, "begin that is not empty"),
    ({"format": tag(end=["", "x"], **ANY)}, "one of several ends"),
    ({"format": tag(type="any_tokens")}, "ends with a token"),
    ({"format": {**A_TAG, "triggers": ["<d"]}}, "begins with 0 of the triggers"),
    ({"format": {**A_TAG, "triggers": ["<", "<c"]}}, "begins with 2 of the triggers"),
]


@pytest.mark.parametrize(("document", "message"), WRONG, ids=range(len(WRONG)))
def test_what_is_wrong_says_where(document: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        obeys(document, "")


def test_patterns_are_those_of_other_regular_expressions() -> None:
    """Slashes may be escaped or not, anchors around say nothing, and digits are those of ASCII."""
    for pattern in (r"a/b\/c\d", r"^a/b\/c\d$"):
        for format in ({"type": "regex", "pattern": pattern}, tag(type="regex", pattern=pattern)):
            around = ("<c>", "</c>") if format["type"] == "tag" else ("", "")
            assert obeys({"format": format}, "a/b/c7".join(around))
            assert not obeys({"format": format}, "a/b/c٧".join(around))
