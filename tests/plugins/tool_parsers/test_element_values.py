"""Arguments in formats that write texts as they are: what may be written is what the schema says."""

from __future__ import annotations

import json
import re
from functools import partial
from typing import Any

import jsonschema
import pytest

from treadle.api.kinds import STRUCTURED_OUTPUT, TOOL_PARSERS
from treadle.api.parsers import Tool, ToolCallDelta
from treadle.errors import RequestError
from treadle.plugins import PluginManager
from treadle.testing.grammars import ByteTokenizer, sample_texts

PLUGINS = PluginManager()
GLM_TAGS = ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
CALLS = {
    "qwen3_coder": "<tool_call>\n<function=f>\n<parameter=v>\n%s\n</parameter>\n</function>\n</tool_call>",
    "glm4_moe": "<tool_call>f\n<arg_key>v</arg_key>\n<arg_value>%s</arg_value>\n</tool_call>",
    "minimax_m2": '<minimax:tool_call>\n<invoke name="f">\n<parameter name="v">%s</parameter>\n'
    "</invoke>\n</minimax:tool_call>",
}
FORMATS = [("qwen3_coder", ()), ("glm4_moe", ()), ("glm4_moe", GLM_TAGS), ("minimax_m2", ())]
DEFS: Any = {
    "Name": {"type": "string", "pattern": '^[a-z0-9"]+$'},
    "Free": {"type": "string"},
    "Color": {"enum": ["red", "5"]},
    "Alias": {"$ref": "#/$defs/Name"},
    "Loop": {"anyOf": [{"$ref": "#/$defs/Loop"}, {"type": "string"}]},
    "Tree": {"type": "object", "properties": {"l": {"$ref": "#/$defs/Tree"}}},
}
NUMBERED: Any = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
# A schema, what may be written, with what it means if that is not the text itself, and what may not.
CASES: list[tuple[dict[str, Any], list[Any], list[str]]] = [
    ({"type": "string", "pattern": "^a+$"}, ["a", "aaa"], ["b", "", "ab"]),
    ({"type": "string", "pattern": "b"}, ["abc", "b", "x\nb\ny", "</b>"], ["a", ""]),
    ({"type": "string", "pattern": "^a|/$"}, ["ab", "b/"], ["ba", "/b"]),
    ({"type": "string", "pattern": r"^[\[\]&~]\.\d$"}, ["[.1", "&.2"], ["[x1", "&.٣"]),
    ({"type": "string", "minLength": 2}, ["ab", "äöü", "<b></b>"], ["", "a", "ü"]),
    ({"type": "string", "maxLength": 2}, ["", "a", "äö", "12"], ["abc"]),
    ({"type": "string", "maxLength": 5000}, ["a" * 5000], ["a" * 5001]),
    ({"type": "string", "pattern": "a", "minLength": 2, "maxLength": 3}, ["ba", "a</"], ["a", "bb", "abcd"]),
    ({"type": "string", "format": "date"}, ["2024-02-29"], ["2023-02-29", "x"]),
    ({"type": "string", "format": "date-time"}, ["2024-02-29T10:00:00Z"], ["2024-02-29"]),
    ({"type": "string", "format": "time"}, ["12:00:00Z"], ["25:00:00Z"]),
    ({"type": "string", "format": "duration"}, ["P1DT2H", "PT5M", "P2W"], ["P", "1D", "PT"]),
    ({"type": "string", "format": "email"}, ["a.b@c.org"], ["a@", "b"]),
    ({"type": "string", "format": "hostname"}, ["a.b-c.org"], ["-a", "a..b"]),
    ({"type": "string", "format": "ipv4"}, ["1.2.3.255"], ["1.2.3.256"]),
    ({"type": "string", "format": "ipv6"}, ["::1", "1:2:3:4:5:6:7:8", "::"], ["1", "1:2:3:4:5:6:7:8:9"]),
    ({"type": "string", "format": "uri"}, ["https://a.org/b?c=d#e", "http://[::1]:80/"], ["/a", "a b"]),
    ({"type": "string", "format": "uuid"}, ["12345678-1234-1234-1234-123456789abc"], ["1234"]),
    ({"type": "string", "format": "one of my own"}, ["x"], []),
    ({"type": "string", "enum": ["aa", "7", "<b>"]}, ["aa", "7", "<b>"], ["a"]),
    ({"enum": ["aa", 7], "type": "string"}, ["aa"], ["7"]),
    ({"$ref": "#/$defs/Name"}, ["abc", "12", '"q"'], ["A"]),
    ({"$ref": "#/$defs/Alias"}, ["abc"], ["A"]),
    ({"$ref": "#/$defs/Free"}, ["abc", "12", '"q"', "null"], []),
    ({"$ref": "#/$defs/Color"}, ["red", "5"], ["blue", '"red"']),
    ({"allOf": [{"$ref": "#/$defs/Name"}], "maxLength": 2}, ["ab"], ["abc", "A"]),
    ({"anyOf": [{"$ref": "#/$defs/Name"}, {"type": "null"}]}, ["abc", "7", ("null", None)], ["A"]),
    ({"anyOf": [{"type": "string"}, {"type": "null"}]}, ["a", "12", '"q"', "nulls", ("null", None)], []),
    ({"type": ["string", "null"], "pattern": "^[0-9]+$"}, ["12", ("null", None)], ["x", "nul"]),
    ({"type": ["string", "integer"], "maxLength": 3}, ["ab", "1.5", ("12345", 12345)], ["abcd"]),
    ({"type": ["string", "boolean"], "maxLength": 3}, ["tru", ("true", True)], ["trues"]),
    ({"anyOf": [{"type": "string", "maxLength": 2}, NUMBERED]}, ["ab", ('{"a": 1}', {"a": 1})],
     ["abc", '{"a": "x"}', "{}", "["]),
    ({"anyOf": [{"enum": ["auto"]}, {"type": "integer", "minimum": 3}]}, ["auto", ("4", 4)], ["2", "au"]),
    ({"oneOf": [{"type": "string", "minLength": 1}, {"type": "null"}]}, ["a", ("null", None)], [""]),
    ({"$ref": "#/$defs/Tree"}, [('{"l": {"l": {}}}', {"l": {"l": {}}})], ["[]", '{"l": 1}']),
    ({"type": "integer", "minimum": 3}, [("4", 4)], ["2", "a"]),
]  # fmt: skip
IDS = [json.dumps(schema)[:60] for schema, _, _ in CASES]


