"""Extensions that fail: only they are left out, and after some failures altogether."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from faulty import errors
from scripted import ScriptedEngine
from serving import serving

from treadle.api.kinds import SCHEDULING_POLICIES, TOOL_PARSERS
from treadle.config import EngineConfig, PluginConfig
from treadle.engine.extensions import ConfiguredExtensions
from treadle.errors import EngineError, PluginLoadError
from treadle.plugins import PluginManager
from treadle.plugins.entries import Entry
from treadle.plugins.guard import MAX_CONSECUTIVE_FAILURES
from treadle.testing.introspection import report

PARSER = """
from treadle.api import impl
from treadle.api.parsers import TextDelta

TREADLE = {"tool_parsers": ["plain"]}


class Plain:
    def feed(self, text, ids):
        return [TextDelta(text)]

    def finish(self):
        return []


@impl
def treadle_tool_parser(name):
    return Plain()
"""
WRAPPER = """
from treadle.api import impl

TREADLE = {"extensions": ["faulty"]}


class Panic(BaseException):
    pass


@impl(wrapper=True)
def treadle_tool_parser(name, options):
    %s


@impl(wrapper=True)
def treadle_server():
    yield
    raise KeyError("too late")
"""
WRAPPERS = {
    "before": "raise KeyError('oh')\n    yield",
    "behind": "yield\n    raise KeyError('oh')",
    "panic": "raise Panic('oh')\n    yield",
    "never": "return\n    yield",
    "twice": "found = yield\n    yield\n    return found",
    "lost": "yield",
}
TOOLS: Any = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]


def plugins_with_wrapper(
    folder: Path, body: str, *, routes: bool = False, **config: Any
) -> PluginManager:
    """A plugin manager with a parser of its own distribution, and a wrapper of another around it."""
    source = WRAPPER % body
    if not routes:
        source = source.partition("@impl(wrapper=True)\ndef treadle_server")[0]
    (folder / "parser.py").write_text(PARSER)
    (folder / "wrapper.py").write_text(source)
    files = [str(folder / "parser.py"), str(folder / "wrapper.py")]
    return PluginManager(PluginConfig(plugin_file=files, **config))


@pytest.mark.fault("extensions", "wrapper")
@pytest.mark.parametrize("failure", WRAPPERS)
async def test_a_wrapper_is_left_out_and_then_not_called(
    failure: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = ScriptedEngine(plugins=plugins_with_wrapper(tmp_path, WRAPPERS[failure]))
    async with serving(engine, tool_call_parser="plain") as server:
        for _ in range(MAX_CONSECUTIVE_FAILURES + 1):
            response = await server.chat(tools=TOOLS)
            assert response.json()["choices"][0]["message"]["content"] == "Hello world"
            assert "x-treadle-parser-error" not in response.headers, (
                "it is not the parser's failure"
            )
        assert "Hel" in (await server.chat(tools=TOOLS, stream=True)).text
        page = (await server.client.get("/metrics")).text
        rows = (await server.client.get("/plugins")).json()["data"]
    assert errors(page, "extensions:faulty") == {"treadle_tool_parser": MAX_CONSECUTIVE_FAILURES}
    assert errors(page, "tool_parsers:plain") == {}
    labels = 'model_name="scripted",plugin="extensions:faulty",state="broken"'
    assert f"treadle_plugin_state{{{labels}}} 1.0" in page
    assert [r["state"] for r in rows if r["id"] == "extensions:faulty"] == ["broken"]
    assert "extensions:faulty is not called for 60 s" in caplog.text


@pytest.mark.fault("extensions", "wrapper")
@pytest.mark.parametrize("failure", WRAPPERS)
def test_in_strict_mode_a_wrapper_is_fatal(failure: str, tmp_path: Path) -> None:
    plugins = plugins_with_wrapper(tmp_path, WRAPPERS[failure], plugin_strict=True)
    with pytest.raises(EngineError, match=r"extensions:faulty .*plugin_strict makes it fatal"):
        plugins.create(TOOL_PARSERS, "plain", tokenizer=object(), tools=())  # type: ignore[arg-type]


def test_of_two_wrappers_the_one_that_loses_the_answer_is_found(tmp_path: Path) -> None:
    good = WRAPPER.partition("@impl(wrapper=True)\ndef treadle_server")[0] % "return (yield)"
    for name, source in (
        ("a_good", good),
        ("m_bad", good.replace("return (yield)", "yield")),
        ("z_good", good),
    ):
        (tmp_path / f"{name}.py").write_text(source.replace('["faulty"]', f'["{name}"]'))
    (tmp_path / "parser.py").write_text(PARSER)
    plugins = PluginManager(
        PluginConfig(plugin_file=[str(path) for path in sorted(tmp_path.glob("*.py"))])
    )
    for _ in range(MAX_CONSECUTIVE_FAILURES):
        assert plugins.create(TOOL_PARSERS, "plain", tokenizer=object(), tools=()) is not None  # type: ignore[arg-type]
    states = plugins.states()
    assert [states[f"extensions:{name}"] for name in ("a_good", "m_bad", "z_good")] == [
        *("loaded", "broken", "loaded")
    ]


@pytest.mark.fault("extensions", "wrapper")
async def test_a_wrapper_of_the_servers_hook_ends_the_start(tmp_path: Path) -> None:
    """The routes that it wraps are added already, and cannot be added once more."""
    engine = ScriptedEngine(plugins=plugins_with_wrapper(tmp_path, "return (yield)", routes=True))
    with pytest.raises(PluginLoadError, match=r"extensions:faulty .*KeyError: 'too late'"):
        async with serving(engine):
            pass


LIFE = """
from treadle.api import impl
from treadle.errors import RequestError

