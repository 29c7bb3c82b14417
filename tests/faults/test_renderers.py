"""A renderer that raises, answers nonsense or hangs costs its conversation."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from faulty import errors, plugins_of
from scripted import ScriptedEngine
from serving import events, serving

from treadle.api.kinds import RENDERERS
from treadle.api.matching import ModelTraits
from treadle.config import from_options
from treadle.errors import PluginLoadError
from treadle.plugins import PluginManager
from treadle.testing.checkpoints import make_tokenizer, tiny_config
from treadle.testing.introspection import report
from treadle.text.assets import choose_renderer, open_checkpoint

PLUGIN = """
import threading
from treadle.api import impl
from treadle.errors import RequestError

TREADLE = {"renderers": ["faulty"]}
released = threading.Event()


class Panic(BaseException):
    pass


def said(method, options, good, trigger=True):
    if options["method"] != method or not trigger:
        return good
    match options["failure"]:
        case "raise":
            raise KeyError("/secret")
        case "panic":
            raise Panic("/secret")
        case "refuse":
            raise RequestError("no system messages", param="messages")
        case "hang":
            released.wait()
            return good
        case "none":
            return None
        case "number":
            return 5
        case "list":
            return ["a"]


class Lines:
    def __init__(self, options):
        self.options = options

    def render(self, messages, **_):
        text = "|".join(m["content"] for m in messages)
        return said("render", self.options, text, "bad" in text)

    def encode(self, prompt):
        return said("encode", self.options, [ord(c) for c in prompt], "bad" in prompt)


@impl
def treadle_renderer(mode, options):
    return said("hook", options, Lines(options))


@impl
def treadle_match(kind, key, model, options):
    return said("match", options, None)


@impl
def treadle_report():
    released.set()
"""
FAULTS = [
    *[
        (method, failure)
        for method in ("render", "encode")
        for failure in ("raise", "panic", "none")
    ],
    *[("render", "number"), ("encode", "number"), ("encode", "list")],
]


def faulty(folder: Path, method: str, failure: str, **config: Any) -> PluginManager:
    options = {"renderers:faulty": {"method": method, "failure": failure}}
    return plugins_of(folder, PLUGIN, plugin_options=options, **config)


def rendering(plugins: PluginManager) -> ScriptedEngine:
    engine: Any = ScriptedEngine(plugins=plugins)
    engine.renderer = plugins.create_guarded(
        RENDERERS, "faulty", files=None, tokenizer=engine.tokenizer
    )  # type: ignore[arg-type]
    scripted: ScriptedEngine = engine
    return scripted


BAD: Any = [{"role": "user", "content": "bad"}]


@pytest.mark.fault("renderers", "render", "encode")
@pytest.mark.parametrize(("method", "failure"), FAULTS)
async def test_a_conversation_that_cannot_be_rendered_fails_alone(
    method: str, failure: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = rendering(faulty(tmp_path, method, failure))
    async with serving(engine) as server:
        plain, streamed, counted, *fine = await asyncio.gather(
            server.post("/v1/chat/completions", {"messages": BAD}),
            server.post("/v1/chat/completions", {"messages": BAD, "stream": True}),
            server.post("/tokenize", {"messages": BAD}),
            server.chat(),
            server.chat(stream=True),
            server.complete(),
        )
        page = (await server.client.get("/metrics")).text
    assert [answer.status_code for answer in fine] == [200] * 3
    for answer in (plain, streamed, counted):
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (500, "plugin_failed")
        assert error["message"].startswith("renderers:faulty failed on this request")
        assert "secret" not in answer.text
    assert errors(page, "renderers:faulty") == {method: 3}
    assert "renderers:faulty from faulty_" in caplog.text and f"failed in {method}: " in caplog.text


async def test_a_refusal_of_the_renderers_own_reaches_the_client(tmp_path: Path) -> None:
    async with serving(rendering(faulty(tmp_path, "render", "refuse"))) as server:
        answer = await server.post("/v1/chat/completions", {"messages": BAD, "stream": True})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == "no system messages"


@pytest.mark.fault("renderers", "render", "encode")
@pytest.mark.parametrize("method", ["render", "encode"])
async def test_a_renderer_that_hangs_is_given_up(method: str, tmp_path: Path) -> None:
    budget = {"renderers": 0.02}
    plugins = faulty(tmp_path, method, "hang", plugin_time_budget=budget)
    async with serving(rendering(plugins)) as server:
        ask = ("/v1/chat/completions", {"messages": BAD})
        hanging = [asyncio.create_task(server.post(*ask)) for _ in range(5)]
        while not all(task.done() for task in hanging):
            assert (await server.chat()).status_code == 200
        for task in hanging:
            error = task.result().json()["error"]
            assert error["code"] == "plugin_failed"
            assert error["message"].startswith("renderers:faulty failed on this request")
        page = (await server.client.get("/metrics")).text
        assert errors(page, "renderers:faulty") == {"render": 5}
        assert events((await server.chat(stream=True)).text)[-1] == "[DONE]"
        report(plugins)  # lets the threads go


@pytest.mark.fault("renderers", "hook")
@pytest.mark.parametrize("failure", ["raise", "panic", "none"])
def test_a_hook_that_fails_ends_the_start(failure: str, tmp_path: Path) -> None:
    folder = make_tokenizer(tmp_path)
    tiny_config().save_pretrained(folder)
    config = from_options(model=str(folder), renderer="faulty")
    words = (
        "returned None" if failure == "none" else r"treadle_renderer: (KeyError|Panic): '?/secret"
    )
    with pytest.raises(PluginLoadError, match=f"renderers:faulty .*{words}"):
        open_checkpoint(config, faulty(tmp_path, "hook", failure))


def test_a_renderer_of_a_model_is_guarded(tmp_path: Path) -> None:
    """As the engines get it; what it is made of may be anything."""
    folder = make_tokenizer(tmp_path)
    tiny_config().save_pretrained(folder)
    config = from_options(model=str(folder), renderer="faulty")
    with pytest.raises(PluginLoadError, match=r"renderers:faulty .* ChatRenderer, with render,"):
        open_checkpoint(config, faulty(tmp_path, "hook", "number"))
    renderer = open_checkpoint(config, faulty(tmp_path, "render", "raise")).renderer
    assert renderer is not None
    with pytest.raises(PluginLoadError, match=r"renderers:faulty .* failed in render: "):
        renderer.render(BAD)


@pytest.mark.fault("renderers", "treadle_match")
@pytest.mark.parametrize("failure", ["raise", "panic", "number"])
def test_who_cannot_say_what_it_matches_is_not_chosen(
    failure: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = from_options(model="m")
    assert choose_renderer(config, faulty(tmp_path, "match", failure), ModelTraits()).key == "jinja"
    assert "renderers:faulty" in caplog.text and "not asked" in caplog.text
    strict = faulty(tmp_path, "match", failure, plugin_strict=True)
    with pytest.raises(PluginLoadError, match="renderers:faulty"):
        choose_renderer(config, strict, ModelTraits())
