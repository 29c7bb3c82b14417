"""The installed parsers behind a server, with the official client: streamed, whole, and thinking."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest
from scripted import ScriptedEngine
from serving import serving

ASK: Any = [{"role": "user", "content": "How is the weather in Paris?"}]
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
    for name in ("get_weather", "get_time")
]
ARGUMENTS = {"city": 'Paris "é" {}'}
X = json.dumps(ARGUMENTS, ensure_ascii=False)
CALL_FORMATS = {
    "hermes": '<tool_call>\n{"name": "%s", "arguments": %s}\n</tool_call>',
    "llama3_json": '{"name": "%s", "parameters": %s}',
    "mistral": "[TOOL_CALLS]%s%s",
}


def call_text(parser: str, name: str) -> str:
    if parser == "pythonic":
        return f"[{name}(city={ARGUMENTS['city']!r})]"
    return CALL_FORMATS[parser] % (name, X)


@asynccontextmanager
async def openai_client(
    engine: ScriptedEngine, **options: Any
) -> AsyncIterator[openai.AsyncOpenAI]:
    async with serving(engine, **options) as server:
        url = f"{server.url}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
            yield client


async def complete_and_stream(client: openai.AsyncOpenAI, **options: Any) -> list[dict[str, Any]]:
    """The answer whole and streamed, as the same dictionary."""
    request: Any = {"model": "scripted", "messages": ASK, **options}
    completion = (await client.chat.completions.create(**request)).choices[0]
    message: Any = completion.message
    complete = {
        "content": message.content or "",
        "reasoning": getattr(message, "reasoning", None) or "",
        "calls": [(c.function.name, c.function.arguments) for c in message.tool_calls or ()],
        "reason": completion.finish_reason,
    }
    assert getattr(message, "reasoning_content", None) == getattr(message, "reasoning", None)
    streamed: dict[str, Any] = {"content": "", "reasoning": "", "calls": [], "reason": None}
    ids = []
    async for chunk in await client.chat.completions.create(**request, stream=True):
        choice = chunk.choices[0]
        delta: Any = choice.delta
        streamed["content"] += delta.content or ""
        streamed["reasoning"] += getattr(delta, "reasoning", None) or ""
        streamed["reason"] = choice.finish_reason or streamed["reason"]
        for call in delta.tool_calls or ():
            if call.id is not None:
                assert call.index == len(ids)
                ids.append(call.id)
                streamed["calls"].append((call.function.name, ""))
            name, before = streamed["calls"][call.index]
            streamed["calls"][call.index] = (name, before + call.function.arguments)
    assert len(set(ids)) == len(streamed["calls"])
    return [complete, streamed]


@pytest.mark.parametrize("size", [1, 7, 1000])
@pytest.mark.parametrize("parser", [*CALL_FORMATS, "pythonic"])
async def test_thinking_then_text_then_calls(parser: str, size: int) -> None:
    text = "<think>\nI must look.\n</think>\n\nA moment.\n"
    text += f"{call_text(parser, 'get_weather')}\n{call_text(parser, 'get_time')}"
    pieces = [text[pos : pos + size] for pos in range(0, len(text), size)]
    options = {"tool_call_parser": parser, "reasoning_parser": "qwen3"}
    async with openai_client(ScriptedEngine(pieces), **options) as client:
        for answer in await complete_and_stream(client, tools=TOOLS):
            assert answer["reasoning"] == "I must look."
            assert answer["content"] == "A moment.\n"
            assert answer["reason"] == "tool_calls"
            assert [name for name, _ in answer["calls"]] == ["get_weather", "get_time"]
            assert [json.loads(arguments) for _, arguments in answer["calls"]] == [ARGUMENTS] * 2
        (first_answer, _) = await complete_and_stream(
            client, tools=TOOLS, parallel_tool_calls=False
        )
        assert [name for name, _ in first_answer["calls"]] == ["get_weather"]


@pytest.mark.parametrize("parser", [*CALL_FORMATS, "pythonic"])
async def test_a_call_that_is_none_is_what_the_model_said(parser: str) -> None:
    text = call_text(parser, "get_weather")
    cut = text[: text.index("get_weather") + 5]
    content = cut.removeprefix("<tool_call>").removeprefix("[TOOL_CALLS]")
    async with openai_client(ScriptedEngine(list(cut)), tool_call_parser=parser) as client:
        for answer in await complete_and_stream(client, tools=TOOLS):
            assert answer == {"content": content, "reasoning": "", "calls": [], "reason": "stop"}


async def test_an_output_that_ends_inside_its_reasoning_has_no_content() -> None:
    engine = ScriptedEngine(["<thi", "nk>still", " thinking"], reason="length")
    async with openai_client(engine, reasoning_parser="deepseek_r1") as client:
        for answer in await complete_and_stream(client):
            assert answer["reasoning"] == "still thinking" and answer["content"] == ""
            assert answer["reason"] == "length"


@pytest.mark.parametrize("parser", [*CALL_FORMATS, "pythonic"])
async def test_every_parser_can_force_a_call(parser: str) -> None:
    engine = ScriptedEngine()
    named: Any = {"type": "function", "function": {"name": "get_time"}}
    async with openai_client(engine, tool_call_parser=parser) as client:
        for choice in ("required", named):
            await client.chat.completions.create(
                model="scripted", messages=ASK, tools=TOOLS, tool_choice=choice
            )
            assert engine.params is not None and engine.params.structured_outputs is not None
            guided = engine.params.structured_outputs
            spec = guided.grammar or json.dumps(guided.json)
            assert "get_time" in spec and ("get_weather" in spec) == (choice == "required")
