"""A parser that hangs costs its own work: not the answer, and no other request."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from time import monotonic
from typing import Any
from uuid import uuid4

import pytest
from scripted import ScriptedEngine
from serving import Server, events, serving, until

from treadle.config import PluginConfig
from treadle.plugins import PluginManager
from treadle.processes.watchdog import MAX_STUCK_THREADS
from treadle.testing.introspection import report

PLUGIN = """
import threading
from treadle.api.hookspecs import impl
from treadle.api.parsers import TextDelta

TREADLE = {"tool_parsers": ["build", "feed", "finish", "grammar", "good", "tags"], "reasoning_parsers": ["feed"]}
released = threading.Event()


class Parser:
    in_reasoning = False

    def __init__(self, method):
        self.method = method
        self.hang("build")

    def hang(self, method):
        if method == self.method:
            released.wait()

    @property
    def special_tags(self):
        self.hang("tags")
        return ()

    def feed(self, text, ids):
        if "!" in text:
            self.hang("feed")
        return [TextDelta(text)]

    def finish(self):
        self.hang("finish")
        return []

    def grammar_for_tool_choice(self, choice):
        self.hang("grammar")


@impl
def treadle_tool_parser(name):
    return Parser(name)


@impl
def treadle_reasoning_parser(name):
    return Parser(name)


@impl
def treadle_report():
    released.set()
"""
TOOLS = [{"type": "function", "function": {"name": "f"}}]
BUDGETS = {"tool_parsers": 0.05, "reasoning_parsers": 0.05}


@pytest.fixture
def plugins(tmp_path: Path) -> Iterator[PluginManager]:
    file = tmp_path / f"hangs_{uuid4().hex}.py"  # a module of this test's own
    file.write_text(PLUGIN)
    plugins = PluginManager(PluginConfig(plugin_file=[str(file)], plugin_time_budget=BUDGETS))
    yield plugins
    report(plugins)  # lets the threads go


async def healthy(server: Server) -> None:
    assert (await server.client.get("/health")).status_code == 200


@pytest.mark.parametrize("kind", ["tool_call_parser", "reasoning_parser"])
async def test_others_are_served_while_a_parser_hangs(plugins: PluginManager, kind: str) -> None:
    engine = ScriptedEngine(["ab", "c!", "d"], plugins=plugins)
    fields: dict[str, Any] = {"tools": TOOLS} if kind == "tool_call_parser" else {}
    async with serving(engine, **{kind: "feed"}) as server:
        hanging = asyncio.create_task(server.chat(stream=True, **fields))
        await until(lambda: engine.running)
        while not hanging.done():
            await healthy(server)
            assert (await server.complete()).status_code == 200
        engine.text = ["fine"]
        assert "x-treadle-parser-error" not in (await server.chat(**fields)).headers
        page = (await server.client.get("/metrics")).text
    *chunks, done = events(hanging.result().text)
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks) == "abc!d"
    assert done == "[DONE]" and f": parser-error {kind}=feed" in hanging.result().text
    assert f'treadle_parser_failures_total{{parser="{kind}=feed"}} 1.0' in page
    assert "treadle_parser_threads_hung 1.0" in page
    plugin = "tool_parsers:feed" if kind == "tool_call_parser" else "reasoning_parsers:feed"
    labels = f'hook="feed",model_name="scripted",outcome="error",plugin="{plugin}"'
    assert f"treadle_plugin_calls_total{{{labels}}} 1.0" in page


@pytest.mark.parametrize("parser", ["build", "feed", "finish"])
@pytest.mark.parametrize("stream", [False, True])
async def test_the_text_is_delivered_wherever_it_hangs(
    plugins: PluginManager, parser: str, stream: bool
) -> None:
    async with serving(
        ScriptedEngine(["a", "b!", "c"], plugins=plugins), tool_call_parser=parser
    ) as server:
        response = await server.chat(tools=TOOLS, stream=stream)
    if stream:
        *chunks, _ = events(response.text)
        text = "".join(c["choices"][0]["delta"].get("content", "") for c in chunks)
        assert f": parser-error tool_call_parser={parser}" in response.text
    else:
        text = response.json()["choices"][0]["message"]["content"]
        assert response.headers["x-treadle-parser-error"] == f"tool_call_parser={parser}"
    assert text == "ab!c"


@pytest.mark.fault("tool_parsers", "grammar_for_tool_choice", "special_tags")
@pytest.mark.parametrize("name", ["grammar", "tags"])
async def test_a_grammar_or_tags_that_hang_hold_up_nobody(
    plugins: PluginManager, name: str
) -> None:
    choice = "required" if name == "grammar" else "auto"
    async with serving(ScriptedEngine(plugins=plugins), tool_call_parser=name) as server:
        request = asyncio.create_task(server.chat(tools=TOOLS, tool_choice=choice))
        num_healthy = 0
        while not request.done():
            await healthy(server)
            num_healthy += not request.done()
        assert num_healthy
        assert request.result().status_code == (500 if name == "grammar" else 200)
        assert (await server.chat(tools=TOOLS)).status_code == 200


async def test_a_grammar_that_hangs_is_named_and_left_alone(
    plugins: PluginManager, caplog: pytest.LogCaptureFixture
) -> None:
    """A call that was forced is refused, and so is one that was promised to be strict."""
    strict = [{"type": "function", "function": {"name": "f", "strict": True}}]
    async with serving(
        ScriptedEngine(["ok"], plugins=plugins), tool_call_parser="grammar"
    ) as server:
        for fields in ({"tools": TOOLS, "tool_choice": "required"}, {"tools": strict}) * 3:
            response = await server.chat(**fields)
            error = response.json()["error"]
            assert (response.status_code, error["code"]) == (500, "plugin_failed")
            assert error["message"].startswith("tool_parsers:grammar failed on this request")
        threads = server.context.engine.parser_watchdog["tool_parsers:grammar"]
        assert threads.num_stuck == MAX_STUCK_THREADS
        assert (await server.chat()).json()["choices"][0]["message"]["content"] == "ok"
    assert "grammar_for_tool_choice: TimeoutError: a call took longer than 0.5 s" in caplog.text
    assert "TimeoutError: 4 threads are stuck in it" in caplog.text


async def test_a_grammar_of_treadle_s_own_that_computes_for_long_holds_up_nobody(
    plugins: PluginManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a client sends decides how long it takes, whose code it may be."""
    released = threading.Event()

    def compute(*_: Any) -> None:
        while not released.is_set():
            sum(range(1_000))

    monkeypatch.setattr("treadle_hermes.parser.Hermes.grammar_for_tool_choice", compute)
    async with serving(
        ScriptedEngine(["ok"], plugins=plugins), tool_call_parser="hermes"
    ) as server:
        request = asyncio.create_task(server.chat(tools=TOOLS, tool_choice="required"))
        num_healthy = 0
        while not request.done():
            await healthy(server)
            num_healthy += not request.done()
        released.set()
        assert num_healthy and request.result().status_code == 500
        assert "tool_parsers:hermes" in request.result().json()["error"]["message"]
        assert (await server.chat(tools=TOOLS)).status_code == 200


