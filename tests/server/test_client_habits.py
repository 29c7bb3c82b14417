"""What real clients send to ``/v1/chat/completions`` beyond its first specification: each of it is
served or refused, and nothing that changes the answer is dropped."""

from __future__ import annotations

import json
from typing import Any

import pytest
from scripted import ScriptedEngine
from serving import events, serving

from treadle.errors import RequestError
from treadle_server.chat.custom_input import CustomInput

PARSERS = {"tool_call_parser": "hermes", "reasoning_parser": "qwen3"}
SCHEMA: Any = {"type": "object", "properties": {"city": {"type": "string"}}}


def function(name: str) -> Any:
    return {"type": "function", "function": {"name": name, "parameters": SCHEMA}}


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


async def test_old_turns_in_every_form_are_read() -> None:
    messages = [
        {"role": "system", "content": [{"type": "input_text", "text": "S"}]},
        {"role": "user", "content": None},
        {
            "role": "assistant",
            "refusal": None,
            "annotations": [],
            "audio": None,
            "function_call": None,
            "reasoning_details": [{}],
            "content": [
                {"type": "thinking", "thinking": "T", "signature": "s"},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "reasoning", "text": "dropped"},
                {"type": "output_text", "text": "A", "annotations": [], "cache_control": {}},
            ],
            "tool_calls": [
                {"index": 0, "id": "c1", "function": {"name": "f", "arguments": {"a": 1}}},
                {"id": "c2", "type": "custom", "custom": {"name": "run", "input": "ls"}},
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "1"}]},
        {"role": "assistant", "function_call": {"name": "g", "arguments": "{}"}},
        {"role": "function", "name": "g", "content": "2"},
    ]
    engine = ScriptedEngine()
    async with serving(engine) as server:
        answer = await server.chat(messages=messages)
        assert answer.status_code == 200, answer.text
    _system, user, turn, tool, old_call, old_result = engine.renderer.messages["messages"]
    assert user["content"] == ""
    assert turn["content"] == [{"type": "text", "text": "A"}] and turn["reasoning_content"] == "T"
    assert [c["function"] for c in turn["tool_calls"]] == [
        {"name": "f", "arguments": {"a": 1}},
        {"name": "run", "arguments": {"input": "ls"}},
    ]
    assert tool["tool_call_id"] == "c1"
    assert old_call["tool_calls"][0]["id"] == old_result["tool_call_id"] == "g"
    assert old_result["role"] == "tool"


async def test_values_that_say_nothing_change_nothing() -> None:
    engine = ScriptedEngine()
    async with serving(engine) as server:
        for fields in (
            {"stop": None},
            {"stop": ""},
            {"stop": []},
            {"stop": ["", None]},
            {"mm_processor_kwargs": {}},
            {"suffix": ""},
            {"tools": []},
            {"tools": [], "tool_choice": "auto"},
            {"tool_choice": "none"},
            {"max_tokens": -1},
            {"max_completion_tokens": -1},
            {"modalities": ["text"], "audio": None, "keep_alive": 1, "made_up_tomorrow": {}},
        ):
            answer = await server.chat(**fields)
            assert answer.status_code == 200, (fields, answer.text)
            assert engine.params is not None and engine.params.stop is None
            assert engine.params.max_tokens is None
        assert (await server.chat(stop=["a", ""])).status_code == 200
        assert engine.params.stop == ["a"]
        assert (await server.chat(max_tokens=10**6)).status_code == 200
        assert engine.params.max_tokens == 1000
        refused = await server.chat(mm_processor_kwargs={"a": 1})
        assert refused.json()["error"]["param"] == "mm_processor_kwargs"


@pytest.mark.parametrize(
    ("fields", "arguments"),
    [
        ({"reasoning_effort": "none"}, {"enable_thinking": False, "reasoning_effort": "none"}),
        ({"reasoning_effort": "high"}, {"enable_thinking": True, "reasoning_effort": "high"}),
        ({"reasoning": {"effort": "low"}}, {"enable_thinking": True, "reasoning_effort": "low"}),
        ({"reasoning": {"enabled": False}}, {"enable_thinking": False}),
        ({"reasoning": {"max_tokens": 64}}, {"thinking_budget": 64}),
        ({"thinking": {"type": "disabled"}}, {"enable_thinking": False}),
        (
            {"thinking": {"type": "enabled", "budget_tokens": 64}},
            {"enable_thinking": True, "thinking_budget": 64},
        ),
        (
            {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}},
            {"enable_thinking": True},
        ),
        ({"reasoning": {}}, {}),
    ],
)
async def test_every_switch_of_thinking_reaches_the_template(fields: Any, arguments: Any) -> None:
    engine = ScriptedEngine()
    async with serving(engine) as server:
        assert (await server.chat(**fields)).status_code == 200
    given = engine.renderer.messages["template_arguments"]
    assert {name: given.get(name) for name in arguments} == arguments
    assert "enable_thinking" in arguments or "enable_thinking" not in given


