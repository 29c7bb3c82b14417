"""``LLM.chat`` and ``AsyncLLM.chat`` with tools and reasoning, on the demo model and its parsers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from treadle import LLM, AsyncLLM, SamplingParams, StructuredOutputsParams
from treadle.errors import RequestError
from treadle.outputs import CompletionOutput, ReasoningPart, TextPart, ToolCall
from treadle.text.output_parser import merge_parts

TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Get the weather for a city",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}},
                "required": ["city"],
            },
        },
    }
]
WEATHER: Any = [{"role": "user", "content": "What is the weather in Paris?"}]
SUM: Any = [{"role": "user", "content": "What is 12 plus 30?"}]
GREEDY = SamplingParams(temperature=0, max_tokens=150)
THINK: Any = {"chat_template_kwargs": {"enable_thinking": True}}
OPTIONS: Any = {"cpu_threads": 1, "num_pages": 256, "device": "cpu"}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(**OPTIONS) as engine:
        yield engine


def complete_chat(llm: LLM, messages: Any, params: SamplingParams = GREEDY, **options: Any) -> Any:
    (output,) = llm.chat(messages, params, use_tqdm=False, **options)
    return output.outputs[0]


def fields_of(output: CompletionOutput) -> tuple[str, str | None, list[tuple[str | None, str]]]:
    calls = [(call.name, call.arguments) for call in output.tool_calls]
    return output.content, output.reasoning, calls


def test_a_tool_is_called(llm: LLM) -> None:
    output = complete_chat(llm, WEATHER, tools=TOOLS)
    (call,) = output.tool_calls
    assert (call.index, call.name) == (0, "get_weather") and call.id.startswith("call_")
    assert json.loads(call.arguments) == {"city": "Paris"}
    assert output.finish_reason == "tool_calls" and output.content == ""
    assert output.text.startswith("<tool_call>") and output.reasoning is None


def test_the_result_of_a_tool_is_read(llm: LLM) -> None:
    (call,) = complete_chat(llm, WEATHER, tools=TOOLS).tool_calls
    function = {"name": call.name, "arguments": json.loads(call.arguments)}
    turn = {"role": "assistant", "tool_calls": [{"type": "function", "function": function}]}
    result = {"role": "tool", "content": '{"temperature": 21}'}
    output = complete_chat(llm, [*WEATHER, turn, result], tools=TOOLS)
    assert "21" in output.content and not output.tool_calls and output.finish_reason == "stop"


def test_reasoning_is_apart(llm: LLM) -> None:
    output = complete_chat(llm, SUM, **THINK)
    assert "42" in output.content and "<" not in output.content
    assert "42" in output.reasoning and "</think>" in output.text
    assert [type(part) for part in output.parts] == [ReasoningPart, TextPart]
    joined = complete_chat(llm, SUM, **THINK, separate_reasoning=False)
    assert joined.reasoning is None and joined.content == joined.text == output.text


def test_without_tools_a_call_is_text(llm: LLM) -> None:
    output = complete_chat(llm, WEATHER, tools=TOOLS, tool_choice="none")
    assert not output.tool_calls and output.content == output.text


def test_a_call_can_be_forced(llm: LLM) -> None:
    named = {"type": "function", "function": {"name": "get_weather"}}
    for choice in ("required", named):
        output = complete_chat(
            llm, [{"role": "user", "content": "What is treadle?"}], tools=TOOLS, tool_choice=choice
        )
        (call,) = output.tool_calls
        assert call.name == "get_weather" and json.loads(call.arguments).keys() == {"city"}


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "maybe"}, "tool_choice"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "other"}}},
            "tool_choice",
        ),
        ({"tools": TOOLS, "tool_choice": {"name": "get_weather"}}, "tool_choice"),
        ({"tools": ["get_weather"]}, "tools[0]"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0]"),
    ],
)
def test_wrong_tools_are_named(llm: LLM, options: Any, param: str) -> None:
    with pytest.raises(RequestError) as error:
        complete_chat(llm, WEATHER, **options)
    assert error.value.param == param


def test_a_constraint_holds_for_the_content(llm: LLM) -> None:
    schema = {
        "type": "object",
        "properties": {"answer": {"type": "integer"}},
        "required": ["answer"],
    }
    params = GREEDY.replace(structured_outputs=StructuredOutputsParams(json=schema))
    output = complete_chat(llm, SUM, params, **THINK)
    assert type(json.loads(output.content)["answer"]) is int and "42" in output.reasoning


def test_with_tools_and_a_schema_a_call_is_possible(llm: LLM) -> None:
    """The demo model calls the tool for the weather, and answers a sum: in the form that it must have."""
    constraint = StructuredOutputsParams(json={"enum": ["forty-two", "one"]})
    params = SamplingParams(temperature=0, max_tokens=150, structured_outputs=constraint)
    called = complete_chat(llm, WEATHER, params, tools=TOOLS)
    assert [call.name for call in called.tool_calls] == ["get_weather"] and not called.content
    forced = complete_chat(llm, SUM, params, tools=TOOLS)
    assert forced.tool_calls or json.loads(forced.content) in ("forty-two", "one")


def test_a_strict_tool_is_called_by_its_schema(llm: LLM) -> None:
    """The model would write Paris."""
    schema = {
        "type": "object",
        "properties": {"city": {"enum": ["Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    }
    function = {**TOOLS[0]["function"], "strict": True, "parameters": schema}
    output = complete_chat(llm, WEATHER, tools=[{"type": "function", "function": function}])
    assert [json.loads(call.arguments) for call in output.tool_calls] == [{"city": "Rome"}]


def test_several_conversations_and_outputs(llm: LLM) -> None:
    outputs = llm.chat([WEATHER, SUM], [GREEDY.replace(n=2), GREEDY], use_tqdm=False, tools=TOOLS)
    first, second = (output.outputs for output in outputs)
    assert [len(completion.tool_calls) for completion in first] == [1, 1] and len(second) == 1
    assert len({call.id for completion in first for call in completion.tool_calls}) == 2


def test_a_constraint_makes_no_model_think_that_was_not_asked_to(llm: LLM) -> None:
    """However likely the model finds it: the first token is one of the grammar's."""
    (opener,) = llm.get_tokenizer().encode("<think>", add_special_tokens=False)
    params = GREEDY.replace(
        structured_outputs=StructuredOutputsParams(regex="[0-9]{2}"), logit_bias={opener: 100.0}
    )
    output = complete_chat(llm, SUM, params)
    assert output.reasoning is None and output.content.isdigit()
    assert complete_chat(llm, SUM, params, **THINK).text.startswith("<think>")