async def test_threads_that_are_lost_are_bounded(plugins: PluginManager) -> None:
    """From some on the parser is not called, but for one trial in a while."""
    engine = ScriptedEngine(["!"], plugins=plugins)
    async with serving(engine, tool_call_parser="feed") as server:
        before = threading.active_count()
        for _ in range(MAX_STUCK_THREADS + 3):
            response = await server.chat(tools=TOOLS)
            assert response.json()["choices"][0]["message"]["content"] == "!"
            assert response.headers["x-treadle-parser-error"] == "tool_call_parser=feed"
        threads = server.context.engine.parser_watchdog["tool_parsers:feed"]
        assert threads.num_stuck == MAX_STUCK_THREADS
        # One to go on, two for text.
        assert threading.active_count() <= before + MAX_STUCK_THREADS + 3
        threads.retry_time = 0.0
        await server.chat(tools=TOOLS)
        assert threads.num_stuck == MAX_STUCK_THREADS + 1, "a trial"
        await server.chat(tools=TOOLS)
        assert threads.num_stuck == MAX_STUCK_THREADS + 1 and threads.retry_time > monotonic()
        report(plugins)
        await until(lambda: threads.num_stuck == 0)
        assert "x-treadle-parser-error" not in (await server.chat(tools=TOOLS)).headers


async def test_the_list_says_which_parser_hangs(plugins: PluginManager) -> None:
    """As long as its calls do not return, and why."""

    async def state(server: Server) -> tuple[str, str]:
        rows = (await server.client.get("/plugins")).json()["data"]
        return next((r["state"], r["note"]) for r in rows if r["id"] == "tool_parsers:feed")

    async with serving(ScriptedEngine(["!"], plugins=plugins), tool_call_parser="feed") as server:
        for _ in range(MAX_STUCK_THREADS):
            assert (await state(server))[0] != "broken"
            await server.chat(tools=TOOLS)
        reason = f"{MAX_STUCK_THREADS} of its calls do not return; it is tried once in a minute"
        assert await state(server) == ("broken", reason)
        report(plugins)
        threads = server.context.engine.parser_watchdog["tool_parsers:feed"]
        await until(lambda: not threads.is_broken)
        assert (await state(server))[0] == "loaded"


async def test_a_parser_that_hangs_leaves_others_alone(plugins: PluginManager) -> None:
    """Neither the parsers of others nor treadle's own, however many of its calls are stuck."""
    engine = ScriptedEngine(["!"], plugins=plugins)
    async with serving(engine, tool_call_parser="feed", reasoning_parser="qwen3") as server:
        for _ in range(MAX_STUCK_THREADS):
            await server.chat(tools=TOOLS)
        engine.text = ["<think>why", "</think>", "!"]
        response = await server.chat(tools=TOOLS)
        message = response.json()["choices"][0]["message"]
        assert (message["reasoning"], message["content"]) == ("why", "!")
        assert response.headers["x-treadle-parser-error"] == "tool_call_parser=feed"
        parsers = server.context.chat_processor.parser_plugins
        parsers.tool_call_parser = parsers.keys["tool_call_parser"] = "good"
        parsers.reasoning_parser = parsers.keys["reasoning_parser"] = None
        response = await server.chat(tools=TOOLS)
        assert response.json()["choices"][0]["message"]["content"] == "<think>why</think>!"
        assert "x-treadle-parser-error" not in response.headers
