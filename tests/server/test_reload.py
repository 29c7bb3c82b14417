"""``POST /plugins/ID/reload``: new code for new requests, and nobody notices the exchange."""

from __future__ import annotations

import asyncio
import shutil
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from scripted import ScriptedEngine
from serving import Server, events, serving, until

from treadle.config import PluginConfig
from treadle.plugins import PluginManager
from treadle.processes.watchdog import MAX_STUCK_THREADS
from treadle_server import reload as reloading

ADMIN = {"authorization": "Bearer boss"}
ID = "tool_parsers:acme"
TOOLS = [{"type": "function", "function": {"name": "f"}}]

PARSER = """
from treadle.api.hookspecs import impl
from treadle.api.parsers import TextDelta

class Parser:
    def feed(self, text, ids):
        return [TextDelta(text)]

    def finish(self):
        return [TextDelta(" SAYS")]

@impl
def treadle_tool_parser(name):
    return Parser()
"""
ROUTE = """
from contextlib import asynccontextmanager
from treadle.api.hookspecs import impl

@impl
def treadle_server(app, engine):
    from litestar import get

    @asynccontextmanager
    async def life(_):
        engine.log.append("SAYS starts")
        yield
        engine.log.append("SAYS ends")

    @get("/acme")
    async def acme() -> str:
        await engine.go.wait()
        return "SAYS"

    app.route_handlers.append(acme)
    app.lifespan.append(life)
"""
POINTS = "[treadle.tool_parsers]\nacme = acme_parser\n"


class Acme:
    """A distribution as pip leaves it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.version = ""

    def install(self, version: str, points: str = POINTS, **modules: str) -> None:
        for old in self.folder.iterdir():
            shutil.rmtree(old) if old.is_dir() else old.unlink()
        info = self.folder / f"acme-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: acme\nVersion: {version}\nRequires-Dist: treadle-core\n"
        )
        (info / "entry_points.txt").write_text(points)
        for name, source in modules.items():
            (self.folder / f"{name}.py").write_text(source.replace("SAYS", version))


@pytest.fixture
def acme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Acme]:
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    package = Acme(folder)
    package.install("1.0", acme_parser=PARSER)
    yield package
    for name in [m for m in sys.modules if m.startswith("acme_")]:
        del sys.modules[name]


class Held(ScriptedEngine):
    """An engine that waits before the last piece of an answer, until it is let go.

    What a plugin has to say goes into ``log``.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.log: list[str] = []
        self.go = asyncio.Event()
        self.go.set()

    async def generate(self, *arguments: Any, **options: Any) -> AsyncIterator[Any]:  # type: ignore[override]
        async for output in super().generate(*arguments, **options):
            if output.finished:
                await self.go.wait()
            yield output


def serving_parser(engine: ScriptedEngine | None = None, **options: Any) -> Any:
    options = {"tool_call_parser": "acme", "admin_api_key": ["boss"], **options}
    return serving(engine or Held(), **options)


async def reload(server: Server, id: str = ID, **headers: str) -> httpx.Response:
    return await server.client.post(f"/plugins/{id}/reload", headers=headers or ADMIN)


async def chat_text(server: Server, **fields: Any) -> str:
    answer = await server.chat(tools=TOOLS, **fields)
    if not fields:
        return str(answer.json()["choices"][0]["message"]["content"])
    chunks = events(answer.text)[:-1]
    return "".join(c["choices"][0]["delta"].get("content", "") for c in chunks)


async def plugin_row(server: Server, id: str = ID) -> Any:
    rows = (await server.client.get("/plugins")).json()["data"]
    return next(row for row in rows if row["id"] == id)


@pytest.mark.parametrize("fields", [{}, {"stream": True}])
async def test_who_has_begun_keeps_the_old_parser(fields: dict[str, Any], acme: Acme) -> None:
    engine = Held()
    async with serving_parser(engine) as server:
        assert (await plugin_row(server))["version"] == "1.0"
        before = (await server.client.get("/plugins")).json()["system_fingerprint"]
        engine.go.clear()
        running = asyncio.create_task(chat_text(server, **fields))
        await until(lambda: engine.running == 1)
        acme.install("2.0", acme_parser=PARSER + "# longer\n")
        answer = await reload(server)
        late = asyncio.create_task(chat_text(server, **fields))
        await until(lambda: engine.running == 2)
        engine.go.set()
        assert (await running, await late) == ("Hello world 1.0", "Hello world 2.0")
        details = await plugin_row(server)
        after = (await server.client.get("/plugins")).json()["system_fingerprint"]
    assert answer.status_code == 200, answer.text
    assert answer.json() == {
        "id": ID,
        "distribution": "acme",
        "version": "2.0",
        "previous_version": "1.0",
        "plugins": [ID],
    }
    assert (details["version"], details["state"]) == ("2.0", "loaded")
    assert before != after