def tool(schema: Any, strict: bool = True, name: str = "v") -> Tool:
    whole = {"type": "object", "properties": {name: schema}, "required": [name], "$defs": DEFS}
    return Tool("f", "", whole, strict=strict)


def open_parser(key: str, tokenizer: Any, schema: Any, *, strict: bool = True) -> Any:
    return PLUGINS.create(TOOL_PARSERS, key, tokenizer=tokenizer, tools=[tool(schema, strict)])


def encode(text: str, tokenizer: ByteTokenizer) -> list[int]:
    """Return ids in which each tag is the token that it is."""
    tags = {tag: id for id, tag in tokenizer.special.items()}
    parts = re.split(f"({'|'.join(map(re.escape, tags))})", text) if tags else [text]
    return [id for part in parts for id in ([tags[part]] if part in tags else part.encode())]


def allows(backend: str, tokenizer: Any, spec: Any, text: str) -> bool:
    compiler = PLUGINS.create(
        STRUCTURED_OUTPUT, backend, tokenizer=tokenizer, vocab_size=tokenizer.vocab_size
    )
    matcher = compiler.compile(spec).matcher()
    return all(map(matcher.accept_token, encode(text, tokenizer))) and matcher.is_accepting


def read(parser: Any, text: str) -> Any:
    deltas = [*parser.feed(text, ()), *parser.finish()]
    (call,) = [delta for delta in deltas if isinstance(delta, ToolCallDelta)]
    return json.loads(call.arguments)["v"]