@pytest.mark.parametrize(
    ("messages", "options"), [(WEATHER, {"tools": TOOLS}), (SUM, THINK), (WEATHER, {})]
)
def test_streams_give_the_same(llm: LLM, messages: Any, options: Any) -> None:
    expected = complete_chat(llm, messages, **options)
    parts: list[Any] = []
    text = ""
    for output in llm.stream_chat(messages, GREEDY.replace(output_kind="delta"), **options):
        (completion,) = output.outputs
        parts += completion.parts or ()
        text += completion.text
    assert text == expected.text and completion.finish_reason == expected.finish_reason
    merged = CompletionOutput(index=0, text=text, token_ids=[], parts=merge_parts(parts))
    assert fields_of(merged) == fields_of(expected)
    kinds = [completion.outputs[0] for completion in llm.stream_chat(messages, GREEDY, **options)]
    assert fields_of(kinds[-1]) == fields_of(expected)
    for before, after in pairwise(kinds):
        assert after.content.startswith(before.content)
        assert (after.reasoning or "").startswith(before.reasoning or "")


def test_parsers_can_be_switched_off() -> None:
    with LLM(**OPTIONS, tool_call_parser="none", reasoning_parser="none") as engine:
        output = complete_chat(engine, WEATHER, tools=TOOLS)
        assert output.parts is None and output.content == output.text != ""
        with pytest.raises(RequestError, match="needs a tool parser"):
            complete_chat(engine, WEATHER, tools=TOOLS, tool_choice="required")


PLUGIN = """
from treadle.api import impl
from treadle.api.parsers import ToolCallDelta

TREADLE = {"tool_parsers": ["odd"]}


class Odd:
    def feed(self, text, ids):
        raise KeyError("odd")

    def finish(self):
        return []

    def grammar(self, choice):
        return None


@impl
def treadle_tool_parser(name):
    return Odd()
"""


def test_a_parser_that_fails_is_named_and_its_text_delivered(tmp_path: Path) -> None:
    file = tmp_path / "odd.py"
    file.write_text(PLUGIN)
    with LLM(**OPTIONS, plugin_file=[str(file)], tool_call_parser="odd") as engine:
        output = complete_chat(engine, WEATHER, tools=TOOLS)
    assert output.parser_errors == ["tool_call_parser=odd"]
    assert output.content == output.text and output.finish_reason == "stop"


def test_the_engine_for_event_loops_gives_the_same(llm: LLM) -> None:
    async def main() -> list[Any]:
        async with AsyncLLM(**OPTIONS) as engine:

            async def last(messages: Any, **options: Any) -> Any:
                outputs = [output async for output in engine.chat(messages, GREEDY, **options)]
                return outputs[-1].outputs[0]

            return await asyncio.gather(last(WEATHER, tools=TOOLS), last(SUM, **THINK))

    called, thought = asyncio.run(main())
    assert fields_of(called) == fields_of(complete_chat(llm, WEATHER, tools=TOOLS))
    assert fields_of(thought) == fields_of(complete_chat(llm, SUM, **THINK))


def test_parts_are_merged_in_order() -> None:
    pieces = [
        TextPart("a"),
        TextPart("b"),
        ToolCall(index=0, id="x", name="f", arguments="{"),
        TextPart("c"),
        ToolCall(index=0, arguments="}"),
        ReasoningPart("d"),
    ]
    assert merge_parts(pieces) == [
        TextPart("ab"),
        ToolCall(index=0, id="x", name="f", arguments="{}"),
        TextPart("c"),
        ReasoningPart("d"),
    ]