async def test_a_distribution_is_exchanged_as_a_whole(acme: Acme) -> None:
    points = f"{POINTS}\n[treadle.reasoning_parsers]\nacme = acme_thoughts\n"
    thoughts = PARSER.replace("treadle_tool_parser", "treadle_reasoning_parser")
    acme.install("1.0", points, acme_parser=PARSER, acme_thoughts=thoughts)
    async with serving_parser(reasoning_parser="acme") as server:
        assert await chat_text(server) == "Hello world 1.0 1.0"
        broken = thoughts.replace("[TextDelta(text)]", "[text]")
        acme.install("2.0", points, acme_parser=PARSER, acme_thoughts=broken)
        answer = await reload(server)
        assert answer.status_code == 422 and "a delta that can be sent was expected" in answer.text
        assert await chat_text(server) == "Hello world 1.0 1.0"
        acme.install("3.0", points, acme_parser=PARSER, acme_thoughts=thoughts + "# longer\n")
        answer = await reload(server, "reasoning_parsers:acme")
        assert answer.json()["plugins"] == ["reasoning_parsers:acme", ID]
        assert await chat_text(server) == "Hello world 3.0 3.0"


BROKEN = {
    "import": (PARSER + "1 / 0\n", "import: ZeroDivisionError"),
    "signature": (PARSER.replace("(name)", "(nme)"), "signature: "),
    "build": (PARSER.replace("return Parser()", "raise KeyError('x')"), "KeyError: 'x'"),
    "nothing": (PARSER.replace("return Parser()", "return None"), "returned None"),
    "use": (PARSER.replace("return [TextDelta(text)]", "return text[100]"), "IndexError"),
    "panic": (
        PARSER.replace("[TextDelta(text)]", "(_ for _ in ()).throw(GeneratorExit)"),
        "cannot be used",
    ),
    "exit": (PARSER.replace("return Parser()", "raise SystemExit(3)"), "SystemExit: 3"),
    "half a delta": (
        PARSER.replace("[TextDelta(text)]", "[TextDelta(None)]"),
        "a delta that can be sent was expected",
    ),
    "deltas": (
        PARSER.replace("[TextDelta(text)]", "[text]"),
        "a delta that can be sent was expected",
    ),
}


@pytest.mark.fault("tool_parsers", "hook", "feed")
@pytest.mark.parametrize("case", BROKEN)
async def test_broken_code_changes_nothing(
    case: str, acme: Acme, caplog: pytest.LogCaptureFixture
) -> None:
    source, words = BROKEN[case]
    async with serving_parser() as server:
        assert await chat_text(server) == "Hello world 1.0"
        module = sys.modules["acme_parser"]
        acme.install("2.0", acme_parser=source)
        answer = await reload(server)
        assert await chat_text(server) == "Hello world 1.0"
        details = await plugin_row(server)
        assert sys.modules["acme_parser"] is module
        acme.install("2.1", acme_parser=PARSER + "# whole again\n")
        assert (await reload(server)).status_code == 200
        assert await chat_text(server) == "Hello world 2.1"
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (422, "plugin_broken", "id")
    assert words in error["message"] and "1.0 stays" in error["message"]
    assert (details["version"], details["state"]) == ("1.0", "loaded")
    assert f"{ID} was not reloaded" in caplog.text


async def test_code_that_hangs_is_given_up(acme: Acme, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reloading, "RELOAD_TIMEOUT", 1.0)
    hanging = PARSER.replace(
        "    return Parser()", "    import threading\n    threading.Event().wait()"
    )
    async with serving_parser() as server:
        assert await chat_text(server) == "Hello world 1.0"
        acme.install("2.0", acme_parser=hanging)
        answer = await reload(server)
        assert answer.status_code == 422 and "hangs" in answer.text
        assert await chat_text(server) == "Hello world 1.0"
        monkeypatch.setattr(reloading, "RELOAD_TIMEOUT", 60.0)
        acme.install("3.0", acme_parser=PARSER + "# whole again\n")
        assert (await reload(server)).status_code == 200
        assert await chat_text(server) == "Hello world 3.0"


async def test_a_parser_that_hangs_is_repaired(acme: Acme) -> None:
    """Its threads never come back; the new parser gets others."""
    wait = "__import__('threading').Event().wait()"
    acme.install("1.0", acme_parser=PARSER.replace("[TextDelta(text)]", wait))
    budgets = {"tool_parsers": 0.02, "reasoning_parsers": 0.02}
    engine = Held(plugins=PluginManager(PluginConfig(plugin_time_budget=budgets)))
    async with serving_parser(engine) as server:
        assert {await chat_text(server) for _ in range(MAX_STUCK_THREADS + 1)} == {"Hello world"}
        threads = server.context.engine.parser_watchdog["tool_parsers:acme"]
        assert threads.num_stuck == MAX_STUCK_THREADS
        acme.install("2.0", acme_parser=PARSER)
        assert (await reload(server)).status_code == 200
        assert await chat_text(server) == "Hello world 2.0"


REFUSED = [
    ("tool_parsers:nobody", 404, "plugin_not_found"),
    ("nonsense", 404, "plugin_not_found"),
    ("scheduling_policies:fcfs", 409, "plugin_not_reloadable"),
    ("renderers:jinja", 409, "plugin_not_reloadable"),
    ("server:plugins", 409, "plugin_not_reloadable"),
]


