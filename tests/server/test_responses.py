"""``/v1/responses`` with the official client: items, events, tools, and what is kept."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import openai
import pydantic
import pytest
from scripted import ScriptedEngine
from serving import Server, events, serving

PARSERS = {"tool_call_parser": "hermes", "reasoning_parser": "qwen3"}
CITY: Any = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOL: Any = {"type": "function", "name": "get_weather", "parameters": CITY, "strict": False}
CUSTOM: Any = {"type": "custom", "name": "run", "description": "Run it"}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
CODE = 'print("é\\n")'
CUSTOM_CALL = (
    f'<tool_call>\n{{"name": "run", "arguments": {{"input": {json.dumps(CODE)}}}}}\n</tool_call>'
)


@asynccontextmanager
async def responding(
    text: Any = ("Hel", "lo"), **options: Any
) -> AsyncIterator[tuple[openai.AsyncOpenAI, Server, ScriptedEngine]]:
    engine = ScriptedEngine(list(text), **options.pop("engine", {}))
    key = (options.get("api_key") or ["none"])[0]
    async with serving(engine, **options) as server:
        url = f"{server.url}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0) as client:
            yield client, server, engine


def prompt_of(engine: ScriptedEngine) -> list[dict[str, Any]]:
    return list(engine.renderer.messages["messages"])


async def test_a_text_is_answered_and_every_event_comes_in_order() -> None:
    async with responding() as (client, server, _):
        whole = await client.responses.create(model="scripted", input="hi")
        assert whole.output_text == "Hello" and whole.status == "completed"
        assert whole.usage is not None
        assert (whole.usage.input_tokens, whole.usage.output_tokens) == (8, 5)
        assert whole.usage.input_tokens_details.cached_tokens == 2

        raw = await server.post("/v1/responses", {"input": "hi", "stream": True})
        assert raw.headers["content-type"].startswith("text/event-stream")
        names = [line[7:] for line in raw.text.splitlines() if line.startswith("event: ")]
        sent = [json.loads(line[6:]) for line in raw.text.splitlines() if line[:6] == "data: "]
    assert [event["type"] for event in sent] == names
    assert names == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert [event["sequence_number"] for event in sent] == list(range(len(sent)))
    last, item = sent[-1]["response"], sent[-2]["item"]
    assert last["output"] == [item] and item["content"][0]["text"] == "Hello"
    assert last["usage"]["total_tokens"] == 13
    assert {event["item_id"] for event in sent[3:8]} == {item["id"]}


@pytest.mark.parametrize("size", [1, 9, 1000])
async def test_thoughts_texts_and_calls_are_items_streamed_or_not(size: int) -> None:
    text = f"<think>\nI must look.\n</think>\n\nA moment.{CALL}{CUSTOM_CALL}"
    pieces = [text[pos : pos + size] for pos in range(0, len(text), size)]
    request: Any = {"model": "scripted", "input": "hi", "tools": [TOOL, CUSTOM]}
    async with responding(pieces, **PARSERS) as (client, _, _):
        whole = await client.responses.create(**request)
        async with client.responses.stream(**request) as stream:
            seen = [event async for event in stream]
            streamed = await stream.get_final_response()
    for response in (whole, streamed):
        kinds = [item.type for item in response.output]
        assert kinds == ["reasoning", "message", "function_call", "custom_tool_call"]
        reasoning, message, call, custom = (item.to_dict() for item in response.output)
        assert reasoning["content"] == [{"type": "reasoning_text", "text": "I must look."}]
        assert message["content"][0]["text"].strip() == "A moment."  # type: ignore[index]
        assert json.loads(str(call["arguments"])) == {"city": "Paris"}
        assert call["name"] == "get_weather" and str(call["call_id"]).startswith("call_")
        assert custom["input"] == CODE and custom["name"] == "run"
        assert {item.status for item in response.output} == {"completed"}  # type: ignore[union-attr]
        assert response.usage is not None
        assert response.usage.output_tokens_details.reasoning_tokens > 10
    deltas: dict[str, str] = {}
    for event in seen:
        if event.type.endswith(".delta"):
            deltas[event.type] = deltas.get(event.type, "") + event.delta  # type: ignore[union-attr]
    assert deltas["response.reasoning_text.delta"] == "I must look."
    assert json.loads(deltas["response.function_call_arguments.delta"]) == {"city": "Paris"}
    assert deltas["response.custom_tool_call_input.delta"] == CODE


async def test_all_items_of_a_turn_become_one_message() -> None:
    items: Any = [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "D"}]},
        {"role": "user", "content": "U"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "x"},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "R"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "A"}]},
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"a": 1}'},
        {"type": "custom_tool_call", "call_id": "c2", "name": "run", "input": "ls"},
        {"type": "web_search_call", "id": "ws_1", "status": "completed"},
        {"type": "function_call_output", "call_id": "c1", "output": "1"},
        {
            "type": "custom_tool_call_output",
            "call_id": "c2",
            "output": [{"type": "input_text", "text": "2"}],
        },
    ]
    tools = [
        TOOL,
        {"type": "namespace", "name": "n", "description": "", "tools": [TOOL]},
        {"type": "web_search", "external_web_access": False},
    ]
    body = {"input": items, "instructions": "I", "tools": tools, "client_metadata": {"a": "b"}}
    async with responding(**PARSERS) as (_, server, engine):
        answer = await server.post("/v1/responses", body)
        assert answer.status_code == 200, answer.text
    ignored = answer.headers["x-ignored-fields"].split(",")
    assert ignored == ["client_metadata", "tools.web_search", "input.web_search_call"]
    system, developer, user, assistant, *results = prompt_of(engine)
    assert [m["content"] for m in (system, developer, user, assistant)] == ["I", "D", "U", "A"]
    assert assistant["reasoning_content"] == "R"
    assert [c["function"] for c in assistant["tool_calls"]] == [
        {"name": "f", "arguments": {"a": 1}},
        {"name": "run", "arguments": {"input": "ls"}},
    ]
    assert [(r["role"], r["tool_call_id"], r["content"]) for r in results] == [
        ("tool", "c1", "1"),
        (
            "tool",
            "c2",
            [{"type": "text", "text": "2"}] if isinstance(results[1]["content"], list) else "2",
        ),
    ]
    names = [t["function"]["name"] for t in engine.renderer.messages["tools"]]
    assert names == ["get_weather", "n__get_weather"]


async def test_a_call_into_a_namespace_carries_it() -> None:
    tools: Any = [TOOL, {"type": "namespace", "name": "n", "tools": [TOOL]}]
    text = CALL.replace("get_weather", "n__get_weather")
    async with responding([text], **PARSERS) as (_, server, _):
        answer = (await server.post("/v1/responses", {"input": "hi", "tools": tools})).json()
    (call,) = answer["output"]
    assert (call["name"], call["namespace"]) == ("get_weather", "n")


async def test_a_structured_answer_is_parsed() -> None:
    class Answer(pydantic.BaseModel):
        city: str

    async with responding(['{"city": ', '"Paris"}']) as (client, _, engine):
        parsed = await client.responses.parse(model="scripted", input="hi", text_format=Answer)
        assert parsed.output_parsed == Answer(city="Paris")
        assert engine.params is not None and engine.params.structured_outputs is not None
        assert "city" in json.dumps(engine.params.structured_outputs.json)


async def test_an_answer_that_was_cut_is_incomplete() -> None:
    async with responding() as (client, _, _):
        for stream in (False, True):
            options: Any = {"model": "scripted", "input": "hi", "max_output_tokens": 1}
            if stream:
                async for event in await client.responses.create(stream=True, **options):
                    last = event
                assert last.type == "response.incomplete"
                response = last.response
            else:
                response = await client.responses.create(**options)
            assert response.status == "incomplete"
            assert response.incomplete_details.reason == "max_output_tokens"
            assert response.output_text == "Hel"


async def test_a_conversation_continues_from_what_is_kept() -> None:
    async with responding() as (client, server, engine):
        first = await client.responses.create(model="scripted", input="one", instructions="I")
        second = await client.responses.create(
            model="scripted", input="two", previous_response_id=first.id
        )
        assert [(m["role"], m["content"]) for m in prompt_of(engine)] == [
            ("user", "one"),
            ("assistant", "Hello"),
            ("user", "two"),
        ]
        assert (await client.responses.retrieve(second.id)).to_dict() == second.to_dict()
        newest_first = await client.responses.input_items.list(second.id, limit=2)
        assert [item.content[0].text for item in newest_first.data] == ["two", "Hello"]  # type: ignore[union-attr]
        assert newest_first.has_more
        items = [item async for item in client.responses.input_items.list(second.id, limit=1)]
        assert len(items) == 3
        reference: Any = [{"type": "item_reference", "id": second.output[0].id}]
        third = [*reference, {"role": "user", "content": "three"}]
        await client.responses.create(model="scripted", input=third, store=False)
        assert [m["content"] for m in prompt_of(engine)] == ["Hello", "three"]
        page = (await server.client.get("/metrics")).text
        assert "treadle_stored_responses 2.0" in page
        await client.responses.delete(first.id)
        for lost in (
            client.responses.retrieve(first.id),
            client.responses.cancel(first.id),
            client.responses.delete(first.id),
            client.responses.input_items.list(first.id),
            client.responses.create(input="x", model="scripted", previous_response_id=first.id),
        ):
            with pytest.raises(openai.NotFoundError, match=first.id):
                await lost
        with pytest.raises(openai.BadRequestError, match="background"):
            await client.responses.cancel(second.id)


async def test_responses_of_another_key_are_not_there() -> None:
    async with responding(api_key=["a", "b"]) as (client, server, _):
        mine = await client.responses.create(model="scripted", input="secret")
        theirs: Any = {"headers": {"authorization": "Bearer b"}}
        path = f"/v1/responses/{mine.id}"
        unknown = await server.client.get("/v1/responses/resp_0", **theirs)
        for answer in (
            await server.client.get(path, **theirs),
            await server.client.get(f"{path}/input_items", **theirs),
            await server.client.delete(path, **theirs),
            await server.post(f"{path}/cancel", b"{}", **theirs),
            await server.post(
                "/v1/responses", {"input": "x", "previous_response_id": mine.id}, **theirs
            ),
            await server.post(
                "/v1/responses",
                {"input": [{"type": "item_reference", "id": mine.output[0].id}]},
                **theirs,
            ),
        ):
            assert answer.status_code == unknown.status_code == 404
            assert "secret" not in answer.text
        assert (await client.responses.retrieve(mine.id)).id == mine.id


async def test_a_failure_in_the_middle_is_an_event() -> None:
    def fail(engine: ScriptedEngine, step: int) -> None:
        if step:
            raise RuntimeError("secret")

    async with responding(engine={"before": fail}) as (_, server, _):
        text = (await server.post("/v1/responses", {"input": "hi", "stream": True})).text
    last = json.loads(text.strip().splitlines()[-1].removeprefix("data: "))
    assert last["type"] == "response.failed" and last["response"]["status"] == "failed"
    assert last["response"]["error"]["code"] == "internal_error" and "secret" not in text


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"input": None}, "input"),
    ({"input": []}, "input"),
    ({"input": 7}, "input"),
    ({"input": [{"type": "message", "role": "robot", "content": "x"}]}, "input[0].role"),
    ({"input": [{"type": "smell"}]}, "input[0].type"),
    (
        {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
        "input[0].content[0].type",
    ),
    ({"input": [{"role": "user", "content": "x"}] * 4097}, "input"),
    ({"input": [{"type": "function_call", "call_id": "c"}]}, "input[0].name"),
    ({"input": [{"type": "function_call_output", "call_id": "c"}]}, "input[0].output"),
    ({"background": True}, "background"),
    ({"conversation": "c"}, "conversation"),
    ({"prompt": {"id": "p"}}, "prompt"),
    ({"truncation": "auto"}, "truncation"),
    ({"n": 2}, "n"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"temperature": -1}, "temperature"),
    ({"top_logprobs": 21}, "top_logprobs"),
    ({"metadata": {str(i): "" for i in range(17)}}, "metadata"),
    ({"metadata": {"a": 1}}, "metadata[...]"),
    ({"tools": [{"type": "function"}]}, "tools[0].name"),
    ({"tools": [{"type": "namespace", "name": "n", "tools": [TOOL] * 129}]}, "tools"),
    ({"tools": [TOOL], "tool_choice": "sometimes"}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "web_search"}}, "tool_choice.type"),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "f"}}, "tool_choice"),
    ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
    ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
    ({"reasoning": {"effort": "x" * 65}}, "reasoning.effort"),
    ({"model": "other"}, "model"),
    ({"previous_response_id": "resp_0"}, "previous_response_id"),
]


async def test_a_wrong_field_is_named() -> None:
    found = []
    async with responding(**PARSERS) as (_, server, _):
        for fields, _param in WRONG:
            answer = await server.post("/v1/responses", {"input": "hi", **fields})
            assert answer.status_code in (400, 404), (fields, answer.text)
            found.append((fields, answer.json()["error"]["param"]))
        for query in ("limit=0", "limit=x", "order=up"):
            answer = await server.client.get(f"/v1/responses/r/input_items?{query}")
            assert answer.status_code == 400
            assert answer.json()["error"]["param"] == query.partition("=")[0]
    assert found == WRONG


async def test_a_full_queue_is_a_429_and_a_long_wait_opens_the_stream() -> None:
    import asyncio

    from treadle.errors import QueueFullError

    def refuse(engine: ScriptedEngine, step: int) -> None:
        raise QueueFullError("full")

    async with responding(engine={"before": refuse}) as (_, server, _):
        answer = await server.post("/v1/responses", {"input": "hi", "stream": True})
        assert answer.status_code == 429 and answer.headers["retry-after"] == "1"
    release = asyncio.Event()

    async def hold(step: int) -> None:
        await release.wait()

    async with responding(sse_keep_alive_interval=0.02) as (_, server, engine):
        engine.hold = hold
        body = {"input": "hi", "stream": True}
        async with server.client.stream("POST", "/v1/responses", json=body) as answer:
            text = ""
            async for piece in answer.aiter_text():
                text += piece
                if text.count("response.in_progress") >= 4:
                    release.set()
    sent = [e for e in events(text.replace("event: ", ":event: ").replace("\ndata", "\n\ndata"))]
    assert [e["sequence_number"] for e in sent] == list(range(len(sent)))
    assert sent[-1]["type"] == "response.completed"
