"""The demo model behind a real ``weft serve``: it calls a tool, reads the result, and thinks.

No flag names a parser: they are found by what the model's chat template says.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from process import Process, served

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
THINK: Any = {"chat_template_kwargs": {"enable_thinking": True}}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    log = tmp_path_factory.mktemp("log") / "server.log"
    with served(Path("demo:weft-demo"), log, "--served-model-name", "demo") as process:
        yield process
        assert "Traceback" not in log.read_text()


def test_it_thinks_and_is_then_forced_to_call(tmp_path: Path) -> None:
    """The grammar waits until the thought is closed; only then it holds."""
    options = ("--reasoning-parser", "deepseek_r1")
    with (
        served(
            Path("demo:weft-demo"), tmp_path / "log", *options, "--served-model-name", "demo"
        ) as s,
        openai.OpenAI(base_url=f"{s.url}/v1", api_key="none", max_retries=0) as client,
    ):
        answer = asked(client, SUM, tools=TOOLS, tool_choice="required", extra_body=THINK)
    message = answer.choices[0].message
    assert "42" in message.reasoning and message.content is None
    assert [call.function.name for call in message.tool_calls] == ["get_weather"]


@pytest.fixture
def client(server: Process) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def asked(client: openai.OpenAI, messages: Any, **options: Any) -> Any:
    return client.chat.completions.create(
        model="demo", messages=messages, temperature=0, max_tokens=150, **options
    )


def test_a_tool_is_called_and_its_result_is_read(client: openai.OpenAI) -> None:
    choice = asked(client, WEATHER, tools=TOOLS).choices[0]
    assert choice.finish_reason == "tool_calls" and choice.message.content is None
    (call,) = choice.message.tool_calls
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments) == {"city": "Paris"}

    pieces = []
    for chunk in asked(client, WEATHER, tools=TOOLS, stream=True):
        delta = chunk.choices[0].delta
        assert not delta.content
        pieces += delta.tool_calls or []
    assert [p.function.name for p in pieces if p.function.name] == ["get_weather"]
    assert len(pieces) > 2, "the arguments came at once"
    assert "".join(p.function.arguments for p in pieces) == call.function.arguments

    result = {"role": "tool", "tool_call_id": call.id, "content": '{"temperature": 21}'}
    answered = [*WEATHER, choice.message.model_dump(exclude_none=True), result]
    last = asked(client, answered, tools=TOOLS).choices[0]
    assert last.finish_reason == "stop" and "21" in last.message.content


def test_it_thinks_before_it_answers(client: openai.OpenAI) -> None:
    message = asked(client, SUM, extra_body=THINK).choices[0].message
    assert "42" in message.content and "<" not in message.content
    assert "42" in message.reasoning and "<" not in message.reasoning
    assert message.reasoning_content == message.reasoning
    content, thought = "", ""
    for chunk in asked(client, SUM, extra_body=THINK, stream=True):
        delta = chunk.choices[0].delta
        content += delta.content or ""
        thought += getattr(delta, "reasoning", None) or ""
    assert (content, thought) == (message.content, message.reasoning)


def test_without_thinking_there_is_no_reasoning(client: openai.OpenAI) -> None:
    closed = {"chat_template_kwargs": {"enable_thinking": False}}
    for extra in ({}, closed):
        message = asked(client, SUM, extra_body=extra).choices[0].message
        assert "42" in message.content and not hasattr(message, "reasoning")


@pytest.mark.parametrize("thinking", [{}, THINK])
def test_a_call_can_be_forced(client: openai.OpenAI, thinking: Any) -> None:
    """Of a question that no tool is for."""
    named: Any = {"type": "function", "function": {"name": "get_weather"}}
    question: Any = [{"role": "user", "content": "What is weft?"}]
    assert not asked(client, question, tools=TOOLS).choices[0].message.tool_calls
    for choice in ("required", named):
        answer = asked(client, question, tools=TOOLS, tool_choice=choice, extra_body=thinking)
        calls = answer.choices[0].message.tool_calls
        assert calls and answer.choices[0].message.content is None
        for call in calls:
            assert call.function.name == "get_weather"
            assert json.loads(call.function.arguments).keys() == {"city"}