async def test_what_cannot_be_reloaded_says_why(acme: Acme) -> None:
    async with serving_parser() as server:
        for id, status, code in REFUSED:
            answer = await reload(server, id)
            assert (answer.status_code, answer.json()["error"]["code"]) == (status, code), id
            if status == 409:
                assert "restart the server" in answer.json()["error"]["message"]


async def test_only_an_administrator_reloads(acme: Acme) -> None:
    acme.install("2.0", acme_parser=PARSER)
    closed: list[tuple[dict[str, Any], dict[str, str], int, str]] = [
        ({"admin_api_key": []}, {"authorization": "Bearer boss"}, 403, "admin_disabled"),
        ({}, {"x-other": ""}, 401, "invalid_api_key"),
        ({}, {"authorization": "Bearer bos"}, 401, "invalid_api_key"),
        ({"api_key": ["k"]}, {"authorization": "Bearer wrong"}, 401, "invalid_api_key"),
        ({"api_key": ["k"]}, {"authorization": "Bearer k"}, 403, "admin_key_required"),
    ]
    for options, headers, status, code in closed:
        async with serving_parser(**options) as server:
            answer = await reload(server, **headers)
            assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
            assert "--admin-api-key" in answer.text or "API key" in answer.text
    async with serving_parser(api_key=["k"]) as server:
        for headers in (ADMIN, {"x-api-key": "boss"}):
            assert (await reload(server, **headers)).status_code == 200
        assert (await server.client.get("/v1/models", headers=ADMIN)).status_code == 200
    async with serving_parser() as server:  # without keys of clients, the key locks nothing else
        assert (await server.client.get("/v1/models")).status_code == 200


async def test_reloads_wait_for_each_other(acme: Acme) -> None:
    async with serving_parser() as server:
        acme.install("2.0", acme_parser=PARSER + "# longer\n")
        answers = await asyncio.gather(*(reload(server) for _ in range(3)))
        assert await chat_text(server) == "Hello world 2.0"
    befores = sorted(answer.json()["previous_version"] for answer in answers)
    assert befores == ["1.0", "2.0", "2.0"]


BOTH = f"{POINTS}\n[treadle.server]\nacme = acme_route\n"


async def test_routes_are_exchanged_with_their_lifespan(acme: Acme) -> None:
    acme.install("1.0", BOTH, acme_parser=PARSER, acme_route=ROUTE)
    engine = Held()
    async with serving_parser(engine) as server:
        assert await chat_text(server) == "Hello world 1.0"
        engine.go.clear()
        running = asyncio.create_task(server.client.get("/acme"))
        await until(lambda: server.context.metrics.active)
        acme.install("2.0", BOTH, acme_parser=PARSER + "#\n", acme_route=ROUTE + "#\n")
        answer = await reload(server, "server:acme")
        assert answer.json()["plugins"] == ["server:acme", ID], answer.text
        assert engine.log == ["1.0 starts", "2.0 starts"], "the old one still answers"
        engine.go.set()
        assert (await running).text == "1.0"
        await until(lambda: engine.log[2:] == ["1.0 ends"])
        assert (await server.client.get("/acme")).text == "2.0"
        assert await chat_text(server) == "Hello world 2.0"

        for source, words in (
            (ROUTE.replace("/acme", "/health"), "/health"),
            (
                ROUTE.replace("    from litestar", "    1 / 0\n    from litestar"),
                "ZeroDivisionError",
            ),
            (ROUTE.replace('engine.log.append("SAYS starts")', "1 / 0"), "ZeroDivisionError"),
        ):
            acme.install("3.0", BOTH, acme_parser=PARSER, acme_route=source)
            answer = await reload(server, "server:acme")
            assert answer.status_code == 422 and words in answer.text, answer.text
            assert (await server.client.get("/acme")).text == "2.0"
            assert await chat_text(server) == "Hello world 2.0"
    assert engine.log[3:] == ["2.0 ends"]


@pytest.mark.fault("server", "hook", "lifespan")
async def test_a_startup_that_hangs_is_given_up(
    acme: Acme, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reloading, "STARTUP_TIMEOUT", 0.2)
    acme.install("1.0", BOTH, acme_parser=PARSER, acme_route=ROUTE)
    engine = Held()
    async with serving_parser(engine) as server:
        waits = (
            'engine.log.append("SAYS starts")\n        await __import__("asyncio").Event().wait()'
        )
        hanging = ROUTE.replace('engine.log.append("SAYS starts")', waits)
        acme.install("2.0", BOTH, acme_parser=PARSER + "#\n", acme_route=hanging)
        answer = await reload(server, "server:acme")
        assert answer.status_code == 422 and "startup hooks take more than 0.2 s" in answer.text
        assert (await server.client.get("/acme")).text == "1.0"
        assert (await plugin_row(server, "server:acme"))["version"] == "1.0"
    assert engine.log == ["1.0 starts", "2.0 starts", "1.0 ends"]
