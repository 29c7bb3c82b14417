"""``--isolate``: plugins in a process of their own, which may hang, crash and eat memory there."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from scripted import ScriptedEngine
from serving import serving

from treadle.api.kinds import MODELS, REASONING_PARSERS, RENDERERS, TOOL_PARSERS
from treadle.api.types import ModelFiles, ModelTraits, TextDelta, Tool, ToolCallDelta
from treadle.config import PluginConfig
from treadle.errors import ConfigError, PluginLoadError, RequestError
from treadle.plugins import PluginManager
from treadle.processes.watchdog import MAX_STUCK_THREADS, RETRY_SECONDS
from treadle.testing.parsers import ReasoningSuite, ToolParserSuite, call
from treadle.testing.text import RendererSuite
from treadle_server.isolation import plugin as isolation
from treadle_server.isolation.wire import Call, Kept, decode, encode, pack
from treadle_server.plugin_reload import reloaded_plugins
from treadle_server.testing.engine import CharacterTokenizer

pytestmark = pytest.mark.own_python

PLUGIN = '''
import ctypes, os, sys, threading
from typing import Annotated
import msgspec
from treadle.api import impl
from treadle.api.types import GrammarSpec, Match, ReasoningDelta, TextDelta, ToolCallDelta
from treadle.errors import RequestError

TREADLE = {"tool_parsers": ["mine", "other"], "reasoning_parsers": ["mine"], "renderers": ["mine"]}


class Options(msgspec.Struct, frozen=True):
    prefix: str = ""


TREADLE_OPTIONS = {"tool_parsers:mine": Options}


def misbehave(text):
    match text.partition(" ")[0]:
        case "hang":
            threading.Event().wait()
        case "exit":
            os._exit(3)
        case "sys.exit":
            sys.exit(4)
        case "segfault":
            ctypes.string_at(0)
        case "memory":
            return bytearray(5 * 2**30)
        case "raise":
            raise ValueError("boom")
        case "thread":
            threading.Thread(target=threading.Event().wait).start()
        case "wrong":
            return 7


class Parser:
    special_tags = ("<a>", "<b>")
    in_reasoning = False

    def __init__(self, tokenizer, tools, prefix):
        self.tokenizer, self.tools, self.prefix, self.count = tokenizer, tools, prefix, 0

    def feed(self, text, ids):
        self.count += 1
        if text == "call":
            return [ToolCallDelta(0, self.tools[0].name, "{"), ReasoningDelta("r")]
        if text == "tokenizer":
            ids = self.tokenizer.encode("ab", add_special_tokens=False)
            return [TextDelta(f"{ids} {self.tokenizer.vocab_size} {sorted(self.tokenizer.special_token_ids)}")]
        if text == "foreign":
            return [TextDelta(str(self.tokenizer._secret))]
        if misbehave(text) == 7:
            return [7]
        return [TextDelta(f"{self.prefix}{self.count} {os.getpid()} {text} {list(ids)}")]

    def finish(self):
        return []

    def call_id(self):
        return f"id-{self.count}"

    def grammar_for_tool_choice(self, choice):
        if choice == "required":
            return GrammarSpec("json", "{}")
        raise RequestError("there is no such tool", param="tool_choice")


class Text(str):
    """What ``encode`` recognizes."""


class Renderer:
    def render(self, messages, *, tools=None, add_generation_prompt=True, continue_final_message=False, template_arguments=None):
        content = messages[-1]["content"]
        misbehave(content)
        return Text(content)

    def encode(self, prompt):
        return [1 if type(prompt) is Text else 0, *map(ord, prompt)]


@impl
def treadle_tool_parser(name, tokenizer, tools, options):
    if name == "other":
        raise ValueError("it cannot be opened")
    return Parser(tokenizer, tools, options["prefix"])


@impl
def treadle_reasoning_parser(name, tokenizer, prompt):
    return Parser(tokenizer, (), prompt)


@impl
def treadle_renderer(mode, files, tokenizer):
    assert files.root.name and isinstance(files.config, dict)
    return Renderer()


@impl
def treadle_match(kind, key, model):
    return Match(60, f"{kind} {key}") if "<a>" in model.tokens and model.config else None
'''
TOOLS = (Tool("f", "", {"type": "object"}),)
LOST = ["hang", "exit", "segfault"]


def manager(path: Path, *isolate: str, **options: Any) -> PluginManager:
    return PluginManager(PluginConfig(plugin_file=[str(path)], isolate=list(isolate), **options))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / f"mine_{uuid4().hex}.py"  # a module of this test's own
    path.write_text(PLUGIN)
    return path


@pytest.fixture
def plugins(file: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PluginManager]:
    for kind in isolation.SECONDS:
        monkeypatch.setitem(isolation.SECONDS, kind, 0.3)
    plugins = manager(file, "tool_parsers:mine")
    yield plugins
    process_of(plugins).close()


def process_of(plugins: PluginManager) -> Any:
    plugin: Any = plugins.load("tool_parsers", "mine")
    return plugin.process


def tool_parser(plugins: PluginManager) -> Any:
    return plugins.create_guarded(TOOL_PARSERS, "mine", tokenizer=CharacterTokenizer(), tools=TOOLS)


def renderer(plugins: PluginManager) -> Any:
    files = ModelFiles(Path("nowhere"), ("a",), {"x": [1]})
    return plugins.create_guarded(RENDERERS, "mine", files=files, tokenizer=CharacterTokenizer())


# ------------------------------------------------------------------------- as if it were here


def test_a_tool_parser_behaves_as_one_of_this_process(plugins: PluginManager, file: Path) -> None:
    parser = tool_parser(plugins)
    (delta,) = parser.feed("a", (1, 2))
    count, pid, *rest = delta.text.split(" ")
    assert (count, rest) == ("1", ["a", "[1,", "2]"]) and int(pid) == process_of(plugins).pid
    assert parser.feed("call", ())[0] == ToolCallDelta(0, "f", "{")
    assert (parser.finish(), parser.call_id()) == ([], "id-2")
    assert parser.special_tags == ("<a>", "<b>")
    assert parser.grammar_for_tool_choice("required").kind == "json"
    with pytest.raises(RequestError, match="there is no such tool") as error:
        parser.grammar_for_tool_choice({"name": "g"})
    assert error.value.param == "tool_choice"
    assert not any(file.stem in name for name in sys.modules), "imported here"


def test_two_parsers_keep_their_own_state_and_are_freed(plugins: PluginManager) -> None:
    first, second = tool_parser(plugins), tool_parser(plugins)
    first.feed("a", ())
    assert first.feed("b", ())[0].text.startswith("2 ")
    assert second.feed("c", ())[0].text.startswith("1 ")
    del first
    process = process_of(plugins)
    assert list(process._freed) == [1]
    second.finish()
    assert not process._freed


def test_the_tokenizer_of_the_server_answers(plugins: PluginManager) -> None:
    parser = tool_parser(plugins)
    assert parser.feed("tokenizer", ()) == [TextDelta("[97, 98] 1114112 [0]")]
    with pytest.raises(PluginLoadError, match="has no '_secret' of the tokenizer"):
        parser.feed("foreign", ())


def test_a_reasoning_parser_and_a_match(plugins: PluginManager) -> None:
    parser: Any = plugins.create_guarded(
        REASONING_PARSERS, "mine", tokenizer=CharacterTokenizer(), prompt="<p>"
    )
    assert parser.feed("a", ())[0].text.startswith("<p>1 ") and parser.in_reasoning is False
    hooks: Any = plugins.hooks_for("tool_parsers", "mine")
    asked = {"kind": "tool_parsers", "key": "mine", "options": {}}
    match = hooks.treadle_match(model=ModelTraits({"a": 1}, tokens=frozenset({"<a>"})), **asked)
    assert (match.score, match.reason) == (60, "tool_parsers mine")
    assert hooks.treadle_match(model=ModelTraits(), **asked) is None


def test_a_renderer_encodes_the_very_text_that_it_rendered(plugins: PluginManager) -> None:
    """A text of a type of its own means more than its characters."""
    rendered = renderer(plugins).render([{"role": "user", "content": "hi"}])
    assert rendered == "hi" and renderer(plugins).encode(rendered) == [1, 104, 105]
    assert renderer(plugins).encode("hi") == [0, 104, 105]


def test_options_are_checked_by_the_plugin(file: Path) -> None:
    name = "tool_parsers:mine"
    plugins = manager(file, name, plugin_options={name: {"prefix": "> "}})
    assert tool_parser(plugins).feed("a", ())[0].text.startswith("> 1 ")
    wrong = manager(file, name, plugin_options={name: {"prefiks": "> "}})
    with pytest.raises(ConfigError, match="has no option 'prefiks'"):
        tool_parser(wrong)


# ------------------------------------------------------------------------------ what it costs


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("raise", r"feed: ValueError: boom \(mine_\w+.py, line \d+\)"),
        ("sys.exit", "feed: SystemExit: 4"),
        ("memory", "feed: MemoryError"),
        ("wrong", "feed: TypeError: it returned 7"),
        ("hang", r"did not answer within 0\.3 s and was ended"),
        ("exit", "the process exited with status 3"),
        ("segfault", "the process was killed by SIGSEGV"),
    ],
)
def test_a_fault_costs_its_own_work(plugins: PluginManager, fault: str, words: str) -> None:
    """The plugin is named, its call counted, and the next response is parsed."""
    parser, bystander = tool_parser(plugins), tool_parser(plugins)
    with pytest.raises(
        PluginLoadError, match=f"tool_parsers:mine from {Path('mine_').name}"
    ) as error:
        parser.feed(fault, ())
    assert error.match(words)
    assert ("tool_parsers:mine", "feed", "error", 1) in plugins.call_stats.rows()
    assert tool_parser(plugins).feed("a", ())[0].text.startswith("1 ")
    if fault in LOST:
        with pytest.raises(PluginLoadError, match="its state is lost"):
            bystander.feed("a", ())
    else:
        assert bystander.feed("a", ())[0].text.startswith("1 ")


@pytest.mark.parametrize("fault", LOST)
def test_a_renderer_is_built_again(plugins: PluginManager, fault: str) -> None:
    built = renderer(plugins)
    rendered = built.render([{"role": "user", "content": "hi"}])
    with pytest.raises(PluginLoadError, match="renderers:mine"):
        built.render([{"role": "user", "content": fault}])
    assert process_of(plugins)._num_failures == 1, "what has killed a process is not sent again"
    again = built.render([{"role": "user", "content": "ho"}])
    assert built.encode(again) == [1, 104, 111]
    with pytest.raises(PluginLoadError, match="its state is lost"):  # never as plain text
        built.encode(rendered)


def test_a_process_that_is_lost_again_and_again_is_left_alone(plugins: PluginManager) -> None:
    process = process_of(plugins)
    now = 0.0
    process._clock = lambda: now
    for _ in range(MAX_STUCK_THREADS):
        with pytest.raises(PluginLoadError, match="exited with status 3"):
            tool_parser(plugins).feed("exit", ())
    with pytest.raises(PluginLoadError, match=r"lost 4 times in a row; it is called again in 60 s"):
        tool_parser(plugins)
    now = RETRY_SECONDS
    assert tool_parser(plugins).feed("a", ())
    assert process._num_failures == 0


async def test_a_server_says_which_plugin_it_leaves_alone(plugins: PluginManager) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    async with serving(
        ScriptedEngine(["exit"], plugins=plugins), tool_call_parser="mine"
    ) as server:
        process_of(plugins)._clock = lambda: 0.0
        for _ in range(MAX_STUCK_THREADS + 1):
            assert (await server.chat(tools=tools)).json()["choices"][0]["message"][
                "content"
            ] == "exit"
        rows = {row["id"]: row for row in (await server.client.get("/plugins")).json()["data"]}
        health = (await server.client.get("/health")).json()
    assert rows["tool_parsers:mine"]["state"] == "broken"
    assert "lost 4 times in a row; it is called again in 60 s" in rows["tool_parsers:mine"]["note"]
    assert "tool_parsers:mine" in str(health), health


def test_a_leftover_thread_does_not_keep_its_process(plugins: PluginManager) -> None:
    tool_parser(plugins).feed("thread", ())
    process = process_of(plugins)
    child = process._process._child
    process.close()
    assert child.wait(10) == -signal.SIGKILL


def test_a_hook_that_raises_names_the_plugin(file: Path) -> None:
    plugins = manager(file, "tool_parsers:other")
    with pytest.raises(PluginLoadError, match=r"tool_parsers:other from .*it cannot be opened"):
        plugins.create(TOOL_PARSERS, "other", tokenizer=CharacterTokenizer(), tools=())


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("raise OSError('no file')", "OSError: no file"),
        ("import os; os._exit(5)", "exited with status 5 while it started"),
    ],
)
def test_an_import_that_fails_breaks_the_plugin_alone(
    tmp_path: Path, text: str, words: str
) -> None:
    path = tmp_path / f"bad_{uuid4().hex}.py"
    path.write_text(f'TREADLE = {{"tool_parsers": ["bad"]}}\n{text}\n')
    plugins = manager(path, "tool_parsers:bad")
    with pytest.raises(PluginLoadError, match="tool_parsers:bad from"):
        plugins.load("tool_parsers", "bad")
    assert words in plugins.choose("tool_parsers", "bad").reason


# ------------------------------------------------------------------------- which and where


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("tool_parsers", "isolate: no plugin provides tool_parsers:"),
        ("parsers:mine", "isolate names 'parsers:mine', write kind:key.*mean 'tool_parsers'"),
        (
            "tool_parsers:mien",
            "isolate: no plugin provides tool_parsers:mien .*did you mean 'mine'",
        ),
        # Its fallback would be served unisolated.
        ("models:NobodyForCausalLM", "isolate: no plugin provides models:NobodyForCausalLM"),
    ],
)
def test_a_name_that_is_nobodys_stops_the_start(file: Path, name: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        manager(file, name)


def test_a_kind_that_cannot_be_isolated_is_not_loaded_at_all() -> None:
    plugins = PluginManager(PluginConfig(isolate=["models:LlamaForCausalLM"]))
    with pytest.raises(PluginLoadError, match="plugins that can be isolated are tool_parsers, "):
        plugins.create(MODELS, "LlamaForCausalLM", hf_config=None)


def test_workers_isolate_it_too(file: Path) -> None:
    plugins = manager(file, "tool_parsers:mine")
    worker = PluginManager.from_selection(plugins.selection(), plugins.config)
    assert type(worker.load("tool_parsers", "mine")) is isolation.IsolatedPlugin
    process_of(worker).close()


def test_new_code_is_isolated_as_the_old_was(file: Path) -> None:
    plugins = manager(file, "tool_parsers:mine")
    old = tool_parser(plugins)
    file.write_text(PLUGIN.replace("{self.prefix}{self.count}", "new {self.count}"))
    with reloaded_plugins(plugins, "tool_parsers:mine") as (new_plugins, result):
        assert "tool_parsers:mine" in result.plugins
        assert tool_parser(new_plugins).feed("a", ())[0].text.startswith("new 1 ")
    assert old.feed("a", ())[0].text.startswith("1 ")
    assert not any(file.stem in name for name in sys.modules), "imported here"
    process_of(new_plugins).close()


# ------------------------------------------------------------------------------- the messages


@pytest.mark.parametrize(
    "value",
    [
        [None, True, 3, 1.5, "ä", b"\xff", {"a": [{"b": None}]}],
        TOOLS[0],
        {"x": (TextDelta("a"), ToolCallDelta(0, None, ""))},
        ModelTraits({"a": {"b": 1}}, {"default": "t"}, frozenset({"<x>"})),
        ModelFiles(Path("/tmp/a"), ("b",), {}),
    ],
)
def test_what_travels_arrives(value: Any) -> None:
    data = encode(Call(1, "m", pack([value])))
    (arrived,) = decode(data, Call, kept=lambda n, t: t).arguments
    assert type(arrived) is type(value) and pack(arrived) == pack(value)


@pytest.mark.parametrize("value", [object(), {"a": object()}, [lambda: 0], MODELS])
def test_what_cannot_travel_is_named(value: Any) -> None:
    with pytest.raises(TypeError, match="cannot be sent to another process"):
        pack(value)


@pytest.mark.parametrize(
    "name", ["Path", "PluginManager", "__builtins__", "annotations", "ToolParser"]
)
def test_a_message_makes_nothing_but_data_of_the_contract(name: str) -> None:
    import msgspec
    from msgspec.msgpack import Ext

    data = msgspec.msgpack.encode([1, "m", [Ext(1, msgspec.msgpack.encode([name, ["x"]]))]])
    with pytest.raises(ValueError, match="which is not data of treadle"):
        decode(data, Call, kept=Kept)


# ---------------------------------------------------------------------------------- a server


@pytest.mark.parametrize(
    ("fault", "stream"), [("raise", False), ("hang", False), ("hang", True), ("exit", True)]
)
async def test_a_request_gets_its_text_and_the_next_one_its_calls(
    plugins: PluginManager, fault: str, stream: bool
) -> None:
    engine = ScriptedEngine([fault, " b"], plugins=plugins)
    tools = [{"type": "function", "function": {"name": "f"}}]
    async with serving(engine, tool_call_parser="mine") as server:
        failed = await server.chat(tools=tools, stream=stream)
        assert failed.status_code == 200
        engine.text = ["call"]
        fine = await server.chat(tools=tools)
        assert fine.json()["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "f"
        page = (await server.client.get("/metrics")).text
        listed = (await server.client.get("/plugins")).json()
    if stream:
        assert ": parser-error tool_call_parser=mine" in failed.text
    else:
        assert failed.json()["choices"][0]["message"]["content"] == f"{fault} b"
        assert failed.headers["x-treadle-parser-error"] == "tool_call_parser=mine"
    assert 'treadle_parser_failures_total{parser="tool_call_parser=mine"} 1.0' in page
    assert "treadle_parser_threads_hung 0.0" in page
    rows = {f"{row['kind']}:{row['key']}": row for row in listed["data"]}
    assert "isolated" in rows["tool_parsers:mine"]["note"]


# ------------------------------------------------------------------- the suites of the kinds


@cache
def isolated(id: str) -> PluginManager:
    return PluginManager(PluginConfig(isolate=[id]))


class TestIsolatedToolParser(ToolParserSuite):
    plugin = "tool_parsers:hermes"
    test_time_is_linear = None  # thousands of calls, which say nothing about this process
    cases = (
        (
            '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>',
            [call(0, "f", '{"x": 1}')],
        ),
    )

    def plugin_manager(self) -> PluginManager:
        return isolated(self.plugin)


class TestIsolatedReasoningParser(ReasoningSuite):
    plugin = "reasoning_parsers:qwen3"
    test_time_is_linear = None

    def plugin_manager(self) -> PluginManager:
        return isolated(self.plugin)


class TestIsolatedRenderer(RendererSuite):
    plugin = "renderers:jinja"

    def plugin_manager(self) -> PluginManager:
        return isolated(self.plugin)