@pytest.mark.parametrize(("key", "tags"), FORMATS)
@pytest.mark.parametrize(("schema", "right", "wrong"), CASES, ids=IDS)
def test_values_of_strict_tools_are_enforced(
    key: str, tags: tuple[str, ...], schema: Any, right: list[Any], wrong: list[str]
) -> None:
    """And read as what they are."""
    tokenizer: Any = ByteTokenizer(*tags)
    open_one = partial(open_parser, key, tokenizer, schema)
    for choice, around in (("required", "%s"), ("auto", "Now: %s ok")):
        spec = open_one().grammar_for_tool_choice(choice)
        backend = "outlines" if choice == "auto" else "llguidance"
        allowed = partial(allows, backend, tokenizer, spec)
        for case in right:
            text, value = case if isinstance(case, tuple) else (case, case)
            assert allowed(around % (CALLS[key] % text)), text
            assert read(open_one(), CALLS[key] % text) == value
            jsonschema.validate(value, {**schema, "$defs": DEFS})
        for text in wrong:
            assert not allowed(around % (CALLS[key] % text)), text


@pytest.mark.parametrize(("key", "tags"), FORMATS)
@pytest.mark.parametrize(
    "rule", [{}, {"minLength": 3}, {"pattern": "^[^b]"}, {"maxLength": 2000}], ids=str
)
def test_a_text_has_no_tag_in_it_that_would_end_it(
    key: str, tags: tuple[str, ...], rule: Any
) -> None:
    tokenizer: Any = ByteTokenizer(*tags)
    schema = {"type": "string", **rule}
    spec = open_parser(key, tokenizer, schema).grammar_for_tool_choice("required")
    close = "</arg_value>" if key == "glm4_moe" else "</parameter>"
    assert allows("llguidance", tokenizer, spec, CALLS[key] % f"a{close[:-1]} x</b>")
    if not tags:  # as a text; the token ends it, of course
        assert not allows("llguidance", tokenizer, spec, CALLS[key] % f"a{close}xyz")


@pytest.mark.parametrize("key", CALLS)
@pytest.mark.parametrize(("schema", "right", "wrong"), CASES, ids=IDS)
def test_tools_that_are_not_strict_are_not_refused(
    key: str, schema: Any, right: list[Any], wrong: list[str]
) -> None:
    tokenizer: Any = ByteTokenizer()
    spec = open_parser(key, tokenizer, schema, strict=False).grammar_for_tool_choice("required")
    for case in right:
        text = case[0] if isinstance(case, tuple) else case
        assert allows("llguidance", tokenizer, spec, CALLS[key] % text), text


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"type": "string", "pattern": r"\bx"}, "pattern"),
    ({"type": "string", "pattern": "(?=a)"}, "pattern"),
    ({"type": "string", "pattern": r"(a)\1"}, "pattern"),
    ({"type": "string", "pattern": "(^a)"}, "pattern"),
    ({"type": "string", "pattern": r"^(\S+\s+){0,99}\S+$", "maxLength": 500}, "pattern"),
    ({"type": "string", "format": "regex"}, "format regex"),
    ({"type": "string", "not": {"const": "x"}}, "not"),
    ({"type": "string", "maxLength": 10**6}, "a length from 0 to 1000000"),
    ({"type": "string", "minLength": 3, "maxLength": 2}, "a length from 3 to 2"),
    ({"type": ["string", "integer"], "minimum": 3}, "minimum of a number"),
    ({"type": ["string", "text"]}, "type 'text'"),
    ({"enum": ["a</parameter>b", "a</arg_value>b"]}, "the value"),
    ({"enum": ["a"], "minLength": 1}, "minLength beside the values of an enum"),
    ({"type": "integer", "enum": ["a"]}, "an enum of which no value is allowed"),
    ({"$ref": "#/$defs/Nobody"}, r"\$ref '#/\$defs/Nobody'"),
    ({"type": "array", "items": {"$ref": "#"}}, r"\$ref '#'"),
]


