"""The routes of Ollama: answers, lines, options, errors, and what clients ask before they begin."""

from __future__ import annotations

import json
from typing import Any

import pytest
from scripted import ScriptedEngine
from serving import Server, serving, until
from treadle_ollama.options import MACHINE, NEUTRAL, SERVED

PARSERS = {"tool_call_parser": "hermes", "reasoning_parser": "qwen3"}
USER = {"role": "user", "content": "hi"}
CHAT = "/api/chat", {"messages": [USER]}
GENERATE = "/api/generate", {"prompt": "hi"}
RAW = "/api/generate", {"prompt": "hi", "raw": True}
ROUTES = pytest.mark.parametrize("route", [CHAT, GENERATE, RAW], ids=["chat", "generate", "raw"])
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
TOOL = {
    "type": "function",
    "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {}}},
}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


async def whole(server: Server, route: tuple[str, dict[str, Any]], **fields: Any) -> Any:
    answer = await server.post(route[0], {**route[1], "stream": False, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


async def lines(server: Server, route: tuple[str, dict[str, Any]], **fields: Any) -> list[Any]:
    answer = await server.post(route[0], {**route[1], **fields})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in answer.text.splitlines()]


async def refusal(server: Server, route: tuple[str, dict[str, Any]], **fields: Any) -> str:
    answer = await server.post(route[0], {**route[1], **fields})
    assert answer.status_code == 400, answer.text
    assert answer.json().keys() == {"error"}
    return str(answer.json()["error"])


def text_of(line: Any) -> str:
    return str(line["message"]["content"] if "message" in line else line["response"])


@ROUTES
async def test_a_stream_is_the_default_and_says_what_a_whole_answer_says(
    route: tuple[str, dict[str, Any]],
) -> None:
    async with serving() as server:
        streamed, answer = await lines(server, route), await whole(server, route)
    assert [text_of(line) for line in streamed] == ["Hel", "lo", " wor", "ld", ""]
    assert text_of(answer) == "Hello world"
    assert [line["done"] for line in streamed] == [False] * 4 + [True]
    for last in (streamed[-1], answer):
        assert (last["done_reason"], last["eval_count"], last["model"]) == ("stop", 11, "scripted")
        assert last["prompt_eval_count"] == (2 if "raw" in route[1] else len("user:hi|"))
        parts = last["load_duration"] + last["prompt_eval_duration"] + last["eval_duration"]
        assert 0 < parts <= last["total_duration"] < 60 * 10**9
    assert "eval_count" not in streamed[0]


async def test_thoughts_and_calls_have_their_fields() -> None:
    text = f"<think>\nI must look.\n</think>\n\nA moment.{CALL}{CALL}"
    async with serving(ScriptedEngine(list(text)), **PARSERS) as server:
        fields = {"tools": [TOOL], "think": True}
        answer = (await whole(server, CHAT, **fields))["message"]
        streamed = [line["message"] for line in await lines(server, CHAT, **fields)]
        unasked = (await whole(server, CHAT, think=False))["message"]
        generated = await whole(server, GENERATE, think=True)
    called = [call for message in streamed for call in message.get("tool_calls", ())]
    for calls in (answer["tool_calls"], called):
        assert [(c["function"]["index"], c["function"]["arguments"]) for c in calls] == [
            (0, {"city": "Paris"}),
            (1, {"city": "Paris"}),
        ]
    assert answer["thinking"] == "I must look."
    assert "".join(m.get("thinking", "") for m in streamed) == "I must look."
    assert answer["content"].strip() == "A moment."
    assert "thinking" not in unasked and generated["thinking"] == "I must look."


async def test_think_is_the_switch_of_the_template() -> None:
    engine = ScriptedEngine()
    async with serving(engine, **PARSERS) as server:
        for think, arguments in (
            (True, {"enable_thinking": True}),
            (False, {"enable_thinking": False}),
            ("low", {"enable_thinking": True, "reasoning_effort": "low"}),
        ):
            await whole(server, CHAT, think=think)
            used = engine.renderer.messages["template_arguments"]
            assert arguments.items() <= used.items()
    async with serving() as server:
        assert "does not support thinking" in await refusal(server, CHAT, think=True)
        assert "does not support tools" in await refusal(server, CHAT, tools=[TOOL])


async def test_messages_become_a_chat() -> None:
    engine = ScriptedEngine()
    messages = [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "U", "images": []},
        {
            "role": "assistant",
            "content": "",
            "thinking": "T",
            "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}],
        },
        {"role": "tool", "content": "R", "tool_name": "f"},
        {"role": "assistant", "content": "The ans"},
    ]
    async with serving(engine, **PARSERS) as server:
        await whole(server, CHAT, messages=messages)
        prompt = engine.renderer.messages
        assert [m["role"] for m in prompt["messages"]] == [m["role"] for m in messages]
        (call,) = prompt["messages"][2]["tool_calls"]
        assert call["function"] == {"name": "f", "arguments": {"a": 1}}
        assert prompt["continue_final_message"] is True
        await whole(server, GENERATE, system="S")
        rendered = [(m["role"], m["content"]) for m in engine.renderer.messages["messages"]]
    assert rendered == [("system", "S"), ("user", "hi")]


