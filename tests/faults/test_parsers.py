"""Parsers that raise or answer nonsense: the text is delivered, and only they are to blame."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest
from faulty import errors, plugins_of
from scripted import ScriptedEngine
from serving import Server, events, serving

from treadle.api.matching import ModelTraits
from treadle.errors import PluginLoadError
from treadle.plugins import PluginManager
from treadle_server.config import server_from_options
from treadle_server.run import serve_engine

PLUGIN = '''
from treadle.api import impl
from treadle.api.structured_output import GrammarSpec
from treadle.api.matching import Match
from treadle.api.parsers import ReasoningDelta, TextDelta, ToolCallDelta
from treadle.errors import RequestError

TREADLE = {"tool_parsers": ["faulty"], "reasoning_parsers": ["faulty"]}


class Panic(BaseException):
    """Like a panic of a Rust library."""


NONSENSE = {
    "none": None,
    "number": 5,
    "items": ["text"],
    "text": [TextDelta(None)],
    "surrogate": [ReasoningDelta(chr(0xD800))],
    "index": [ToolCallDelta(-1, "f", "{}")],
    "arguments": [ToolCallDelta(0, "f", None)],
    "empty": "",
    "source": GrammarSpec("regex", None),
    "kind": GrammarSpec("json_schema", 5),
}


def answer(method, options, good):
    if options["method"] != method:
        return good
    match options["failure"]:
        case "raise":
            raise KeyError("/secret")
        case "panic":
            raise Panic("/secret")
        case "refuse":
            raise RequestError("these tools cannot be forced", param="tools")
        case failure:
            return NONSENSE[failure]


class Parser:
    """Holds the last character of each piece back; "!" is a call."""

    in_reasoning = False

    def __init__(self, options):
        self.options, self.pending, self.calls = options, "", 0

    @property
    def special_tags(self):
        return answer("special_tags", self.options, ())

    def feed(self, text, ids):
        text, self.pending = (self.pending + text)[:-1], text[-1:]
        return answer("feed", self.options, [TextDelta(text)])

    def finish(self):
        good = [ToolCallDelta(0, "f", "{}")] if self.pending == "!" else [TextDelta(self.pending)]
        return answer("finish", self.options, good)

    def grammar_for_tool_choice(self, choice):
        return answer("grammar_for_tool_choice", self.options, GrammarSpec("regex", "x"))

    def call_id(self):
        return answer("call_id", self.options, "mine")


@impl
def treadle_tool_parser(name, options):
    return answer("hook", options, Parser(options))


@impl
def treadle_reasoning_parser(name, options):
    return answer("hook", options, Parser(options))


@impl
def treadle_match(kind, key, model, options):
    return answer("match", options, Match(1, "a weak sign")) if options else None
'''
PIECES = ["one ", "two ", "three"]
TOOLS: Any = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
OPTIONS = {"tool_parsers": "tool_call_parser", "reasoning_parsers": "reasoning_parser"}


def faulty(folder: Path, kind: str, method: str, failure: str, **config: Any) -> PluginManager:
    options = {f"{kind}:faulty": {"method": method, "failure": failure}}
    return plugins_of(folder, PLUGIN, plugin_options=options, **config)


async def with_others(server: Server, **fields: Any) -> list[httpx.Response]:
    """The answer whole and streamed, while others are answered who notice nothing."""
    plain, streamed, *responses = await asyncio.gather(
        server.chat(**fields),
        server.chat(stream=True, **fields),
        server.complete(),
        server.complete(stream=True),
        server.client.get("/health"),
    )
    assert [response.status_code for response in responses] == [200] * 3
    assert not any("parser-error" in response.text for response in responses)
    assert responses[0].json()["choices"][0]["text"] == "".join(server.context.engine.text)  # type: ignore[attr-defined]
    return [plain, streamed]


def content(answer: httpx.Response) -> str:
    if answer.headers["content-type"].startswith("application/json"):
        return str(answer.json()["choices"][0]["message"]["content"])
    chunks = events(answer.text)
    assert chunks.pop() == "[DONE]"
    return "".join(c["choices"][0]["delta"].get("content", "") for c in chunks)


LISTS = ["none", "number", "items", "text", "surrogate", "index", "arguments"]
FAULTS = [
    *[(method, failure) for method in ("hook", "feed", "finish") for failure in ("raise", "panic")],
    *[("hook", failure) for failure in ("none", "number")],
    *[("feed", failure) for failure in LISTS],
    *[("finish", failure) for failure in ("none", "items", "text")],
]


@pytest.mark.fault("tool_parsers", "hook", "feed", "finish")
@pytest.mark.fault("reasoning_parsers", "hook", "feed", "finish")
@pytest.mark.parametrize(("method", "failure"), FAULTS)
@pytest.mark.parametrize("kind", OPTIONS)
async def test_the_text_is_delivered(kind: str, method: str, failure: str, tmp_path: Path) -> None:
    engine = ScriptedEngine(PIECES, plugins=faulty(tmp_path, kind, method, failure))
    fields = {"tools": TOOLS} if kind == "tool_parsers" else {}
    option = OPTIONS[kind]
    async with serving(engine, **{option: "faulty"}) as server:
        plain, streamed = await with_others(server, **fields)
        page = (await server.client.get("/metrics")).text
        if fields:
            assert "x-treadle-parser-error" not in (await server.chat()).headers
    for answer in (plain, streamed):
        assert answer.status_code == 200 and content(answer) == "".join(PIECES)
        assert "secret" not in answer.text
    assert plain.headers["x-treadle-parser-error"] == f"{option}=faulty"
    assert f": parser-error {option}=faulty" in streamed.text
    assert f'treadle_parser_failures_total{{parser="{option}=faulty"}} 2.0' in page
    # What is no parser is a failure of the hook, and nothing of it is called.
    counted = method if method != "hook" else f"treadle_{kind[:-1]}"
    failed = errors(page, f"{kind}:faulty")[counted]
    # The hook is also called for the tags, by both requests if they come at once.
    assert failed == 2 if counted == method else 2 <= failed <= 4


@pytest.mark.parametrize("method", ["hook", "feed", "finish"])
@pytest.mark.parametrize("kind", OPTIONS)
async def test_in_strict_mode_it_is_the_end_of_the_request(
    kind: str, method: str, tmp_path: Path
) -> None:
    plugins = faulty(tmp_path, kind, method, "raise", plugin_strict=True)
    fields = {"tools": TOOLS} if kind == "tool_parsers" else {}
    async with serving(
        ScriptedEngine(PIECES, plugins=plugins), **{OPTIONS[kind]: "faulty"}
    ) as server:
        if fields:
            plain, streamed = await with_others(server, **fields)
        else:
            plain, streamed = await asyncio.gather(server.chat(), server.chat(stream=True))
        assert (await server.complete()).status_code == 200
    last = events(streamed.text)[-2] if streamed.status_code == 200 else streamed.json()
    for error in (plain.json()["error"], last["error"]):
        assert (
            error["code"] == "request_failed" and "plugin_strict makes it fatal" in error["message"]
        )


@pytest.mark.fault("tool_parsers", "hook")
@pytest.mark.fault("reasoning_parsers", "hook")
@pytest.mark.parametrize("failure", ["raise", "none"])
@pytest.mark.parametrize("kind", OPTIONS)
def test_a_hook_that_fails_at_the_start_ends_it(kind: str, failure: str, tmp_path: Path) -> None:
    plugins = faulty(tmp_path, kind, "hook", failure)
    words = "KeyError: '/secret'" if failure == "raise" else "returned None"
    engine = ScriptedEngine(plugins=plugins)
    engine.use_parsers(**{OPTIONS[kind]: "faulty"})
    with pytest.raises(PluginLoadError, match=f"{kind}:faulty .*{words}"):
        serve_engine(lambda: engine, server_from_options(port=0, log_level="error"))


@pytest.mark.fault("tool_parsers", "special_tags")
@pytest.mark.fault("reasoning_parsers", "special_tags")
@pytest.mark.parametrize("failure", ["raise", "panic", "none", "number"])
@pytest.mark.parametrize("kind", OPTIONS)
async def test_tags_that_cannot_be_told_are_none(kind: str, failure: str, tmp_path: Path) -> None:
    fields = {"tools": TOOLS}
    for strict in (False, True):
        plugins = faulty(tmp_path, kind, "special_tags", failure, plugin_strict=strict)
        async with serving(
            ScriptedEngine(plugins=plugins), **{OPTIONS[kind]: "faulty"}, **OTHER[kind]
        ) as server:
            answers = [await server.chat(**fields), await server.chat(stream=True, **fields)]
            page = (await server.client.get("/metrics")).text
            assert (await server.complete()).status_code == 200
        if strict:
            assert [answer.json()["error"]["code"] for answer in answers] == ["request_failed"] * 2
            assert errors(page, f"{kind}:faulty") == {"special_tags": 2}
        else:
            assert [content(answer) for answer in answers] == ["Hello world"] * 2
            assert "x-treadle-parser-error" not in answers[0].headers
            assert errors(page, f"{kind}:faulty") == {"special_tags": 1}, "it is asked once"


OTHER: dict[str, dict[str, str]] = {
    "tool_parsers": {},
    "reasoning_parsers": {"tool_call_parser": "hermes"},
}


@pytest.mark.fault("tool_parsers", "call_id")
@pytest.mark.parametrize("failure", ["raise", "panic", "none", "number", "empty"])
async def test_calls_without_an_id_of_their_own_get_one(failure: str, tmp_path: Path) -> None:
    for strict in (False, True):
        plugins = faulty(tmp_path, "tool_parsers", "call_id", failure, plugin_strict=strict)
        async with serving(
            ScriptedEngine(["!"], plugins=plugins), tool_call_parser="faulty"
        ) as server:
            plain, streamed = (
                await server.chat(tools=TOOLS),
                await server.chat(tools=TOOLS, stream=True),
            )
            page = (await server.client.get("/metrics")).text
        assert errors(page, "tool_parsers:faulty") == {"call_id": 2}
        if strict:
            assert "plugin_strict" in plain.json()["error"]["message"]
            assert "plugin_strict" in streamed.text
        else:
            (call,) = plain.json()["choices"][0]["message"]["tool_calls"]
            assert call["id"].startswith("call_") and '"id":"call_' in streamed.text


@pytest.mark.fault("tool_parsers", "grammar_for_tool_choice")
@pytest.mark.parametrize("failure", ["raise", "panic", "number", "items", "source", "kind"])
async def test_a_call_that_cannot_be_forced_is_refused(failure: str, tmp_path: Path) -> None:
    for strict in (False, True):
        plugins = faulty(
            tmp_path, "tool_parsers", "grammar_for_tool_choice", failure, plugin_strict=strict
        )
        engine = ScriptedEngine(plugins=plugins)
        async with serving(engine, tool_call_parser="faulty") as server:
            answers = await with_others(server, tools=TOOLS, tool_choice="required")
            page = (await server.client.get("/metrics")).text
            assert (await server.chat(tools=TOOLS)).status_code == 200
        assert errors(page, "tool_parsers:faulty") == {"grammar_for_tool_choice": 2}
        for answer in answers:
            error = answer.json()["error"]
            if strict:
                assert (answer.status_code, error["code"]) == (500, "request_failed")
            else:
                assert (answer.status_code, error["param"]) == (400, "tool_choice")
                assert "send tool_choice auto" in error["message"] and "secret" not in answer.text


async def test_a_refusal_of_the_parsers_own_reaches_the_client(tmp_path: Path) -> None:
    plugins = faulty(tmp_path, "tool_parsers", "grammar_for_tool_choice", "refuse")
    async with serving(ScriptedEngine(plugins=plugins), tool_call_parser="faulty") as server:
        answer = await server.chat(tools=TOOLS, tool_choice="required")
    error = answer.json()["error"]
    assert (error["param"], error["message"]) == ("tools", "these tools cannot be forced")


QWEN3 = ModelTraits(templates={"default": 'arguments <tool_call> <think> </think>"'})
CHOSEN = {"tool_parsers": "hermes", "reasoning_parsers": "qwen3"}


@pytest.mark.fault("tool_parsers", "treadle_match")
@pytest.mark.fault("reasoning_parsers", "treadle_match")
@pytest.mark.parametrize("failure", ["raise", "panic", "number"])
@pytest.mark.parametrize("kind", OPTIONS)
async def test_who_cannot_say_what_it_matches_is_not_chosen(
    kind: str, failure: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plugins = faulty(tmp_path, kind, "match", failure)
    async with serving(ScriptedEngine(plugins=plugins, traits=QWEN3)) as server:
        assert server.context.chat_processor.parser_plugins.keys[OPTIONS[kind]] == CHOSEN[kind]
        page = (await server.client.get("/metrics")).text
    assert f"{kind}:faulty" in caplog.text and "not asked" in caplog.text
    if failure != "number":
        assert errors(page, f"{kind}:faulty") == {"treadle_match": 1}
    strict = faulty(tmp_path, kind, "match", failure, plugin_strict=True)
    with pytest.raises(PluginLoadError, match=f"{kind}:faulty"):
        async with serving(ScriptedEngine(plugins=strict, traits=QWEN3)):
            pass
