"""Tool and reasoning parsers: their deltas on the wire, and what happens when one raises."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from scripted import ScriptedEngine
from serving import events, serving

from treadle.config import PluginConfig
from treadle.errors import PluginNotFoundError
from treadle.plugins import PluginManager
from treadle_server.config import server_from_options
from treadle_server.run import serve_engine

PLUGIN = '''
from treadle.api.structured_output import GrammarSpec
from treadle.api.hookspecs import impl
from treadle.api.parsers import ReasoningDelta, TextDelta, ToolCallDelta

TREADLE = {"tool_parsers": ["bars", "bad", "late", "unborn"], "reasoning_parsers": ["think", "bad"]}


class Bars:
    """``|name:arguments|`` is a call."""

    def __init__(self):
        self.text, self.calls, self.inside = "", 0, False

    def feed(self, text, ids):
        out = []
        for c in text:
            if c == "|":
                if self.inside:
                    name, _, arguments = self.text.partition(":")
                    half = len(arguments) // 2
                    out += [ToolCallDelta(self.calls, name, arguments[:half]),
                            ToolCallDelta(self.calls, None, arguments[half:])]
                    self.calls += 1
                    self.text = ""
                self.inside = not self.inside
            elif self.inside:
                self.text += c
            else:
                out.append(TextDelta(c))
        return out

    def finish(self):
        return [TextDelta("|" + self.text)] if self.inside else []

    def grammar_for_tool_choice(self, choice):
        return GrammarSpec("regex", "forced " + (choice if isinstance(choice, str) else choice["function"]["name"]))


class Think:
    """Everything before ``~`` is reasoning."""

    def __init__(self):
        self.in_reasoning = True

    def feed(self, text, ids):
        if not self.in_reasoning:
            return [TextDelta(text)]
        before, end, after = text.partition("~")
        self.in_reasoning = not end
        return [ReasoningDelta(before), *([TextDelta(after)] if end else [])]

    def finish(self):
        return []


class Bad:
    in_reasoning = False

    def feed(self, text, ids):
        raise RuntimeError("bad parser")

    def finish(self):
        raise RuntimeError("bad parser")

    def grammar_for_tool_choice(self, choice):
        return None


class Late(Bad):
    """Holds three pieces back, then raises."""

    def __init__(self):
        self.num_feeds = 0

    def feed(self, text, ids):
        self.num_feeds += 1
        if self.num_feeds == 1:
            return [TextDelta(text)]
        if self.num_feeds == 4:
            raise KeyError("late")
        return []


@impl
def treadle_tool_parser(name):
    return {"bars": Bars, "bad": Bad, "late": Late}[name]()  # KeyError: unborn


@impl
def treadle_reasoning_parser(name):
    return {"think": Think, "bad": Bad}[name]()
'''
TOOLS = [{"type": "function", "function": {"name": n}} for n in ("f", "g")]


@pytest.fixture
def plugins(tmp_path: Path) -> PluginManager:
    file = tmp_path / "parsers.py"
    file.write_text(PLUGIN)
    return PluginManager(PluginConfig(plugin_file=[str(file)]))


def assembled(chunks: Sequence[Any]) -> tuple[str, str, list[dict[str, Any]], str | None]:
    """Content, reasoning, calls and finish reason of a streamed answer."""
    content, reasoning, reason = "", "", None
    calls: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        choice = chunk["choices"][0]
        delta, reason = choice["delta"], choice["finish_reason"]
        content += delta.get("content", "")
        reasoning += delta.get("reasoning", "")
        assert delta.get("reasoning") == delta.get("reasoning_content")
        for piece in delta.get("tool_calls", ()):
            if "id" in piece:
                assert piece["type"] == "function"
                calls[piece["index"]] = {"id": piece["id"], **piece["function"]}
            else:
                calls[piece["index"]]["arguments"] += piece["function"]["arguments"]
    return content, reasoning, [calls[i] for i in sorted(calls)], reason


SPLITS = [["hm", "m~so |f:{", '"x": 1}|', "|g:{}| ok"], list('hmm~so |f:{"x": 1}||g:{}| ok')]


@pytest.mark.parametrize("pieces", SPLITS)
@pytest.mark.parametrize("parallel", [True, False])
async def test_calls_and_reasoning_are_the_same_streamed_or_not(
    pieces: list[str], parallel: bool, plugins: PluginManager
) -> None:
    options = {"tool_call_parser": "bars", "reasoning_parser": "think"}
    async with serving(ScriptedEngine(pieces, plugins=plugins), **options) as server:
        fields = {"tools": TOOLS, "parallel_tool_calls": parallel}
        plain = (await server.chat(**fields)).json()["choices"][0]
        streamed = events((await server.chat(**fields, stream=True)).text)[:-1]
    content, reasoning, calls, reason = assembled(streamed)
    message = plain["message"]
    assert (message["content"], message["reasoning"]) == (content, reasoning) == ("so  ok", "hmm")
    assert message["reasoning_content"] == reasoning
    functions = [c["function"] for c in message["tool_calls"]]
    assert functions == [{"name": c["name"], "arguments": c["arguments"]} for c in calls]
    assert [f["name"] for f in functions] == (["f", "g"] if parallel else ["f"])
    assert json.loads(functions[0]["arguments"]) == {"x": 1}
    assert plain["finish_reason"] == reason == "tool_calls"
    assert len({c["id"] for c in calls}) == len(calls)


async def test_without_tools_the_tool_parser_stays_away(plugins: PluginManager) -> None:
    engine = ScriptedEngine(["a|f:{}|"], plugins=plugins)
    async with serving(engine, tool_call_parser="bars") as server:
        for fields in ({}, {"tools": TOOLS, "tool_choice": "none"}):
            choice = (await server.chat(**fields)).json()["choices"][0]
            assert choice["message"]["content"] == "a|f:{}|"
            assert choice["finish_reason"] == "stop"


async def test_only_calls_means_no_content(plugins: PluginManager) -> None:
    async with serving(
        ScriptedEngine(["|f:{}|"], plugins=plugins), tool_call_parser="bars"
    ) as server:
        message = (await server.chat(tools=TOOLS)).json()["choices"][0]["message"]
    assert message["content"] is None


async def test_a_forced_call_becomes_a_constraint(plugins: PluginManager) -> None:
    engine = ScriptedEngine(plugins=plugins)
    async with serving(engine, tool_call_parser="bars") as server:
        await server.chat(tools=TOOLS, tool_choice="required")
        assert engine.params and engine.params.structured_outputs
        assert engine.params.structured_outputs.regex == "forced required"
        named = {"type": "function", "function": {"name": "g"}}
        await server.chat(tools=TOOLS, tool_choice=named)
        assert (
            engine.params.structured_outputs
            and engine.params.structured_outputs.regex == "forced g"
        )
        unknown = {"type": "function", "function": {"name": "h"}}
        response = await server.chat(tools=TOOLS, tool_choice=unknown)
    assert response.status_code == 400 and "f, g" in response.json()["error"]["message"]
    for name in ("bad", "unborn"):
        engine.plugins = PluginManager(plugins.config)
        async with serving(engine, tool_call_parser=name) as server:
            response = await server.chat(tools=TOOLS, tool_choice="required")
        assert response.status_code == 400 and response.json()["error"]["param"] == "tool_choice"


@pytest.mark.parametrize(
    "options",
    [
        {"tool_call_parser": "bad"},
        {"reasoning_parser": "bad"},
        {"tool_call_parser": "late"},
        {"tool_call_parser": "unborn"},
    ],
)
async def test_a_parser_that_raises_costs_its_work_and_not_the_answer(
    options: dict[str, str], plugins: PluginManager
) -> None:
    pieces = ["one ", "two ", "three ", "four ", "five"]
    label = "=".join(next(iter(options.items())))
    async with serving(ScriptedEngine(pieces, plugins=plugins), **options) as server:
        plain = await server.chat(tools=TOOLS if "tool_call_parser" in options else None)
        response = await server.chat(
            tools=TOOLS if "tool_call_parser" in options else None, stream=True
        )
        metrics = (await server.client.get("/metrics")).text
    assert plain.status_code == 200
    assert plain.json()["choices"][0]["message"]["content"] == "".join(pieces)
    content, *_ = assembled(events(response.text)[:-1])
    assert content == "".join(pieces)
    assert f": parser-error {label}" in response.text
    if options != {"tool_call_parser": "late"}:  # that one needs more than one feed to fail
        assert plain.headers["x-treadle-parser-error"] == label
    assert f'treadle_parser_failures_total{{parser="{label}"}}' in metrics


@pytest.mark.parametrize("stream", [False, True])
async def test_in_strict_mode_a_parser_that_raises_ends_the_request(
    plugins: PluginManager, stream: bool
) -> None:
    strict = PluginManager(msgspec.structs.replace(plugins.config, plugin_strict=True))
    async with serving(ScriptedEngine(plugins=strict), tool_call_parser="bad") as server:
        response = await server.chat(tools=TOOLS, stream=stream)
        assert (await server.chat()).status_code == 200
    error = response.json()["error"]
    assert response.status_code == 500 and error["code"] == "request_failed"
    assert error["message"].startswith("tool_parsers:bad from parsers.py ")
    assert "failed in feed: RuntimeError: bad parser" in error["message"]
    assert error["message"].endswith("(plugin_strict makes it fatal)")


def test_a_wrong_parser_name_stops_the_start(plugins: PluginManager) -> None:
    engine = ScriptedEngine(plugins=plugins)
    engine.use_parsers(tool_call_parser="nonsense")
    with pytest.raises(PluginNotFoundError, match="nonsense"):
        serve_engine(lambda: engine, server_from_options(port=0, log_level="error"))
