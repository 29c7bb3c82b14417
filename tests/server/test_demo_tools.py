"""The demo model behind a real ``treadle serve``: it calls a tool and reads the result,
thinks, and answers in a schema; each with the others, whole and streamed.

No flag names a parser: they are found by what the model's chat template says.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest
from process import Process, served

from treadle import LLM, SamplingParams, StructuredOutputsParams

MODEL = "demo:treadle-demo"
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
    with served(Path(MODEL), log, "--served-model-name", "demo") as process:
        yield process
        assert "Traceback" not in log.read_text()


@pytest.fixture
def client(server: Process) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def create_chat(client: openai.OpenAI, messages: Any, **options: Any) -> Any:
    options = {"temperature": 0, "max_tokens": 150, **options}
    return client.chat.completions.create(model="demo", messages=messages, **options)


def test_a_tool_is_called_and_its_result_is_read(client: openai.OpenAI) -> None:
    choice = create_chat(client, WEATHER, tools=TOOLS).choices[0]
    assert choice.finish_reason == "tool_calls" and choice.message.content is None
    (call,) = choice.message.tool_calls
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments) == {"city": "Paris"}

    pieces = []
    for chunk in create_chat(client, WEATHER, tools=TOOLS, stream=True):
        delta = chunk.choices[0].delta
        assert not delta.content
        pieces += delta.tool_calls or []
    assert [p.function.name for p in pieces if p.function.name] == ["get_weather"]
    assert "".join(p.function.arguments for p in pieces) == call.function.arguments

    result = {"role": "tool", "tool_call_id": call.id, "content": '{"temperature": 21}'}
    answered = [*WEATHER, choice.message.model_dump(exclude_none=True), result]
    last = create_chat(client, answered, tools=TOOLS).choices[0]
    assert last.finish_reason == "stop" and "21" in last.message.content


def test_a_custom_tool_that_is_demanded_gets_what_its_regex_matches(client: openai.OpenAI) -> None:
    grammar = {"syntax": "regex", "definition": "[0-9]{3}-[a-f]{4}|none"}
    custom = {"name": "dial", "format": {"type": "grammar", "grammar": grammar}}
    choice: Any = {"type": "custom", "custom": {"name": "dial"}}
    tools: Any = [{"type": "custom", "custom": custom}]
    answer = create_chat(client, WEATHER, tools=tools, tool_choice=choice).choices[0]
    (call,) = answer.message.tool_calls
    assert call.type == "custom" and re.fullmatch("[0-9]{3}-[a-f]{4}|none", call.custom.input)


def test_it_thinks_before_it_answers(client: openai.OpenAI) -> None:
    message = create_chat(client, SUM, extra_body=THINK).choices[0].message
    assert "42" in message.content and "<" not in message.content
    assert "42" in message.reasoning and "<" not in message.reasoning
    assert message.reasoning_content == message.reasoning
    content, thought = "", ""
    for chunk in create_chat(client, SUM, extra_body=THINK, stream=True):
        delta = chunk.choices[0].delta
        content += delta.content or ""
        thought += getattr(delta, "reasoning", None) or ""
    assert (content, thought) == (message.content, message.reasoning)


def complete_and_stream(
    client: openai.OpenAI, messages: Any, **options: Any
) -> list[dict[str, Any]]:
    """Each choice as content, reasoning, calls and finish reason; whole and streamed the same."""
    complete, streamed = [], {}
    for choice in create_chat(client, messages, **options).choices:
        message = choice.message
        calls = [[c.function.name, c.function.arguments] for c in message.tool_calls or ()]
        entry = {"content": message.content or "", "calls": calls, "end": choice.finish_reason}
        complete.append({**entry, "reasoning": getattr(message, "reasoning", "")})
    for chunk in create_chat(client, messages, stream=True, **options):
        for choice in chunk.choices:
            empty: Any = {"content": "", "calls": [], "end": None, "reasoning": ""}
            partial: Any = streamed.setdefault(choice.index, empty)
            partial["content"] += choice.delta.content or ""
            partial["reasoning"] += getattr(choice.delta, "reasoning", None) or ""
            partial["end"] = choice.finish_reason or partial["end"]
            for call in choice.delta.tool_calls or ():
                if call.function.name:
                    partial["calls"].append([call.function.name, ""])
                partial["calls"][call.index][1] += call.function.arguments
    assert [streamed[i] for i in sorted(streamed)] == complete
    return complete


RESULT: dict[str, Any] = {
    "type": "object",
    "properties": {"answer": {"type": "integer"}},
    "required": ["answer"],
    "additionalProperties": False,
}
FORMAT: Any = {
    "type": "json_schema",
    "json_schema": {"name": "result", "schema": RESULT, "strict": True},
}
BACKENDS = ("llguidance", "outlines", "lm-format-enforcer")


@pytest.mark.parametrize("thinking", [True, False])
@pytest.mark.parametrize("backend", BACKENDS)
def test_it_answers_in_a_schema(client: openai.OpenAI, backend: str, thinking: bool) -> None:
    """Behind its thoughts, if it thinks: they are free, and apart from the answer."""
    body = {
        "chat_template_kwargs": {"enable_thinking": thinking},
        "guided_decoding_backend": backend,
    }
    for answer in complete_and_stream(client, SUM, response_format=FORMAT, extra_body=body):
        assert answer["end"] == "stop"
        jsonschema.validate(json.loads(answer["content"]), RESULT)
        assert ("42" in answer["reasoning"]) == thinking == bool(answer["reasoning"])


@pytest.mark.parametrize("backend", BACKENDS)
def test_several_answers_at_temperature_2(client: openai.OpenAI, backend: str) -> None:
    body = {**THINK, "guided_decoding_backend": backend}
    options: Any = {"temperature": 2.0, "n": 4, "seed": 5, "response_format": FORMAT}
    answers = complete_and_stream(client, SUM, **options, extra_body=body)
    assert len(answers) == 4 and all(f["reasoning"] for f in answers)
    assert "stop" in {f["end"] for f in answers} <= {"stop", "length"}
    for answer in answers:
        if answer["end"] == "stop":
            jsonschema.validate(json.loads(answer["content"]), RESULT)


@pytest.mark.parametrize("backend", ["llguidance", "outlines"])
@pytest.mark.parametrize("choice", ["required", "named"])
def test_it_thinks_and_is_then_forced_to_call(
    client: openai.OpenAI, choice: str, backend: str
) -> None:
    """The grammar waits until the thought is closed; only then it holds."""
    named: Any = {"type": "function", "function": {"name": "get_weather"}}
    tool_choice = named if choice == "named" else "required"
    body = {**THINK, "guided_decoding_backend": backend}
    (answer,) = complete_and_stream(
        client, SUM, tools=TOOLS, tool_choice=tool_choice, extra_body=body
    )
    assert "42" in answer["reasoning"] and answer["content"] == "" and answer["end"] == "tool_calls"
    assert [name for name, _ in answer["calls"]] == ["get_weather"]


def test_it_thinks_and_may_call(client: openai.OpenAI) -> None:
    (answer,) = complete_and_stream(client, WEATHER, tools=TOOLS, extra_body=THINK)
    assert answer["reasoning"] and answer["end"] == "tool_calls"
    assert [name for name, _ in answer["calls"]] == ["get_weather"]
    (answer,) = complete_and_stream(client, WEATHER, tools=TOOLS, tool_choice="none")
    assert not answer["calls"] and answer["content"] and "<" not in answer["content"]


def test_a_stop_text_ends_an_answer_in_a_schema(client: openai.OpenAI) -> None:
    closed = {"chat_template_kwargs": {"enable_thinking": False}}
    (answer,) = complete_and_stream(
        client, SUM, response_format=FORMAT, stop=[":"], extra_body=closed
    )
    assert answer["content"] == '{"answer"' and answer["end"] == "stop"


def test_without_thinking_there_is_no_reasoning(client: openai.OpenAI) -> None:
    closed = {"chat_template_kwargs": {"enable_thinking": False}}
    for extra in ({}, closed):
        message = create_chat(client, SUM, extra_body=extra).choices[0].message
        assert "42" in message.content and not hasattr(message, "reasoning")


@pytest.mark.parametrize("thinking", [{}, THINK])
def test_a_call_can_be_forced(client: openai.OpenAI, thinking: Any) -> None:
    """Of a question that no tool is for."""
    named: Any = {"type": "function", "function": {"name": "get_weather"}}
    question: Any = [{"role": "user", "content": "What is treadle?"}]
    assert not create_chat(client, question, tools=TOOLS).choices[0].message.tool_calls
    for choice in ("required", named):
        answer = create_chat(client, question, tools=TOOLS, tool_choice=choice, extra_body=thinking)
        calls = answer.choices[0].message.tool_calls
        assert calls and answer.choices[0].message.content is None
        for call in calls:
            assert call.function.name == "get_weather"
            assert json.loads(call.function.arguments).keys() == {"city"}


def test_a_tool_can_be_called_beside_a_format(client: openai.OpenAI) -> None:
    choice = create_chat(client, WEATHER, tools=TOOLS, response_format=FORMAT).choices[0]
    assert choice.finish_reason == "tool_calls"
    assert json.loads(choice.message.tool_calls[0].function.arguments) == {"city": "Paris"}


def test_llm_chat_answers_as_the_server_does(client: openai.OpenAI) -> None:
    """Content, reasoning and calls, under each choice, beside a format and with strict tools."""
    named: Any = {"type": "function", "function": {"name": "get_weather"}}
    strict: Any = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}]
    schema: Any = FORMAT["json_schema"]["schema"]
    params = SamplingParams(temperature=0, max_tokens=150)
    cases: list[tuple[Any, dict[str, Any], bool]] = [
        (WEATHER, {"tools": TOOLS}, False),
        (WEATHER, {"tools": TOOLS, **THINK}, False),
        (WEATHER, {"tools": TOOLS, "tool_choice": "none"}, False),
        (SUM, {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}, False),
        (SUM, {"tools": TOOLS, "tool_choice": named, **THINK}, False),
        (WEATHER, {"tools": strict}, False),
        (WEATHER, {"tools": TOOLS}, True),
        (SUM, {"tools": TOOLS, **THINK}, True),
    ]
    with LLM(MODEL, cpu_threads=1, num_pages=256, device="cpu") as llm:
        for messages, options, is_formed in cases:
            formed = params.replace(structured_outputs=StructuredOutputsParams(json=schema))
            (output,) = llm.chat(
                messages, formed if is_formed else params, use_tqdm=False, **options
            )
            found = output.outputs[0]
            body = {k: options[k] for k in ("chat_template_kwargs",) if k in options}
            fields = {k: v for k, v in options.items() if k not in body}
            if is_formed:
                fields["response_format"] = FORMAT
            choice = create_chat(client, messages, extra_body=body, **fields).choices[0]
            calls = [
                (c.function.name, c.function.arguments) for c in choice.message.tool_calls or ()
            ]
            assert [(call.name, call.arguments) for call in found.tool_calls] == calls, options
            assert found.content == (choice.message.content or ""), options
            assert found.reasoning == getattr(choice.message, "reasoning", None), options
            assert found.finish_reason == choice.finish_reason, options
