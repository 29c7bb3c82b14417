import ast
import json
import warnings
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st
from treadle_pythonic.keywords import Keywords
from treadle_pythonic.literals import json_of

from treadle.api.kinds import TOOL_PARSERS
from treadle.api.parsers import Tool, ToolCallDelta
from treadle.plugins import PluginManager
from treadle.testing.grammars import sample_texts
from treadle.testing.parsers import ToolParserSuite, call, text
from treadle.testing.plugin import PluginSuite


class TestPythonic(PluginSuite, ToolParserSuite):
    plugin = "tool_parsers:pythonic"
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
        ("[f(x=[1] + [2])]", [text("[f(x=[1] + [2])]")]),
        # A text has been sent when something is wrong behind it.
        ("[f(x='a', x=2), g()]", [call(0, "f", '{"x": "a"'), text(" x=2)"), call(1, "g", "{}")]),
        ("[f(y=1, x='a\\x4g')", [call(0, "f", '{"y": 1, "x": "a'), text("g')")]),
        ("<|python_start|>print(1)", [text("print(1)")]),
    ]


LITERALS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner) | st.tuples(inner, inner),
    max_leaves=12,
)  # fmt: skip


def keywords(source: str) -> dict[str, Any] | None:
    """What the reader makes of it; ``None`` if it is no call."""
    reader, arguments = Keywords(0, "f"), ""
    for char in f"({source})":
        if reader.done:
            return None
        _, deltas = reader.feed(char)
        arguments += "".join(d.arguments for d in deltas if isinstance(d, ToolCallDelta))
        if reader.failed:
            return None
    return json.loads(arguments) if reader.done else None


@given(st.dictionaries(st.from_regex(r"[a-z]{1,6}_", fullmatch=True), LITERALS, max_size=4))
def test_it_reads_literals_as_python_does(arguments: dict[str, Any]) -> None:
    source = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
    tree = ast.parse(f"f({source})", mode="eval").body
    assert isinstance(tree, ast.Call)
    expected = {str(k.arg): ast.literal_eval(k.value) for k in tree.keywords}
    assert json_of(keywords(source)) == json_of(json.loads(json_of(expected)))


@given(st.text(alphabet="ab=,()[]{}'\"\\x01.-+e_: \nNone"))
def test_whatever_it_reads_is_python(source: str) -> None:
    actual = keywords(source)
    if actual is None:
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
    assert keywords(f"x={number}") is None


@given(
    st.lists(
        st.sampled_from(
            [
                *"x0179afg'n",
                *[r"\x4", r"\x41", r"\101", r"\7", r"\18", r"\u00e9", r"\n", r"\'", r"\\", r"\q"],
                "\\\n",
            ]
        )
    )
)
def test_escapes_mean_what_they_mean_in_python(pieces: list[str]) -> None:
    source = f'"{"".join(pieces)}"'
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            expected = {"x": ast.literal_eval(source)}
    except SyntaxError:
        expected = None
    assert keywords(f"x={source}") == expected


def test_a_text_streams_and_short_values_wait() -> None:
    tokenizer: Any = object()
    parser: Any = PluginManager().create(
        TOOL_PARSERS, "pythonic", tokenizer=tokenizer, tools=[Tool("f", "", {})]
    )
    pieces = ("[f(x=1, ", "y=", "'ab", "c\\", "n", "d' ", "'e'", ", z=[2", "], ", "w=3", ")]")
    found = [parser.feed(piece, ()) for piece in pieces]
    texts = ["".join(delta.arguments for delta in deltas) for deltas in found]
    expected = (
        "",
        "",
        '{"x": 1, "y": "ab',
        "c",
        r"\n",
        "d",
        "e",
        '"',
        ', "z": [2]',
        "",
        ', "w": 3}',
    )
    assert texts == list(expected)
    assert not parser.finish()


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
        (delta,) = parser.feed(output, ()) + parser.finish()
        assert delta.name == NESTED.name
        arguments = json.loads(delta.arguments)
        jsonschema.validate(arguments, dict(NESTED.parameters))
        kinds |= arguments["stop"]["by"].keys()
    assert kinds == {"bus", "ship"}