@pytest.mark.parametrize(("schema", "reason"), REFUSED, ids=[str(r) for r, _ in REFUSED])
def test_what_cannot_be_enforced_is_refused_by_name(schema: Any, reason: str) -> None:
    for key in CALLS:
        parser = open_parser(key, ByteTokenizer(), schema)
        for choice in ("required", "auto"):
            with pytest.raises(RequestError, match=f"{reason}.* of the argument 'v' of") as error:
                parser.grammar_for_tool_choice(choice)
            assert error.value.param == "tools"
        loose = open_parser(key, ByteTokenizer(), schema, strict=False)
        assert loose.grammar_for_tool_choice("required") is not None


WHOLES: list[tuple[dict[str, Any], str]] = [
    ({"anyOf": [{"required": ["a"]}, {"required": ["b"]}]}, "anyOf"),
    ({"patternProperties": {"^a": {"type": "integer"}}}, "patternProperties"),
    ({"minProperties": 2}, "minProperties"),
    ({"properties": {"a>b<c": {"type": "string"}}}, "the name 'a>b<c' of an argument"),
]


@pytest.mark.parametrize(("parameters", "reason"), WHOLES, ids=str)
def test_what_cannot_be_enforced_of_the_whole_is_refused(parameters: Any, reason: str) -> None:
    for key in CALLS:
        tools = [Tool("f", "", {"type": "object", **parameters}, strict=True)]
        parser = PLUGINS.create(TOOL_PARSERS, key, tokenizer=ByteTokenizer(), tools=tools)
        with pytest.raises(RequestError, match=reason):
            parser.grammar_for_tool_choice("required")


def test_parameters_may_be_a_reference() -> None:
    schema: Any = {
        "$ref": "#/$defs/Arguments",
        "$defs": {"Arguments": {"properties": {"v": {"const": "x"}}, "required": ["v", "w"]}},
    }
    for key in CALLS:
        tools = [Tool("f", "", schema, strict=True)]
        tokenizer: Any = ByteTokenizer()
        parser = PLUGINS.create(TOOL_PARSERS, key, tokenizer=tokenizer, tools=tools)
        (text,) = sample_texts(PLUGINS, parser.grammar_for_tool_choice("required"), 1)
        (call, *_) = [d for d in parser.feed(text, ()) if isinstance(d, ToolCallDelta)]
        arguments = json.loads(call.arguments)
        assert arguments["v"] == "x" and "w" in arguments


def test_schemas_that_double_are_read_in_bounded_time() -> None:
    """Each level refers to the next twice, or thousands of options are referred to a hundred times."""
    many = {"anyOf": [{"const": str(i)} for i in range(2_000)]}
    doubled = {
        f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2, "maxLength": i} for i in range(40)
    }
    defs: Any = {**doubled, "d40": {"type": "string"}, "many": many}
    defs["more"] = {"anyOf": [{"$ref": "#/$defs/many"}] * 100}
    for name in ("d0", "more"):
        root = {"properties": {"v": {"$ref": f"#/$defs/{name}"}}, "$defs": defs}
        parser = PLUGINS.create(
            TOOL_PARSERS, "qwen3_coder", tokenizer=ByteTokenizer(), tools=[Tool("f", "", root)]
        )
        assert parser.grammar_for_tool_choice("required") is not None
        assert read(parser, CALLS["qwen3_coder"] % "x") == "x"


def test_a_grammar_that_would_be_huge_is_refused() -> None:
    """Every argument has the list to which it refers in its own rule."""
    properties = {f"p{i}": {"$ref": "#/$defs/list"} for i in range(1_000)}
    root = {"properties": properties, "$defs": {"list": {"enum": [str(i) for i in range(1_000)]}}}
    tools = [Tool("f", "", root)]
    parser = PLUGINS.create(TOOL_PARSERS, "glm4_moe", tokenizer=ByteTokenizer(), tools=tools)
    with pytest.raises(RequestError, match="a grammar of more than 1048576 characters"):
        parser.grammar_for_tool_choice("required")