@ROUTES
async def test_every_option_is_served_named_as_ignored_or_refused(
    route: tuple[str, dict[str, Any]],
) -> None:
    values: dict[str, Any] = {
        "temperature": 0.5,
        "top_k": 7.0,  # many clients write whole numbers like this
        "top_p": 0.75,
        "min_p": 0.25,
        "num_predict": 3,
        "stop": ["x"],
        "seed": 11,
        "repeat_penalty": 1.5,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
    }
    assert values.keys() == SERVED.keys()
    engine = ScriptedEngine()
    async with serving(engine) as server:
        answer = await whole(server, route, options=values)
        assert (answer["done_reason"], text_of(answer)) == ("length", "Hello wor")
        assert engine.params is not None
        for name, value in values.items():
            assert getattr(engine.params, SERVED[name][0]) == value, name
        for name in [*MACHINE, "unheard_of"]:
            sent = await server.post(route[0], {**route[1], "options": {name: 1}})
            assert sent.headers["x-ignored-fields"] == f"options.{name}"
        for name, (neutral, _) in NEUTRAL.items():
            await whole(server, route, options={name: neutral})
            other = not neutral if isinstance(neutral, bool) else neutral + 0.5
            assert f"options.{name}" in await refusal(server, route, options={name: other})
        for name in SERVED:
            assert f"options.{name}" in await refusal(server, route, options={name: {}})
        for name in ("repeat_penalty", "top_p", "temperature"):
            assert f"options.{name}" in await refusal(server, route, options={name: -3.0})
    async with serving(strict_requests=True) as server:
        assert "unheard_of" in await refusal(server, route, options={"unheard_of": 1})


async def test_lengths_seeds_and_windows_mean_what_they_do_for_ollama() -> None:
    engine = ScriptedEngine(max_model_len=500)
    async with serving(engine) as server:

        async def params(**options: Any) -> Any:
            await whole(server, RAW, options=options)
            return engine.params

        for unlimited in (0, -1, -2):
            assert (await params(num_predict=unlimited)).max_tokens is None
        assert (await params(seed=-1)).seed is None
        assert (await params(repeat_penalty=1.5, repeat_last_n=-1)).repetition_penalty == 1.5
        assert (await params(repeat_penalty=1.5, repeat_last_n=0)).repetition_penalty == 1.0
        assert (await params(repeat_last_n=64)).repetition_penalty == 1.0
        window = {"repeat_penalty": 1.5, "repeat_last_n": 64}
        assert "repeat_last_n is 64" in await refusal(server, RAW, options=window)


async def test_format_constrains_the_answer() -> None:
    engine = ScriptedEngine()
    async with serving(engine) as server:
        for format, field, value in (
            ("json", "json_object", True),
            (SCHEMA, "json", SCHEMA),
        ):
            for route in (CHAT, GENERATE, RAW):
                await whole(server, route, format=format)
                assert engine.params is not None and engine.params.structured_outputs is not None
                assert getattr(engine.params.structured_outputs, field) == value
        await whole(server, CHAT, format="")
        assert engine.params is not None and engine.params.structured_outputs is None
        assert "xml" in await refusal(server, CHAT, format="xml")


@ROUTES
async def test_log_probabilities_are_those_of_a_chat(route: tuple[str, dict[str, Any]]) -> None:
    async with serving() as server:
        answer = await whole(server, route, logprobs=True, top_logprobs=2)
        streamed = await lines(server, route, logprobs=True)
        assert "logprobs" in await refusal(server, route, top_logprobs=2)
    assert [entry["token"] for entry in answer["logprobs"]] == list("Hello world")
    assert len(answer["logprobs"][0]["top_logprobs"]) == 2
    assert [entry["token"] for line in streamed for entry in line.get("logprobs", ())] == list(
        "Hello world"
    )


async def test_nothing_to_answer_means_load_the_model() -> None:
    engine = ScriptedEngine()
    async with serving(engine) as server:
        for route in ("/api/generate", {}), ("/api/chat", {}), ("/api/chat", {"messages": []}):
            for fields in ({}, {"keep_alive": 0}, {"keep_alive": "5m", "model": "scripted:latest"}):
                answer = await whole(server, route, **fields)
                assert (answer["done"], answer["done_reason"]) == (True, "load")
                assert text_of(answer) == ""
    assert engine.ids == []


@pytest.mark.parametrize(
    ("route", "fields", "text"),
    [
        (GENERATE, {"images": ["aGk="]}, "text only"),
        (CHAT, {"messages": [{**USER, "images": ["aGk="]}]}, "messages[0].images"),
        (CHAT, {"messages": [{"role": "robot", "content": ""}]}, "messages[0].role"),
        (GENERATE, {"template": "{{ .Prompt }}"}, "template"),
        (GENERATE, {"context": [1, 2]}, "/api/chat"),
        (GENERATE, {"suffix": "end"}, "filling in"),
        (RAW, {"system": "S"}, "system"),
    ],
)
async def test_what_is_not_served_is_refused_by_name(
    route: Any, fields: dict[str, Any], text: str
) -> None:
    async with serving() as server:
        assert text in await refusal(server, route, **fields)
        assert (await server.complete()).status_code == 200


