"""Tools with a response format: the joined grammar of every parser has calls and answers."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from treadle.api.kinds import STRUCTURED_OUTPUT, TOOL_PARSERS
from treadle.api.parsers import Tool, ToolCallDelta
from treadle.api.sampling_params import SamplingParams, StructuredOutputsParams
from treadle.api.structured_output import GrammarSpec
from treadle.plugins import PluginManager
from treadle.testing.grammars import ByteTokenizer, sample_texts
from treadle.text.chat import Conversation
from treadle.text.parser_plugins import ParserPlugins
from treadle.text.tool_choice import parse_tools
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


STRICT: Any = {"type": "function", "function": {**TOOL["function"], "strict": True}}
LOOSE: Any = {"type": "function", "function": {"name": "other", "parameters": ARGUMENTS}}
CALLS = {
    "hermes": '<tool_call>\n{"name": "%s", "arguments": %s}\n</tool_call>',
    "mistral": '[TOOL_CALLS][{"name": "%s", "arguments": %s}]',
    "granite": '<|tool_call|>[{"name": "%s", "arguments": %s}]',
    "internlm": '<|action_start|><|plugin|>\n{"name": "%s", "parameters": %s}<|action_end|>',
    "deepseek_v31": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>%s<｜tool▁sep｜>%s<｜tool▁call▁end｜>"
    "<｜tool▁calls▁end｜>",
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.%s:0"
    "<|tool_call_argument_begin|>%s<|tool_call_end|><|tool_calls_section_end|>",
}
GOOD, BAD = '{"city": "Paris"}', '{"city": "Rome"}'


def accepts(plugins: ParserPlugins, grammar: str, text: str) -> bool:
    tokenizer: Any = ByteTokenizer()
    compiler = plugins.plugins.create(
        STRUCTURED_OUTPUT, "llguidance", tokenizer=tokenizer, vocab_size=tokenizer.vocab_size
    )
    matcher = compiler.compile(GrammarSpec("ebnf", grammar)).matcher()
    return all(map(matcher.accept_token, text.encode())) and matcher.is_accepting


@pytest.mark.parametrize("key", CALLS)
async def test_a_strict_tool_is_called_by_its_schema_only(key: str) -> None:
    """Text is free, and so are the arguments of tools that are not strict."""
    plugins = parsers(key)
    chat = Conversation(messages=[], tools=[STRICT, LOOSE])
    strict = (await with_calls(chat, SamplingParams(), plugins)).structured_outputs
    assert strict is not None and strict.grammar is not None

    def taken(text: str) -> bool:
        return accepts(plugins, strict.grammar or "", text)

    good, bad = (CALLS[key] % ("get_weather", arguments) for arguments in (GOOD, BAD))
    assert taken("a <b> [c] {d}\n") and taken(good) and taken(f"Now: {good}") and taken(f"{good}.")
    assert not taken(bad) and not taken(f"Now: {bad}") and not taken(f"{good}{bad}")
    assert taken(CALLS[key] % ("other", BAD))
    assert not taken(CALLS[key] % ("nobody", GOOD))


@pytest.mark.parametrize("key", ["qwen3_coder", "glm4_moe", "minimax_m2"])
async def test_elements_of_strict_tools_are_enforced(key: str) -> None:
    plugins = parsers(key)
    chat = Conversation(messages=[], tools=[STRICT])
    strict = (await with_calls(chat, SamplingParams(), plugins)).structured_outputs
    assert strict is not None and strict.grammar is not None
    forced = await plugins.forced_call(parse_tools([STRICT]), {"function": {"name": "get_weather"}})
    (text,) = sample_texts(plugins.plugins, GrammarSpec("ebnf", forced.grammar or ""), 1)
    assert "Paris" in text and accepts(plugins, strict.grammar, f"Now: {text} ok")
    assert not accepts(plugins, strict.grammar, f"Now: {text.replace('Paris', 'Rome')} ok")
    loose = Conversation(messages=[], tools=[STRICT, LOOSE])
    assert (await with_calls(loose, SamplingParams(), plugins)).structured_outputs is None


@pytest.mark.parametrize("key", ["llama3_json", "pythonic", "harmony", "xlam"])
async def test_where_calls_begin_as_text_does_nothing_is_enforced(key: str) -> None:
    chat = Conversation(messages=[], tools=[STRICT])
    params = SamplingParams()
    assert await with_calls(chat, params, parsers(key)) is params


async def test_a_tag_that_is_a_token_begins_a_call() -> None:
    """Its characters, written with other tokens, are text."""
    tokenizer: Any = ByteTokenizer("<tool_call>", "</tool_call>")
    keys = {"tool_call_parser": "hermes", "reasoning_parser": None}
    plugins = ParserPlugins(PluginManager(), tokenizer, keys)
    chat = Conversation(messages=[], tools=[STRICT])
    strict = (await with_calls(chat, SamplingParams(), plugins)).structured_outputs
    assert strict is not None
    compiler = plugins.plugins.create(
        STRUCTURED_OUTPUT, "llguidance", tokenizer=tokenizer, vocab_size=tokenizer.vocab_size
    )
    grammar = compiler.compile(GrammarSpec("ebnf", strict.grammar or ""))
    body = '\n{"name": "get_weather", "arguments": %s}\n'
    for begin, arguments, end, expected in (
        ([256], GOOD, [257], True),
        ([256], BAD, [257], False),
        (list(b"<tool_call>"), BAD, list(b"</tool_call>"), True),
    ):
        matcher = grammar.matcher()
        ids = [*b"Now: ", *begin, *(body % arguments).encode(), *end]
        assert (all(map(matcher.accept_token, ids)) and matcher.is_accepting) is expected