TREADLE = {"extensions": ["faulty"]}


class Panic(BaseException):
    pass


def said(where, good=None):
    if where != METHOD:
        return good
    if isinstance(FAILURE, BaseException):
        raise FAILURE
    return FAILURE


@impl
def treadle_configure(config):
    return said("configure")


@impl
def treadle_unconfigure():
    return said("unconfigure")


@impl
def treadle_report():
    return said("report", "all is well")
"""
OTHER = """
from treadle.api import impl

TREADLE = {{"extensions": ["{name}"]}}


@impl
def treadle_configure(config):
    LOG.append("configure {name}")


@impl
def treadle_unconfigure():
    LOG.append("unconfigure {name}")


@impl
def treadle_report():
    return "well"


LOG = []
"""
FAILURES = ["KeyError('oh')", "Panic('oh')", "RequestError('oh')"]


def plugins_with_lifecycle(
    folder: Path, method: str, failure: str, **config: Any
) -> tuple[PluginManager, dict[str, Any]]:
    """A faulty extension between two others, and what the others have noted."""
    for name in ("before", "zuletzt"):
        (folder / f"{name}.py").write_text(f"{OTHER.format(name=name)}# {uuid4()}")
    (folder / "faulty.py").write_text(
        f"{LIFE}\nMETHOD, FAILURE = {method!r}, {failure}  # {uuid4()}\n"
    )
    files = [str(path) for path in sorted(folder.glob("*.py"))]
    plugins = PluginManager(PluginConfig(plugin_file=files, **config))
    return plugins, {n: plugins.load("extensions", n).LOG for n in ("before", "zuletzt")}  # type: ignore[attr-defined]


@pytest.mark.fault("extensions", "hook")
@pytest.mark.parametrize("failure", FAILURES)
def test_a_configure_that_fails_ends_the_start_and_releases_the_others(
    failure: str, tmp_path: Path
) -> None:
    plugins, log = plugins_with_lifecycle(tmp_path, "configure", failure)
    with pytest.raises(Exception, match="oh") as raised:
        ConfiguredExtensions(plugins, EngineConfig())
    if failure != "RequestError('oh')":  # said on purpose
        assert isinstance(raised.value, PluginLoadError)
        assert "extensions:faulty from faulty.py" in str(raised.value)
    assert log["before"] == ["configure before", "unconfigure before"] and log["zuletzt"] == []
    assert dict((m, n) for p, m, o, n in plugins.call_stats.rows() if o == "error") == {
        "treadle_configure": 1
    }


@pytest.mark.fault("extensions", "treadle_unconfigure")
@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize("strict", [False, True])
def test_an_unconfigure_that_fails_is_told_and_the_others_are_released(
    failure: str, strict: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plugins, log = plugins_with_lifecycle(
        tmp_path, "unconfigure", failure, **({"plugin_strict": True} if strict else {})
    )
    extensions = ConfiguredExtensions(plugins, EngineConfig())
    extensions.unconfigure()
    for name, noted in log.items():
        assert noted == [f"configure {name}", f"unconfigure {name}"]
    assert "oh" in caplog.text
    assert ("extensions:faulty", "treadle_unconfigure", "error", 1) in plugins.call_stats.rows()


@pytest.mark.fault("extensions", "treadle_report")
@pytest.mark.parametrize("failure", [*FAILURES, "5", "[None]", "None"])
def test_a_report_that_fails_is_a_line(failure: str, tmp_path: Path) -> None:
    plugins, _ = plugins_with_lifecycle(tmp_path, "report", failure)
    lines = [line for line in report(plugins) if not line.startswith("treadle")]
    assert [line for line in lines if line.endswith(": well")] == [
        line for line in lines if line.startswith(("before.py", "zuletzt.py"))
    ]
    faulty_lines = [line for line in lines if line.startswith("faulty.py")]
    assert len(faulty_lines) == (failure != "None")
    assert failure not in FAILURES or "treadle_report failed" in faulty_lines[0]


DATA = """
from dataclasses import dataclass
from treadle.api import impl


@dataclass
class Data:
    @impl
    def treadle_report(self):
        return "here"

    @impl(wrapper=True)
    def treadle_scheduling_policy(self):
        return (yield)
"""


def test_an_object_without_a_hash_is_told_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Otherwise every hook that it wraps would fail."""
    (tmp_path / "faulty_data.py").write_text(DATA)
    monkeypatch.syspath_prepend(str(tmp_path))
    entries = [
        Entry("extensions", "data", "faulty_data:Data", "data", "1"),
        Entry("scheduling_policies", "fcfs", "treadle.scheduler.policies", "treadle-core", "1"),
    ]
    assert PluginManager(source=lambda: entries).create(SCHEDULING_POLICIES, "fcfs") is not None
    assert "extensions:data from data 1 failed to load" in caplog.text
    assert "eq=False" in caplog.text
    del sys.modules["faulty_data"]
