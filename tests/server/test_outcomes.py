"""Health from what comes of requests and of the calls of plugins."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from scripted import ScriptedEngine
from serving import serving

from treadle.config import PluginConfig
from treadle.plugins import PluginManager
from treadle_server.logs import StormHandler
from treadle_server.outcomes import MEMORY_SECONDS, NUM_REQUESTS, CallOutcomes, RequestOutcomes

PARSER = """
from treadle.api import impl
from treadle.api.parsers import TextDelta
TREADLE = {"tool_parsers": ["moody"]}

class Parser:
    def feed(self, text, ids):
        if "!" in text:
            raise KeyError("oh")
        return [TextDelta(text)]
    def finish(self):
        return []
    def grammar_for_tool_choice(self, choice):
        return None

@impl
def treadle_tool_parser(name):
    return Parser()
"""
TOOLS: Any = [{"type": "function", "function": {"name": "f"}}]


def test_calls_that_fail_in_a_row_break_a_plugin() -> None:
    outcomes = CallOutcomes()

    def broken(ok: int, error: int) -> list[str]:
        rows = [("kind:key", "feed", "ok", ok), ("kind:key", "feed", "error", error)]
        return outcomes.broken({"server": rows, "engine": [("kind:key", "hook", "ok", 9)]}, {})

    assert broken(0, 2) == [] and broken(0, 3) == ["kind:key"]
    assert broken(1, 3) == [], "it works again"
    assert broken(1, 5) == [] and broken(1, 6) == ["kind:key"]
    assert broken(2, 20) == [], "nobody knows in which order"


def test_requests_that_all_fail_are_forgotten_after_a_while() -> None:
    now = 0.0
    outcomes = RequestOutcomes(lambda: now)
    for _ in range(NUM_REQUESTS - 1):
        outcomes.add(failed=True)
    assert not outcomes.all_failed
    outcomes.add(failed=True)
    assert outcomes.all_failed
    now = MEMORY_SECONDS
    assert not outcomes.all_failed
    outcomes.add(failed=True)
    assert outcomes.all_failed
    outcomes.add(failed=False)
    assert not outcomes.all_failed


async def test_health_names_the_plugin_that_fails(tmp_path: Path) -> None:
    file = tmp_path / "moody.py"
    file.write_text(PARSER)
    engine = ScriptedEngine(["!"], plugins=PluginManager(PluginConfig(plugin_file=[str(file)])))
    async with serving(engine, tool_call_parser="moody") as server:
        assert (await server.client.get("/health")).json() == {"status": "ok"}
        for _ in range(3):
            assert (await server.chat(tools=TOOLS)).status_code == 200
        health = await server.client.get("/health")
        assert health.status_code == 200
        assert health.json() == {"status": "degraded", "plugins": ["tool_parsers:moody"]}
        engine.text = ["fine"]
        await server.chat(tools=TOOLS)
        assert (await server.client.get("/health")).json() == {"status": "ok"}


ROUTE = """
from treadle.api import impl
TREADLE = {"server": ["moody"]}
FAILS = [True]

@impl
def treadle_server(app):
    from litestar import get

    def check(scope):
        if FAILS[0] and scope["path"] in ("/moody", FAILS[-1]):
            raise KeyError("oh")

    @get("/moody")
    async def moody() -> str:
        check({"path": "/moody"})
        return "fine"

    @get("/moody/mend")
    async def mend() -> None:
        FAILS[0] = False

    @get("/moody/around")
    async def around() -> None:
        FAILS[:] = [True, "/version"]

    def middleware(app):
        async def call(scope, receive, send):
            if scope["path"] == "/version":
                check(scope)
            await app(scope, receive, send)
        return call

    app.middleware.append(middleware)
    app.route_handlers.extend([moody, mend, around])
"""


async def test_a_route_that_works_again_is_healthy(tmp_path: Path) -> None:
    """Of its own, and one that is the plugin's middleware around a route of the server."""
    file = tmp_path / "moody_route.py"
    file.write_text(ROUTE)
    engine = ScriptedEngine(plugins=PluginManager(PluginConfig(plugin_file=[str(file)])))
    async with serving(engine) as server:
        get = server.client.get
        for path in ("/moody", "/version"):
            for _ in range(3):
                assert (await get(path)).status_code == 500
            health = await get("/health")
            if path == "/moody":
                assert health.json() == {"status": "degraded", "plugins": ["server:moody"]}
            assert (await get("/moody/mend")).status_code == 200
            assert (await get(path)).status_code == 200
            assert (await get("/health")).json() == {"status": "ok"}, path
            assert (await get("/moody/around")).status_code == 200


async def test_health_fails_when_all_requests_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """And every failure is counted, also one before the request was complete."""
    engine = ScriptedEngine()
    async with serving(engine) as server:
        chats = server.context.chat_processor
        with monkeypatch.context() as patched:

            async def fails(*_: Any, **__: Any) -> Any:
                raise KeyError("oh")

            patched.setattr(type(chats), "prepare", fails)
            for _ in range(NUM_REQUESTS):
                assert (await server.chat()).status_code == 500
        assert server.context.metrics.finished["error"] == NUM_REQUESTS
        for path in ("/health", "/ready"):
            response = await server.client.get(path)
            assert response.status_code == 503
            assert response.json()["error"]["code"] == "requests_fail"
        assert (await server.chat(temperature=-3)).status_code == 400
        assert (await server.client.get("/health")).status_code == 503, "the client's mistake"
        assert (await server.chat()).status_code == 200
        assert (await server.client.get("/health")).json() == {"status": "ok"}


def test_many_failures_are_a_handful_of_lines(capsys: pytest.CaptureFixture[str]) -> None:
    handler, log = StormHandler(), logging.Logger("acme")
    log.addHandler(handler)
    for number in range(217):
        try:
            raise KeyError(number)
        except KeyError as error:
            log.error("request %d failed", number, exc_info=error)
    handler.close()
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) < 15 and sum("Traceback" in line for line in lines) == 1
