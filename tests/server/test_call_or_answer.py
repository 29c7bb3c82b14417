"""Tools with a response format: the joined grammar of every parser has calls and answers."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from treadle.api.kinds import TOOL_PARSERS
from treadle.api.parsers import Tool, ToolCallDelta
from treadle.api.sampling_params import SamplingParams, StructuredOutputsParams
from treadle.api.structured_output import GrammarSpec
from treadle.plugins import PluginManager
from treadle.testing.grammars import ByteTokenizer, sample_texts
from treadle.text.chat import Conversation
from treadle.text.parser_plugins import ParserPlugins
from treadle_server.chat.call_or_answer import with_calls

# The same name means something else in the schema of the tool.
SCHEMA: Any = {
    "type": "object",
    "properties": {"sum": {"$ref": "#/$defs/value"}},
    "required": ["sum"],
    "additionalProperties": False,
    "$defs": {"value": {"enum": [1, 2]}},
}
ARGUMENTS: Any = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL: Any = {"type": "function", "function": {"name": "get_weather", "parameters": ARGUMENTS}}
CHAT = Conversation(messages=[], tools=[TOOL])


def parsers(key: str) -> ParserPlugins:
    keys = {"tool_call_parser": key, "reasoning_parser": None}
    return ParserPlugins(PluginManager(), ByteTokenizer(), keys)  # type: ignore[arg-type]


@pytest.mark.parametrize("key", ["hermes", "llama3_json", "mistral", "pythonic"])
async def test_an_output_is_a_call_or_an_answer(key: str) -> None:
    plugins = parsers(key)
    answer = StructuredOutputsParams(json=json.dumps(SCHEMA))
    params = await with_calls(CHAT, SamplingParams(structured_outputs=answer), plugins)
    joined = params.structured_outputs
    assert joined is not None and joined.grammar is not None and joined.json is None
    tools = [Tool(name="get_weather", description="", parameters=ARGUMENTS)]
    kinds = set()
    for text in sample_texts(plugins.plugins, GrammarSpec("ebnf", joined.grammar), 12):
        parser = plugins.plugins.create(TOOL_PARSERS, key, tokenizer=ByteTokenizer(), tools=tools)
        calls = [
            d for d in [*parser.feed(text, ()), *parser.finish()] if isinstance(d, ToolCallDelta)
        ]
        kinds.add("call" if calls else "answer")
        if not calls:
            jsonschema.validate(json.loads(text), SCHEMA)
    assert kinds == {"call", "answer"}


async def test_only_a_choice_is_joined() -> None:
    plugins = parsers("hermes")
    formed = SamplingParams(structured_outputs=StructuredOutputsParams(json_object=True))
    other = SamplingParams(structured_outputs=StructuredOutputsParams(regex="a+"))
    for chat, params in (
        (CHAT, SamplingParams()),
        (CHAT, other),
        (Conversation(messages=[]), formed),
        (Conversation(messages=[], tools=[TOOL], tool_choice="none"), formed),
        (Conversation(messages=[], tools=[TOOL], tool_choice="required"), formed),
    ):
        assert await with_calls(chat, params, plugins) is params
    joined = (await with_calls(CHAT, formed, plugins)).structured_outputs
    assert joined is not None and joined.grammar is not None
