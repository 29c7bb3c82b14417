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
WRITTEN = {
    "hermes": '<tool_call>\n{"name": "%s", "arguments": %s}\n</tool_call>',
    "llama3_json": '{"name": "%s", "parameters": %s}',
    "mistral": "[TOOL_CALLS]%s%s",
}


def written(parser: str, name: str) -> str:
    if parser == "pythonic":
        return f"[{name}(city={ARGUMENTS['city']!r})]"
    return WRITTEN[parser] % (name, X)


@asynccontextmanager
async def asked(engine: ScriptedEngine, **options: Any) -> AsyncIterator[openai.AsyncOpenAI]:
    async with serving(engine, **options) as server:
        url = f"{server.url}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
            yield client


async def both(client: openai.AsyncOpenAI, **options: Any) -> list[dict[str, Any]]:
    """The answer whole and streamed, as the same dictionary."""
    asked: Any = {"model": "scripted", "messages": ASK, **options}
    whole = (await client.chat.completions.create(**asked)).choices[0]
    message: Any = whole.message
    first = {
        "content": message.content or "",
        "reasoning": getattr(message, "reasoning", None) or "",
        "calls": [(c.function.name, c.function.arguments) for c in message.tool_calls or ()],
        "reason": whole.finish_reason,
    }
    assert getattr(message, "reasoning_content", None) == getattr(message, "reasoning", None)
    then: dict[str, Any] = {"content": "", "reasoning": "", "calls": [], "reason": None}
    ids = []
    async for chunk in await client.chat.completions.create(**asked, stream=True):
        choice = chunk.choices[0]
        delta: Any = choice.delta
        then["content"] += delta.content or ""
        then["reasoning"] += getattr(delta, "reasoning", None) or ""
        then["reason"] = choice.finish_reason or then["reason"]
        for call in delta.tool_calls or ():
            if call.id is not None:
                assert call.index == len(ids)
                ids.append(call.id)
                then["calls"].append((call.function.name, ""))
            name, before = then["calls"][call.index]
            then["calls"][call.index] = (name, before + call.function.arguments)
    assert len(set(ids)) == len(then["calls"])
    return [first, then]


@pytest.mark.parametrize("size", [1, 7, 1000])
@pytest.mark.parametrize("parser", [*WRITTEN, "pythonic"])
async def test_thinking_then_text_then_calls(parser: str, size: int) -> None:
    text = "<think>\nI must look.\n</think>\n\nA moment.\n"
    text += f"{written(parser, 'get_weather')}\n{written(parser, 'get_time')}"
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    options = {"tool_call_parser": parser, "reasoning_parser": "qwen3"}
    async with asked(ScriptedEngine(pieces), **options) as client:
        for found in await both(client, tools=TOOLS):
            assert found["reasoning"] == "I must look."
            assert found["content"] == "A moment.\n"
            assert found["reason"] == "tool_calls"
            assert [name for name, _ in found["calls"]] == ["get_weather", "get_time"]
            assert [json.loads(given) for _, given in found["calls"]] == [ARGUMENTS] * 2
        (one, _) = await both(client, tools=TOOLS, parallel_tool_calls=False)
        assert [name for name, _ in one["calls"]] == ["get_weather"]


@pytest.mark.parametrize("parser", [*WRITTEN, "pythonic"])
async def test_a_call_that_is_none_is_what_the_model_said(parser: str) -> None:
    text = written(parser, "get_weather")
    cut = text[: text.index("get_weather") + 5]
    async with asked(ScriptedEngine(list(cut)), tool_call_parser=parser) as client:
        for found in await both(client, tools=TOOLS):
            assert found == {"content": cut, "reasoning": "", "calls": [], "reason": "stop"}


async def test_an_output_that_ends_inside_its_reasoning_has_no_content() -> None:
    engine = ScriptedEngine(["<thi", "nk>still", " thinking"], reason="length")
    async with asked(engine, reasoning_parser="deepseek_r1") as client:
        for found in await both(client):
            assert found["reasoning"] == "still thinking" and found["content"] == ""
            assert found["reason"] == "length"


@pytest.mark.parametrize("parser", [*WRITTEN, "pythonic"])
async def test_every_parser_can_force_a_call(parser: str) -> None:
    engine = ScriptedEngine()
    named: Any = {"type": "function", "function": {"name": "get_time"}}
    async with asked(engine, tool_call_parser=parser) as client:
        for choice in ("required", named):
            await client.chat.completions.create(
                model="scripted", messages=ASK, tools=TOOLS, tool_choice=choice
            )
            assert engine.params is not None and engine.params.structured_outputs is not None
            guided = engine.params.structured_outputs
            spec = guided.grammar or json.dumps(guided.json)
            assert "get_time" in spec and ("get_weather" in spec) == (choice == "required")