async def test_reasoning_is_counted_and_can_be_left_out() -> None:
    engine = ScriptedEngine(["<think>", "I must", " look", "</think>", "Yes"])
    async with serving(engine, **PARSERS) as server:
        whole = (await server.chat()).json()
        body = {"stream": True, "stream_options": {"include_usage": True}}
        streamed = events((await server.chat(**body)).text)[-2]
        hidden = (await server.chat(reasoning={"exclude": True})).json()
    tokens = len("<think>I must look")
    for answer in (whole, streamed):
        assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": tokens}
    assert whole["choices"][0]["message"]["reasoning"] == "I must look"
    assert "reasoning" not in hidden["choices"][0]["message"]


async def test_choices_of_tools() -> None:
    tools = [function("f"), function("g"), {"type": "custom", "custom": {"name": "run"}}]
    engine = ScriptedEngine()
    async with serving(engine, **PARSERS) as server:

        async def choose(choice: Any) -> tuple[str, list[str]]:
            answer = await server.chat(tools=tools, tool_choice=choice)
            assert answer.status_code == 200, answer.text
            assert engine.params is not None
            constraint = engine.params.structured_outputs
            given = engine.renderer.messages["tools"]
            names = [tool["function"]["name"] for tool in given]
            return "" if constraint is None else repr(constraint), names

        everything = ["f", "g", "run"]
        forced, _ = await choose("any")
        assert all(name in forced for name in everything)
        forced, names = await choose({"type": "custom", "custom": {"name": "run"}})
        assert "run" in forced and names == everything
        allowed = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "g"}}]}
        assert await choose({"type": "allowed_tools", "allowed_tools": allowed}) == ("", ["g"])
        allowed = {"mode": "required", "tools": [{"name": "f"}, {"name": "run"}]}
        forced, names = await choose({"type": "allowed_tools", "allowed_tools": allowed})
        assert "run" in forced and names == ["f", "run"]
        for wrong in (
            {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}},
            {"type": "allowed_tools", "allowed_tools": {"tools": [{"name": "h"}]}},
            {"type": "allowed_tools"},
            {"type": "function"},
        ):
            refused = await server.chat(tools=tools, tool_choice=wrong)
            assert refused.status_code == 400
            assert refused.json()["error"]["param"].startswith("tool_choice")


@pytest.mark.parametrize("size", [1, 7, 1000])
async def test_a_custom_tool_gets_its_text(size: int) -> None:
    text = call("run", input='echo "é"\n') + call("f", city="Paris")
    pieces = [text[pos : pos + size] for pos in range(0, len(text), size)]
    tools = [{"type": "custom", "custom": {"name": "run", "format": {"type": "text"}}}]
    options: Any = {"tools": [*tools, function("f")]}
    async with serving(ScriptedEngine(pieces), **PARSERS) as server:
        whole = (await server.chat(**options)).json()["choices"][0]["message"]["tool_calls"]
        streamed = events((await server.chat(stream=True, **options)).text)
    assert whole[0]["type"] == "custom" and "function" not in whole[0]
    assert whole[0]["custom"] == {"name": "run", "input": 'echo "é"\n'}
    assert whole[1]["function"]["name"] == "f"
    deltas = [
        piece
        for event in streamed[:-1]
        for choice in event["choices"]
        for piece in choice["delta"].get("tool_calls", ())
    ]
    custom = [piece for piece in deltas if piece["index"] == 0]
    assert custom[0]["type"] == "custom" and custom[0]["custom"]["name"] == "run"
    assert "".join(piece["custom"]["input"] for piece in custom) == 'echo "é"\n'


async def test_a_grammar_of_a_custom_tool_is_told_to_the_model() -> None:
    grammar = {"type": "grammar", "grammar": {"syntax": "lark", "definition": 'start: "x"'}}
    tools = [{"type": "custom", "custom": {"name": "run", "format": grammar}}]
    engine = ScriptedEngine()
    async with serving(engine, **PARSERS) as server:
        assert (await server.chat(tools=tools)).status_code == 200
    (tool,) = engine.renderer.messages["tools"]
    assert 'start: "x"' in tool["function"]["description"]


