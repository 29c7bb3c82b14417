import ast
import json
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st
from treadle_pythonic.literals import NotLiteral, json_of, keywords

from treadle.api.kinds import TOOL_PARSERS
from treadle.api.parsers import Tool
from treadle.plugins import PluginManager
from treadle.testing.grammars import sample_texts
from treadle.testing.parsers import ToolParserSuite, call, text
from treadle.testing.plugin import PluginSuite


class TestPythonic(PluginSuite, ToolParserSuite):
    plugin = "tool_parsers:pythonic"
    streams = False
    malformed = ("f(x=1+1)", "f(1)", "f(x=g(), y=[)", "f(x=1, x=2)")
    block = ("[", ", ", "]")
    sound = "f(x=1)"
    cases = [
        (
            '[get_weather(city="Paris", days=3)]',
            [call(0, "get_weather", '{"city": "Paris", "days": 3}')],
        ),
        (
            "Hm. [f(x='it\\'s (a) [b]'), g(), f(x=[1, -2.5, (3,), {'é': None, \"b\": True}])] ok",
            [
                text("Hm. "),
                call(0, "f", '{"x": "it\'s (a) [b]"}'),
                call(1, "g", "{}"),
                call(2, "f", '{"x": [1, -2.5, [3], {"é": null, "b": true}]}'),
                text(" ok"),
            ],
        ),
        ("[\n  f( x = 1 , ) ,\n  g( ),\n]\n", [call(0, "f", '{"x": 1}'), call(1, "g", "{}")]),
        (
            "<|python_start|>[other.tool(x=true)]<|python_end|>",
            [call(0, "other.tool", '{"x": true}')],
        ),
        ('[f(x="a\nb")] [g()]', [call(0, "f", r'{"x": "a\nb"}'), call(1, "g", "{}")]),
        ('[f(x="a" \'b\' "c")]', [call(0, "f", '{"x": "abc"}')]),
        (r'[f(x="\ud83d")]', [call(0, "f", r'{"x": "\ud83d"}')]),
        ("[g(), f(x=1", [call(0, "g", "{}"), text(", f(x=1")]),
        ("[g(), ", [call(0, "g", "{}")]),
        ("[g()]<", [call(0, "g", "{}"), text("<")]),
        # Not calls.
        ("[other(x=1)]", [text("[other(x=1)]")]),
        ("[see](f)", [text("[see](f)")]),
        ("[f]", [text("[f]")]),
        ("[f(1)]", [text("[f(1)]")]),
        ("[f(x=g())]", [text("[f(x=g())]")]),
        ("[f(x=__import__('os'))]", [text("[f(x=__import__('os'))]")]),
        ("[f(x=1+1)]", [text("[f(x=1+1)]")]),
        ("[f(x=1, x=2)]", [text("[f(x=1, x=2)]")]),
        ("[f(**{'x': 1})]", [text("[f(**{'x': 1})]")]),
        ("[f(x=b'a')]", [text("[f(x=b'a')]")]),
        ("[f(x=1e999)]", [text("[f(x=1e999)]")]),
        ("[f(x={1: 2})]", [text("[f(x={1: 2})]")]),
        (f"[f(x={'[' * 40}{']' * 40})]", [text(f"[f(x={'[' * 40}{']' * 40})]")]),
        ("[f(x=[1)]", [text("[f(x=[1)]")]),
        ("<|python_start|>print(1)", [text("print(1)")]),
    ]


LITERALS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner) | st.tuples(inner, inner),
    max_leaves=12,
)  # fmt: skip


@given(st.dictionaries(st.from_regex(r"[a-z]{1,6}_", fullmatch=True), LITERALS, max_size=4))
def test_it_reads_literals_as_python_does(arguments: dict[str, Any]) -> None:
    source = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
    tree = ast.parse(f"f({source})", mode="eval").body
    assert isinstance(tree, ast.Call)
    expected = {str(k.arg): ast.literal_eval(k.value) for k in tree.keywords}
    assert json_of(keywords(source)) == json_of(expected)
    json.loads(json_of(keywords(source)))


@given(st.text(alphabet="ab=,()[]{}'\"\\x01.-+e_: \nNone"))
def test_whatever_it_reads_is_python(source: str) -> None:
    try:
        actual = keywords(source)
    except NotLiteral:
        return
    quoted = source.count("\n") == 0 and "\\" not in source
    if quoted and not {"null", "true", "false"} & set(source.split()):
        tree = ast.parse(f"f({source})", mode="eval").body
        assert isinstance(tree, ast.Call)
        assert actual == json.loads(
            json_of({str(k.arg): ast.literal_eval(k.value) for k in tree.keywords})
        )


@pytest.mark.parametrize("number", ["9" * 5000, "1" * 200_000, "1e" + "9" * 5000])
def test_numbers_that_take_long_to_convert_are_refused(number: str) -> None:
    with pytest.raises(NotLiteral):
        keywords(f"x={number}")


NESTED = Tool(
    "math.plan-trip",
    "",
    {
        "type": "object",
        "properties": {
            "note": {"type": "string"},
            "stop": {
                "type": "object",
                "properties": {
                    "place": {"enum": ["Paris", "Rome"]},
                    "days": {"type": "integer"},
                    "by": {
                        "oneOf": [
                            {
                                "type": "object",
                                "properties": {"bus": {"type": "integer"}},
                                "required": ["bus"],
                            },
                            {
                                "type": "object",
                                "properties": {"ship": {"const": "Ana"}},
                                "required": ["ship"],
                            },
                        ]
                    },
                },
                "required": ["place", "by"],
                "additionalProperties": False,
            },
        },
        "required": ["stop"],
        "additionalProperties": False,
    },
)


def test_a_forced_call_obeys_the_schemas_inside() -> None:
    plugins = PluginManager()
    if "llguidance" not in plugins.keys("structured_output"):
        pytest.skip("no backend is installed")
    tokenizer: Any = object()

    def opened() -> Any:
        return plugins.create(TOOL_PARSERS, "pythonic", tokenizer=tokenizer, tools=[NESTED])

    spec = opened().grammar_for_tool_choice({"function": {"name": NESTED.name}})
    kinds = set()
    for output in sample_texts(plugins, spec, 6):
        parser = opened()
        (delta,) = [*parser.feed(output, ()), *parser.finish()]
        assert delta.name == NESTED.name
        arguments = json.loads(delta.arguments)
        jsonschema.validate(arguments, dict(NESTED.parameters))
        kinds |= arguments["stop"]["by"].keys()
    assert kinds == {"bus", "ship"}
