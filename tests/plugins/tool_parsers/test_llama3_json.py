import json
from typing import Any

import jsonschema
import pytest

from treadle.api.kinds import TOOL_PARSERS
from treadle.api.parsers import Tool
from treadle.plugins import PluginManager
from treadle.testing.grammars import sample_texts
from treadle.testing.parsers import ToolParserSuite, call, text
from treadle.testing.plugin import PluginSuite
from treadle.testing.tool_calls import MALFORMED, SOUND

ONE = '{"name": "f", "parameters": {"x": "a; {b}"}}'
X = '{"x": "a; {b}"}'


class TestLlama3Json(PluginSuite, ToolParserSuite):
    plugin = "tool_parsers:llama3_json"
    malformed = MALFORMED
    block = ("", "; ", "")
    sound = SOUND
    cases = [
        (ONE, [call(0, "f", X)]),
        (f"<|python_tag|>{ONE}", [call(0, "f", X)]),
        (f"\n<|python_tag|> {ONE}\n", [call(0, "f", X)]),
        (f"{ONE}; {ONE};{ONE}\n{ONE};", [call(i, "f", X) for i in range(4)]),
        (f"Sure.\n{ONE}", [text("Sure.\n"), call(0, "f", X)]),
        (f"Sure. <|python_tag|>{ONE} done", [text("Sure. "), call(0, "f", X), text(" done")]),
        (
            '{"type": "function", "parameters": {"city": "Zürich", "days": 3}, "name": "get_weather"}',
            [call(0, "get_weather", '{"city": "Zürich", "days": 3}')],
        ),
        ('{"name": "g", "parameters": {}}', [call(0, "g", "{}")]),
        (f"{ONE}; and then", [call(0, "f", X), text("; and then")]),
        # With the tag, any name is a call; without it, only that of a tool is.
        ('<|python_tag|>{"name": "other", "parameters": {}}', [call(0, "other", "{}")]),
        ('{"name": "Bob", "parameters": {}}', [text('{"name": "Bob", "parameters": {}}')]),
        (
            '{"name": "f", "age": 3, "parameters": {}}',
            [text('{"name": "f", "age": 3, "parameters": {}}')],
        ),
        (f"Write {ONE} to call it.", [text(f"Write {ONE} to call it.")]),
        (f"[{ONE}]", [text(f"[{ONE}]")]),
        ("{\n{}\n", [text("{\n{}\n")]),
        ("<|python_tag|>print(1)", [text("print(1)")]),
        (
            '{"name": "f", "parameters": {"x": 01}}',
            [call(0, "f", '{"x": '), text("01}}")],
        ),
    ]


REFERENCES = Tool(
    "walk",
    "",
    {
        "type": "object",
        "properties": {
            "steps": {"type": "array", "items": {"$ref": "#/$defs/step"}, "maxItems": 2}
        },
        "required": ["steps"],
        "additionalProperties": False,
        "$defs": {
            "step": {
                "type": "object",
                "properties": {"to": {"enum": ["up", "down"]}},
                "required": ["to"],
                "additionalProperties": False,
            }
        },
    },
)


@pytest.mark.parametrize("choice", ["required", {"function": {"name": "walk"}}])
def test_a_forced_call_keeps_the_references_of_its_schema(choice: Any) -> None:
    plugins = PluginManager()
    if "llguidance" not in plugins.keys("structured_output"):
        pytest.skip("no backend is installed")
    stop_tool = Tool("stop", "", {})
    tokenizer: Any = object()
    parser = plugins.create(
        TOOL_PARSERS, "llama3_json", tokenizer=tokenizer, tools=[stop_tool, REFERENCES]
    )
    names = set()
    for output in sample_texts(plugins, parser.grammar_for_tool_choice(choice), 12):
        parser = plugins.create(
            TOOL_PARSERS, "llama3_json", tokenizer=tokenizer, tools=[stop_tool, REFERENCES]
        )
        (delta,) = [*parser.feed(output, ()), *parser.finish()]
        names.add(delta.name)
        if delta.name == "walk":
            jsonschema.validate(json.loads(delta.arguments), dict(REFERENCES.parameters))
    assert names == ({"walk", "stop"} if choice == "required" else {"walk"})
