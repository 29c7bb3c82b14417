from treadle.testing.parsers import ToolParserSuite, call, text
from treadle.testing.plugin import PluginSuite
from treadle.testing.tool_calls import MALFORMED, SOUND

ONE = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
LONG = (
    r'{"code": "def f(x):\n\treturn {\"a\": [x]}  # }]\\", "é": "caf\u00e9 世界 👩‍👩‍👧", '
    r'"deep": {"a": [{"b": [[], {}, [1.5e-3, -0, true, false, null]]}]}}'
)


class TestHermes(PluginSuite, ToolParserSuite):
    plugin = "tool_parsers:hermes"
    malformed = MALFORMED
    block = ("<tool_call>", "</tool_call><tool_call>", "</tool_call>")
    sound = SOUND
    cases = [
        (ONE, [call(0, "f", '{"x": 1}')]),
        (f"Let me look.\n{ONE}", [text("Let me look.\n"), call(0, "f", '{"x": 1}')]),
        (
            f"one\n\n{ONE} two\n{ONE}\n three",
            [
                text("one\n\n"),
                call(0, "f", '{"x": 1}'),
                text(" two\n"),
                call(1, "f", '{"x": 1}'),
                text("\n three"),
            ],
        ),
        (
            f"\n{ONE}\n{ONE}\n\n{ONE}\n",
            [call(i, "f", '{"x": 1}') for i in range(3)],
        ),
        (f'<tool_call>{{"name":"f","arguments":{LONG}}}</tool_call>', [call(0, "f", LONG)]),
        (
            f'<tool_call>{{"arguments": {LONG}, "id": "a}}", "name": "get_weather"}}</tool_call>',
            [call(0, "get_weather", LONG)],
        ),
        (
            '<tool_call>{"name": "f", "parameters": {"x": "<tool_call>{}</tool_call>"}}</tool_call>',
            [call(0, "f", '{"x": "<tool_call>{}</tool_call>"}')],
        ),
        # Written loosely: no closing tag, several objects in a block, line breaks in a string.
        (
            '<tool_call>{"name": "f", "arguments": {}}<tool_call>{"name": "g", "arguments": {}}\n{"name": "f", '
            '"arguments": null}',
            [call(0, "f", "{}"), call(1, "g", "{}"), call(2, "f", "{}")],
        ),
        (
            '<tool_call>{"name": "f", "arguments": {"x": "a\n\tb\x01"}}</tool_call>',
            [call(0, "f", r'{"x": "a\n\tb\u0001"}')],
        ),
        (
            r'<tool_call>{"name": "f", "arguments": "{\"x\": [\"\\n\"]}"}</tool_call> ok',
            [call(0, "f", r'{"x": ["\n"]}'), text(" ok")],
        ),
        # Not calls.
        ("a <tool_call> is a tag", [text("a  is a tag")]),
        (
            f"<tool_call><tool_call>{ONE}",
            [call(0, "f", '{"x": 1}')],
        ),
        ('<tool_call>{"name": 3}</tool_call>', [text('{"name": 3}')]),
        ('<tool_call>{"name": ""}</tool_call>', [text('{"name": ""}')]),
        (
            '<tool_call>{"name": "\\ud800"}</tool_call>',
            [text('{"name": "\\ud800"}')],
        ),
        (
            '<tool_call>{"arguments": {"x": 1}}</tool_call>',
            [text('{"arguments": {"x": 1}}')],
        ),
        (
            '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
            [text('{"name": "f", "arguments": [1]}')],
        ),
        (
            '<tool_call>{"name": "f", "arguments": "no"}</tool_call>',
            [text('{"name": "f", "arguments": "no"}')],
        ),
        ('<tool_call>{"name": "f", "argu', [text('{"name": "f", "argu')]),
        ("<tool_call>\n", [text("\n")]),
        (" \n", [text(" \n")]),
        # What has been handed on stays; the rest is text.
        (
            '<tool_call>{"name": "f", "arguments": {"x": [1, tru]}}</tool_call>',
            [call(0, "f", '{"x": [1, '), text("tru]}}")],
        ),
        ('<tool_call>{"name": "f", "arguments": {"x": "a\\u00', [call(0, "f", '{"x": "a\\u00')]),
        ('<tool_call>{"name": "f", "arguments": {"x": -1', [call(0, "f", '{"x": -1')]),
        ('<tool_call>{"name": "f", "arguments": {"x": 1}}\n</tool', [call(0, "f", '{"x": 1}')]),
        (
            '<tool_call>{"name": "f", "arguments": {}, "name": "g"}',
            [text('{"name": "f", "arguments": {}, "name": "g"}')],
        ),
    ]