async def test_functions_are_served_in_their_own_form() -> None:
    text = call("f", city="Paris") + call("f", city="Rome")
    options: Any = {"functions": [function("f")["function"]], "function_call": "auto"}
    async with serving(ScriptedEngine(list(text)), **PARSERS) as server:
        choice = (await server.chat(**options)).json()["choices"][0]
        streamed = events((await server.chat(stream=True, **options)).text)[:-1]
        both = await server.chat(tools=[function("f")], **options)
    assert choice["finish_reason"] == "function_call" and "tool_calls" not in choice["message"]
    assert choice["message"]["function_call"]["name"] == "f"
    assert json.loads(choice["message"]["function_call"]["arguments"]) == {"city": "Paris"}
    pieces = [e["choices"][0]["delta"].get("function_call") for e in streamed]
    assert "".join(p["arguments"] for p in pieces if p) == '{"city": "Paris"}'
    assert streamed[-1]["choices"][0]["finish_reason"] == "function_call"
    assert both.status_code == 400 and both.json()["error"]["param"] == "functions"


async def test_turns_are_merged_only_for_a_template_that_refuses_their_order() -> None:
    messages = [
        {"role": "user", "content": "1"},
        {"role": "system", "content": "A"},
        {"role": "user", "content": [{"type": "text", "text": "2"}]},
        {"role": "developer", "content": "B"},
    ]
    engine = ScriptedEngine()
    render = engine.renderer.render

    def strict(messages: Any, **options: Any) -> str:
        if [m["role"] for m in messages] != ["system", "user"]:
            raise RequestError("roles must alternate", param="messages")
        return render(messages, **options)

    async with serving(engine) as server:
        assert (await server.chat(messages=messages)).status_code == 200
        assert len(engine.renderer.messages["messages"]) == 4
        engine.renderer.render = strict  # type: ignore[method-assign]
        assert (await server.chat(messages=messages)).status_code == 200
        system, user = engine.renderer.messages["messages"]
        assert (system["content"], user["content"]) == ("A\n\nB", "1\n\n2")
        refused = await server.chat(messages=messages[:1])
        assert refused.status_code == 400 and "alternate" in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"input": "a\\ud83d\\ude00\\u00e9\\n\\"b\\\\"}', 'a😀é\n"b\\'),
        ('{"input":"\\ud83d"}', "\ufffd"),
        ('{"input":"line\nfeed"}', "line\nfeed"),
        ('{"other": 1}', '{"other": 1}'),
        ("plain", "plain"),
        ('{"input": ""}', ""),
    ],
)
def test_the_input_is_the_same_however_the_arguments_are_cut(arguments: str, text: str) -> None:
    for size in (1, 2, 3, 5, 1000):
        reader = CustomInput()
        pieces = [arguments[pos : pos + size] for pos in range(0, len(arguments), size)]
        assert "".join(map(reader.feed, pieces)) + reader.finish() == text


async def test_a_page_may_read_every_answer_of_a_server_that_allows_it() -> None:
    page = {"origin": "https://page.example"}
    ask = {
        **page,
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,x-stainless-os,anthropic-version",
    }
    async with serving(api_key=["k"], allowed_origins=["https://page.example"]) as server:
        for path in ("/v1/messages", "/v1/responses", "/v1/chat/completions"):
            preflight = await server.client.options(path, headers=ask)
            allowed = preflight.headers["access-control-allow-headers"]
            assert preflight.status_code == 204 or preflight.status_code == 200
            assert allowed == "*" or "x-stainless-os" in allowed
            for headers in (page, {**page, "authorization": "Bearer k"}):
                answer = await server.post(path, b"{", headers=headers)
                assert answer.status_code in (400, 401)
                assert answer.headers["access-control-allow-origin"] == page["origin"]
        stranger = await server.post("/v1/messages", b"{", headers={"origin": "https://x"})
        assert "access-control-allow-origin" not in stranger.headers


async def test_what_probes_ask() -> None:
    async with serving() as server:
        assert (await server.client.head("/")).status_code == 200
        assert "/openapi.json" in (await server.client.get("/")).text
        info = (await server.client.get("/tokenizer_info")).json()
    assert info["eos_token"] == "\x00" and info["model_max_length"] == 1000
    assert info["chat_template"] == "characters" and info["bos_token"] is None
