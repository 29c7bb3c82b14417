"""``/v1/messages`` with the official client: blocks, events, tools, thoughts and errors."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest
from scripted import ScriptedEngine
from serving import Server, serving

if TYPE_CHECKING:  # its import takes seconds, in every process that collects tests
    import anthropic

PARSERS = {"tool_call_parser": "hermes", "reasoning_parser": "qwen3"}
SCHEMA: Any = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOL: Any = {"name": "get_weather", "input_schema": SCHEMA}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
ASK: Any = [{"role": "user", "content": "hi"}]
THINK: Any = {"type": "enabled", "budget_tokens": 1024}


@asynccontextmanager
async def answering(
    text: Any = ("Hel", "lo"), **options: Any
) -> AsyncIterator[tuple[anthropic.AsyncAnthropic, Server, ScriptedEngine]]:
    import anthropic

    engine = ScriptedEngine(list(text), **options.pop("engine", {}))
    key = (options.get("api_key") or ["none"])[0]
    async with (
        serving(engine, **options) as server,
        anthropic.AsyncAnthropic(base_url=server.url, api_key=key, max_retries=0) as client,
    ):
        yield client, server, engine


def prompt_of(engine: ScriptedEngine) -> list[dict[str, Any]]:
    return list(engine.renderer.messages["messages"])


def create(client: anthropic.AsyncAnthropic, **options: Any) -> Any:
    return client.messages.create(
        **{"model": "scripted", "max_tokens": 100, "messages": ASK, **options}
    )


async def test_a_text_is_answered_and_every_event_comes_in_order() -> None:
    async with answering() as (client, server, _):
        whole = await create(client)
        assert [block.text for block in whole.content] == ["Hello"]
        assert whole.stop_reason == "end_turn" and whole.id.startswith("msg_")
        usage = whole.usage
        assert (usage.input_tokens, usage.cache_read_input_tokens, usage.output_tokens) == (6, 2, 5)
        assert whole._request_id
        body = {"max_tokens": 9, "messages": ASK, "stream": True}
        raw = await server.post("/v1/messages?beta=true", body)
    lines = raw.text.splitlines()
    names = [line[7:] for line in lines if line.startswith("event: ")]
    sent = [json.loads(line[6:]) for line in lines if line.startswith("data: ")]
    assert [event["type"] for event in sent] == names
    assert names == [
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert sent[0]["message"]["usage"]["input_tokens"] == 6 and sent[0]["message"]["content"] == []
    assert sent[-2]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert sent[-2]["usage"]["output_tokens"] == 5


@pytest.mark.parametrize("size", [1, 9, 1000])
async def test_thoughts_texts_and_calls_are_blocks_streamed_or_not(size: int) -> None:
    text = f"<think>\nI must look.\n</think>\n\nA moment.{CALL}"
    pieces = [text[pos : pos + size] for pos in range(0, len(text), size)]
    options: Any = {"tools": [TOOL], "thinking": THINK, "max_tokens": 2000}
    async with answering(pieces, **PARSERS) as (client, _, engine):
        whole = await create(client, **options)
        assert engine.renderer.messages["template_arguments"]["enable_thinking"] is True
        async with client.messages.stream(model="scripted", messages=ASK, **options) as stream:
            async for _event in stream:
                pass
            streamed = await stream.get_final_message()
        unasked = await create(client, tools=[TOOL])
        assert engine.renderer.messages["template_arguments"]["enable_thinking"] is False
    for message in (whole, streamed):
        thought, answer, call = message.content
        assert (thought.type, thought.thinking) == ("thinking", "I must look.")
        assert thought.signature and answer.text.strip() == "A moment."
        assert (call.name, call.input) == ("get_weather", {"city": "Paris"})
        assert message.stop_reason == "tool_use"
    assert [block.type for block in unasked.content] == ["text", "tool_use"]


async def test_what_claude_code_sends_becomes_a_chat() -> None:
    cached: Any = {"cache_control": {"type": "ephemeral"}}
    messages: Any = [
        {"role": "user", "content": [{"type": "text", "text": "one", **cached}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "T", "signature": "s"},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "A"},
                {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": 1}},
                {"type": "tool_use", "id": "t2", "name": "f", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": "1", **cached},
                {
                    "type": "tool_result",
                    "tool_use_id": "t2",
                    "is_error": True,
                    "content": [{"type": "text", "text": "2"}],
                },
                {"type": "text", "text": "two"},
            ],
        },
        {"role": "system", "content": "later"},
    ]
    body = {
        "model": "scripted",
        "max_tokens": 32000,
        "messages": messages,
        "system": [
            {"type": "text", "text": "x-anthropic-billing-header: cc_version=1;"},
            {"type": "text", "text": "S", **cached},
        ],
        "metadata": {"user_id": "u"},
        "output_config": {"effort": "high"},
        "context_management": {"edits": []},
        "tools": [TOOL, {"type": "web_search_20250305", "name": "web_search"}],
        "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
        "stop_sequences": ["END"],
        "top_k": 5,
        "brand_new": 1,
    }
    async with answering(**PARSERS) as (_, server, engine):
        answer = await server.post("/v1/messages?beta=true", body)
        assert answer.status_code == 200, answer.text
        count = await server.post("/v1/messages/count_tokens", body)
    assert answer.headers["x-ignored-fields"] == "brand_new,tools.web_search_20250305"
    assert answer.headers["request-id"] == answer.headers["x-request-id"]
    usage = answer.json()["usage"]
    total = usage["input_tokens"] + usage["cache_read_input_tokens"]
    assert count.json() == {"input_tokens": total}
    system, one, turn, first, second, two, later = prompt_of(engine)
    assert [m["content"] for m in (system, one, turn)] == ["S", "one", "A"]
    assert turn["reasoning_content"] == "T" and len(turn["tool_calls"]) == 2
    assert [(m["role"], m.get("tool_call_id"), m["content"]) for m in (first, second)] == [
        ("tool", "t1", "1"),
        ("tool", "t2", "Error: 2"),
    ]
    assert (two["role"], two["content"]) == ("user", "two")
    assert (later["role"], later["content"]) == ("system", "later")
    assert engine.params is not None
    assert (engine.params.max_tokens, engine.params.top_k) == (1000, 5)
    assert engine.params.stop == ["END"]
    assert engine.renderer.messages["template_arguments"]["reasoning_effort"] == "high"


async def test_choices_of_tools_and_formats_reach_the_engine() -> None:
    async with answering(**PARSERS) as (client, _, engine):
        for choice in ({"type": "any"}, {"type": "tool", "name": "get_weather"}):
            await create(client, tools=[TOOL], tool_choice=choice)
            assert engine.params is not None and engine.params.structured_outputs is not None
        await create(client, tools=[{**TOOL, "strict": True}])
        assert engine.params.structured_outputs is not None
        await create(client, tools=[TOOL])
        assert engine.params.structured_outputs is None
        await create(client, tools=[TOOL], tool_choice={"type": "none"})
        assert engine.params.structured_outputs is None
        assert engine.renderer.messages["tools"] is None
        form = {"type": "json_schema", "schema": SCHEMA}
        await create(client, extra_body={"output_config": {"format": form}})
        assert engine.params.structured_outputs.json == SCHEMA


async def test_why_an_answer_ended_is_told() -> None:
    stop: Any = {"reason": "stop"}
    async with answering(engine=stop) as (client, _, _engine):
        assert (await create(client, max_tokens=1)).stop_reason == "max_tokens"
        prefilled = [*ASK, {"role": "assistant", "content": "Once"}]
        await create(client, messages=prefilled)
        options = _engine.renderer.messages
        assert options["continue_final_message"] and not options["add_generation_prompt"]


async def test_a_prompt_that_is_too_long_is_refused_in_known_words() -> None:
    import anthropic

    async with answering() as (client, _, _engine):
        for text in ("x" * 1200, "x" * 2_000_000):
            with pytest.raises(anthropic.BadRequestError) as error:
                await create(client, messages=[{"role": "user", "content": text}])
            words = r"prompt is too long: \d+ tokens > \d+ maximum"
            assert error.match(words)


async def test_errors_have_the_envelope() -> None:
    import anthropic

    async with answering(api_key=["k"]) as (client, server, engine):
        with pytest.raises(anthropic.NotFoundError, match="other"):
            await create(client, model="other")
        with pytest.raises(anthropic.AuthenticationError):
            await create(client.with_options(api_key="wrong"))
        anonymous = await server.post("/v1/messages", {"messages": ASK})
        for answer in (
            anonymous,
            await server.post("/v1/messages", b"{", headers={"x-api-key": "k"}),
            await server.client.get("/v1/messages", headers={"x-api-key": "k"}),
            await server.post("/v1/messages/nothing", b"{}", headers={"x-api-key": "k"}),
        ):
            body = answer.json()
            assert body["type"] == "error" and body["error"].keys() == {"type", "message"}
            assert body["request_id"] == answer.headers["request-id"]

        def fail(engine: ScriptedEngine, step: int) -> None:
            if step:
                raise RuntimeError("secret")

        engine.before = fail
        body = {"max_tokens": 9, "messages": ASK, "stream": True}
        text = (await server.post("/v1/messages", body, headers={"x-api-key": "k"})).text
    event, data = text.strip().splitlines()[-2:]
    assert event == "event: error" and "secret" not in text
    assert json.loads(data[6:])["error"]["type"] == "api_error"


async def test_a_long_wait_opens_the_stream_and_is_filled_with_pings() -> None:
    import asyncio

    release = asyncio.Event()

    async def hold(step: int) -> None:
        await release.wait()

    async with answering(sse_keep_alive_interval=0.02) as (_, server, engine):
        engine.hold = hold
        body = {"max_tokens": 9, "messages": ASK, "stream": True}
        async with server.client.stream("POST", "/v1/messages", json=body) as answer:
            text = ""
            async for piece in answer.aiter_text():
                text += piece
                if text.count("event: ping") >= 2:
                    release.set()
    names = [line[7:] for line in text.splitlines() if line.startswith("event: ")]
    assert names[0] == "message_start" and names[-1] == "message_stop"
    assert names.count("message_start") == 1


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "image"),
    ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "document"),
    (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}] * 16385}]},
        "blocks",
    ),
    ({"messages": [{"role": "assistant", "content": [{"type": "tool_use"}]}]}, "name"),
    ({"system": 7}, "system"),
    ({"system": [{"type": "image"}]}, "system"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"n": 2}, "n is 2"),
    ({"temperature": -1}, "temperature"),
    ({"stop_sequences": ["x"] * 17}, "stop"),
    ({"stop_sequences": "x"}, "stop_sequences"),
    ({"tools": [{"name": ""}]}, "tools[0]"),
    ({"tools": [TOOL] * 129}, "tools"),
    ({"tools": [TOOL], "tool_choice": {"type": "sometimes"}}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "f"}}, "tool_choice"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"thinking": {"type": "maybe"}}, "thinking"),
    ({"output_config": {"format": {"type": "xml", "schema": {}}}}, "output_config"),
]


async def test_a_wrong_field_is_named() -> None:
    async with answering(**PARSERS) as (_, server, _engine):
        for fields, name in WRONG:
            answer = await server.post("/v1/messages", {"max_tokens": 9, "messages": ASK, **fields})
            assert answer.status_code == 400, (fields, answer.text)
            assert name in answer.json()["error"]["message"], (fields, answer.text)