async def test_every_error_has_ollamas_form_wherever_it_is_made() -> None:
    async with serving(api_key=["k"], max_body_bytes=2000) as server:
        keyed = {"authorization": "Bearer k"}
        for status, method, path, body, headers in (
            (401, "GET", "/api/tags", b"", {}),
            (404, "GET", "/api/nowhere", b"", keyed),
            (404, "POST", "/api/chat", b'{"model": "no"}', keyed),
            (404, "POST", "/api/show", b'{"model": "no"}', keyed),
            (405, "GET", "/api/chat", b"", keyed),
            (400, "POST", "/api/chat", b"{", keyed),
            (400, "POST", "/api/chat", b"", keyed),
            (413, "POST", "/api/chat", b" " * 4000, keyed),
        ):
            answer = await server.client.request(method, path, content=body, headers=headers)
            assert (answer.status_code, list(answer.json())) == (status, ["error"]), path
            assert isinstance(answer.json()["error"], str)
        elsewhere = await server.client.get("/apis", headers=keyed)
    assert "message" in elsewhere.json()["error"]


async def test_an_error_within_a_stream_is_a_line() -> None:
    def fail(engine: ScriptedEngine, step: int) -> None:
        if step == 2:
            raise RuntimeError("a secret of the engine")

    async with serving(ScriptedEngine(before=fail)) as server:
        streamed = await lines(server, CHAT)
    assert [text_of(line) for line in streamed[:-1]] == ["Hel", "lo"]
    assert streamed[-1].keys() == {"error"} and "secret" not in streamed[-1]["error"]


async def test_a_pause_is_filled_with_lines_that_are_objects() -> None:
    engine = ScriptedEngine(pause=0.05)
    async with serving(engine, sse_keep_alive_interval=0.01) as server:
        streamed = await lines(server, CHAT)
    texts = [text_of(line) for line in streamed]
    assert "".join(texts) == "Hello world" and len(texts) > 5


async def test_a_client_that_leaves_ends_its_request() -> None:
    engine = ScriptedEngine(["a"] * 500, pause=0.01)
    async with serving(engine) as server:
        body = {"messages": [USER]}
        async with server.client.stream("POST", "/api/chat", json=body) as answer:
            await anext(answer.aiter_lines())
        await until(lambda: engine.running == 0)
        assert engine.aborted == 1
        metrics = (await server.client.get("/metrics")).text
    assert 'route="/api/chat"' in metrics


async def test_what_is_served_is_listed_and_shown() -> None:
    async with serving(ScriptedEngine(names=["one", "two"]), **PARSERS) as server:
        tags = (await server.client.get("/api/tags")).json()["models"]
        running = (await server.client.get("/api/ps")).json()["models"]
        shown = (await server.post("/api/show", {"name": "two:latest"})).json()
        version = (await server.client.get("/api/version")).json()["version"]
    assert [model["model"] for model in tags] == [model["name"] for model in running]
    assert [model["model"] for model in tags] == ["one", "two"]
    assert shown["capabilities"] == ["completion", "tools", "thinking"]
    assert shown["model_info"]["Scripted.context_length"] == running[0]["context_length"] == 1000
    assert tuple(map(int, version.split("."))) >= (0, 6, 4), "what clients ask for"


async def test_the_client_of_ollama_understands_all_of_it() -> None:
    ollama = pytest.importorskip("ollama")
    text = f"<think>\nI must look.\n</think>\n\nA moment.{CALL}"

    def get_weather(city: str) -> str:
        """Return the weather.

        Args:
            city: Its name
        """
        return city

    async with (
        serving(ScriptedEngine(list(text)), **PARSERS) as server,
        ollama.AsyncClient(host=server.url) as client,
    ):
        fields: Any = {"model": "scripted", "messages": [USER], "tools": [get_weather]}
        answer = await client.chat(**fields, think=True, options={"num_ctx": 4096, "top_k": 3})
        assert answer.message.thinking == "I must look."
        assert answer.message.tool_calls[0].function.arguments == {"city": "Paris"}
        again = [USER, answer.message, {"role": "tool", "content": "sun", "tool_name": "f"}]
        stream = await client.chat(**{**fields, "messages": again}, stream=True)
        parts = [part async for part in stream]
        assert parts[-1].done and parts[-1].eval_count == len(text)
        generated = await client.generate("scripted", "hi", logprobs=True, keep_alive="5m")
        assert generated.response.strip().startswith("A moment.") and generated.logprobs
        assert [model.model for model in (await client.list()).models] == ["scripted"]
        assert (await client.show("scripted")).capabilities == [
            "completion",
            "tools",
            "thinking",
        ]
        assert (await client.ps()).models[0].context_length == 1000
        with pytest.raises(ollama.ResponseError, match="does not exist here") as caught:
            await client.generate("other", "hi")
        assert caught.value.status_code == 404
