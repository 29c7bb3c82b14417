from __future__ import annotations

from typing import Any

import pytest
from scripted import ScriptedEngine
from serving import Server, events, serving

USER = {"role": "user", "content": "hi"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


async def test_a_chat_completion() -> None:
    async with serving() as server:
        answer = (await server.chat()).json()
    assert answer["object"] == "chat.completion"
    assert answer["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Hello world", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ]
    assert answer["usage"]["prompt_tokens"] == len("user:hi|")


async def test_a_stream_has_a_role_text_a_reason_and_usage() -> None:
    async with serving(ScriptedEngine(["a", "", "b"])) as server:
        response = await server.chat(stream=True, stream_options={"include_usage": True}, n=2)
    *chunks, usage, done = events(response.text)
    assert done == "[DONE]" and usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 4
    for index in (0, 1):
        choices = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
        assert [c["delta"] for c in choices] == [
            {"role": "assistant", "content": ""},
            {"content": "a"},
            {"content": "b"},
            {},
        ]
        assert [c["finish_reason"] for c in choices] == [None, None, None, "stop"]


async def test_usage_runs_along_when_asked() -> None:
    options = {"continuous_usage_stats": True}
    async with serving() as server:
        chunks = events((await server.chat(stream=True, stream_options=options)).text)[:-1]
    assert [c["usage"]["completion_tokens"] for c in chunks] == [3, 3, 5, 9, 11, 11]


@pytest.mark.parametrize("stream", [False, True])
async def test_logprobs(stream: bool) -> None:
    async with serving(ScriptedEngine(["é", "f"])) as server:
        response = await server.chat(logprobs=True, top_logprobs=1, stream=stream)
    entries: list[Any] = []
    for part in events(response.text)[:-1] if stream else [response.json()]:
        entries += (part["choices"][0]["logprobs"] or {"content": []})["content"]
    assert [t["token"] for t in entries] == ["é", "f"]
    assert entries[0]["bytes"] == list("é".encode())
    assert [len(t["top_logprobs"]) for t in entries] == [1, 1]


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": [USER] * 4097}, "messages"),
    ({"messages": None}, "messages"),
    (
        {
            "messages": [
                {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
            ]
        },
        "messages[0].content[0].type",
    ),
    (
        {"messages": [USER, {"role": "user", "content": [{"type": "input_audio"}]}]},
        "messages[1].content[0].type",
    ),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"max_completion_tokens": 0}, "max_tokens"),
    ({"ignore_eos": True}, "ignore_eos"),
    ({"tools": [TOOL]}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": "required"}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": "maybe"}, "tool_choice"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [TOOL] * 129}, "tools"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tools": [{"type": "function", "function": {"name": "x" * 200}}]}, "tools[0].function.name"),
    ({"chat_template": "{{ 1 }}"}, "chat_template"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"__class__": 1}}, "chat_template_kwargs"),
    ({"add_generation_prompt": True, "continue_final_message": True}, "continue_final_message"),
    ({"continue_final_message": True}, "continue_final_message"),
]


async def test_a_wrong_field_is_named() -> None:
    errors: list[tuple[dict[str, Any], Any]] = []
    async with serving() as server:
        for fields, _ in WRONG:
            response = await server.chat(**fields)
            error = response.json()["error"]
            assert response.status_code == 400, (fields, error)
            assert error["message"] and error["type"] == "invalid_request_error"
            errors.append((fields, error["param"]))
        assert (await server.chat()).status_code == 200
    assert errors == WRONG


async def test_what_the_template_sees() -> None:
    engine = ScriptedEngine()
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}], "name": "ann", "secret": 1},
        {
            "role": "assistant",
            "content": None,
            "reasoning": "hm",
            "tool_calls": [
                {
                    "id": "c1",
                    "type": "function",
                    "function": {"name": "f", "arguments": '{"x": 1}'},
                },
                {"id": "c2", "type": "function", "function": {"name": "f", "arguments": "{broken"}},
            ],
        },
        {"role": "tool", "content": "4", "tool_call_id": "c1"},
        {"role": "assistant", "content": "so"},
    ]
    async with serving(engine) as server:
        response = await server.chat(
            messages=messages,
            tools=[TOOL],
            tool_choice="none",
            continue_final_message=True,
            chat_template_kwargs={"enable_thinking": False},
            documents=[{"text": "d"}],
        )
    assert response.status_code == 200, response.text
    template_input = engine.renderer.messages
    system, user, assistant, tool, _ = template_input["messages"]
    assert system == {"role": "system", "content": "be brief"}
    assert user == {"role": "user", "content": [{"type": "text", "text": "a"}], "name": "ann"}
    assert [c["function"]["arguments"] for c in assistant["tool_calls"]] == [{"x": 1}, "{broken"]
    assert assistant["reasoning_content"] == "hm" and assistant["content"] == ""
    assert tool["tool_call_id"] == "c1"
    assert template_input["tools"] is None
    assert (template_input["add_generation_prompt"], template_input["continue_final_message"]) == (
        False,
        True,
    )
    assert template_input["template_arguments"] == {
        "enable_thinking": False,
        "documents": [{"text": "d"}],
    }


async def test_a_template_that_knows_developer_gets_developer() -> None:
    engine = ScriptedEngine()
    engine.tokenizer.chat_template = "{% if role == 'developer' %}"  # type: ignore[misc]
    async with serving(engine) as server:
        await server.chat(messages=[{"role": "developer", "content": "x"}, USER])
    assert engine.renderer.messages["messages"][0]["role"] == "developer"


async def test_an_answer_may_fill_the_context() -> None:
    engine = ScriptedEngine()
    async with serving(engine) as server:
        await server.chat()
        assert engine.params is not None and engine.params.max_tokens is None
        await server.chat(max_tokens=5, max_completion_tokens=7)
        assert engine.params is not None and engine.params.max_tokens == 7


async def test_long_conversations_leave_the_event_loop() -> None:
    async with serving() as server:
        response = await server.chat(messages=[{"role": "user", "content": "x" * 10_000}])
    assert response.json()["usage"]["prompt_tokens"] == 10_006


async def tokens(server: Server, **body: Any) -> Any:
    return (await server.post("/tokenize", body)).json()


async def test_tokenize_and_detokenize() -> None:
    async with serving() as server:
        completion = await tokens(server, prompt="abc", return_token_strs=True)
        chat = await tokens(server, messages=[USER])
        neither = await server.post("/tokenize", {})
        text = await server.post("/detokenize", {"tokens": [97, 98]})
        many = await server.post("/detokenize", {"tokens": [1] * 1001})
        wide = await server.post("/detokenize", {"tokens": [0x110000]})
        minus = await server.post("/detokenize", {"tokens": [-1]})
    assert completion == {
        "count": 3,
        "max_model_len": 1000,
        "tokens": [97, 98, 99],
        "token_strs": ["a", "b", "c"],
    }
    assert "".join(map(chr, chat["tokens"])) == "user:hi|"
    assert text.json() == {"prompt": "ab"}
    assert [r.status_code for r in (neither, many, wide, minus)] == [400] * 4
