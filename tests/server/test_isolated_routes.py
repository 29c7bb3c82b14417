"""``--isolate server:KEY``: routes in a process of their own, which may hang, crash and lie there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import pytest
from routes_plugin import HEADER, PLUGIN
from scripted import ScriptedEngine
from serving import Server, serving, until

from treadle.config import PluginConfig
from treadle.errors import ConfigError, PluginLoadError
from treadle.plugins import PluginManager
from treadle_server.isolation import route_connection, route_process
from treadle_server.isolation.route_app import build
from treadle_server.isolation.route_engine import Engine, Refusing
from treadle_server.isolation.route_wire import Start
from treadle_server.isolation.routes import MAX_FAILURES, RETRY_SECONDS
from treadle_server.reload import reload

pytestmark = pytest.mark.own_python


def write(folder: Path, source: str) -> Path:
    path = folder / f"mine_{uuid4().hex}.py"  # a module of this test's own
    path.write_text(source)
    return path


def manager(path: Path, *isolate: str, **options: Any) -> PluginManager:
    names = list(isolate or ["server:mine"])
    return PluginManager(PluginConfig(plugin_file=[str(path)], isolate=names, **options))


@asynccontextmanager
async def isolated(
    folder: Path, source: str = PLUGIN, engine: ScriptedEngine | None = None, **options: Any
) -> AsyncIterator[Server]:
    engine = engine or ScriptedEngine()
    engine.plugins = manager(write(folder, source), **options.pop("plugins", {}))
    async with serving(engine, **options) as server:
        yield server


def isolated_routes(server: Server) -> Any:
    plugin: Any = server.context.engine.plugins.load("server", "mine")
    (found,) = plugin.parts
    return found


async def test_routes_answer_as_if_they_were_here(tmp_path: Path) -> None:
    name = "server:mine"
    options = {"plugin_options": {name: {"greeting": "hi"}}}
    async with isolated(tmp_path, plugins=options, api_key=["k"]) as server:
        get, key = server.client.get, {"authorization": "Bearer k"}
        answer = await get("/mine")  # public: it needs no key
        greeting, pid, opened = answer.text.split()
        assert (answer.status_code, greeting, opened) == (200, "hi", "True")
        assert answer.headers["x-mine"] == "1" and answer.headers["x-request-id"]
        assert int(pid) == isolated_routes(server).pid
        assert (await get("/mine/files/a")).status_code == 401
        found = await get("/mine/files/a%20b?q=1", headers=key)
        assert found.json() == {"name": "a b", "query": "1", "key": None, "model": "scripted"}
        assert (await server.post("/mine/body", {"a": 1}, headers=key)).json() == {"a": 2}
        assert (await get("/mine/tokens", headers=key)).json() == [97, 98, 1000]
        assert (await get("/mine/threads", headers=key)).text == "hi"
        assert (await get("/mine/body", headers=key)).status_code == 405
        refused = await server.post("/mine/body", {"a": "b"}, headers=key)
        assert refused.status_code == 400 and refused.json()["error"]["type"]
        metrics = (await get("/metrics", headers=key)).text
        assert (
            'route="/mine/files/{name}",' in metrics or 'route="/mine/files/{name:str}"' in metrics
        )
        document = (await get("/openapi.json", headers=key)).json()
        assert "post" in document["paths"]["/mine/body"]
        listed = (await get("/plugins", headers=key)).json()["data"]
        (row,) = [row for row in listed if row["id"] == name]
        assert row["state"] == "loaded" and row["note"].endswith("; isolated")


async def test_a_body_that_is_too_large_does_not_reach_the_process(tmp_path: Path) -> None:
    async with isolated(tmp_path, max_body_bytes=1024) as server:
        assert (await server.post("/mine/body", b"1" * 1025)).status_code == 413


async def test_the_engine_generates_through_the_server(tmp_path: Path) -> None:
    async with isolated(tmp_path) as server:
        assert (await server.client.get("/mine/generate")).text == "Hello world"
        refused = await server.client.get("/mine/prompt")
        assert refused.status_code == 400
        assert "which is not a token id" in refused.json()["error"]["message"]


async def test_a_client_that_leaves_aborts_what_is_generated(tmp_path: Path) -> None:
    engine, more = ScriptedEngine(), asyncio.Event()
    steps = 0

    async def hold(step: int) -> None:
        nonlocal steps
        steps += 1
        if steps > 1:
            await more.wait()

    engine.hold = hold
    async with isolated(tmp_path, engine=engine) as server:
        async with server.client.stream("GET", "/mine/generate") as answer:
            async for _ in answer.aiter_bytes():
                break
        await until(lambda: engine.aborted == 1)
        assert engine.running == 0


async def test_an_answer_waits_for_a_client_that_does_not_read(tmp_path: Path) -> None:
    async with isolated(tmp_path) as server:
        begun, more = asyncio.Event(), asyncio.Event()

        async def receive() -> Any:
            await asyncio.Event().wait()

        async def send(message: Any) -> None:
            begun.set()
            await more.wait()

        scope = {"type": "http", "method": "GET", "path": "/mine/large", "headers": []}
        found = isolated_routes(server)
        work = asyncio.create_task(found.respond(b"", scope, receive, send))
        await begun.wait()
        left = int((await server.client.get("/mine/left")).text)
        for _ in range(20):
            left = int((await server.client.get("/mine/left")).text)
        assert left <= 10, "the process goes on while nobody reads"
        more.set()
        await work
        whole = await server.client.get("/mine/large")
        assert len(whole.content) == 64 * 65536


FAULTS = [
    ("raise", 500, "server:mine failed on this request"),
    ("sys.exit", 500, "server:mine failed on this request"),
    ("memory", 500, "server:mine failed on this request"),
    ("header", 500, "server:mine failed on this request"),
    ("context", 500, "server:mine failed on this request"),
    ("plugins", 500, "server:mine failed on this request"),
    ("missing", 404, "no such"),
    ("request", 400, "a is 1; at most 0 is allowed"),
    ("exit", 503, "it exited with status 3"),
    ("segfault", 503, "it was killed by SIGSEGV"),
    ("hang", 503, "its event loop has stood still"),
    ("wait", 504, "has not begun to answer"),
]


async def test_a_fault_costs_its_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(route_connection, "TICK_SECONDS", 0.05)
    monkeypatch.setattr(route_connection, "HANG_SECONDS", 1.0)
    async with isolated(tmp_path) as server:
        for fault, status, words in FAULTS:
            limit = 0.3 if fault == "wait" else 30.0
            monkeypatch.setattr(route_connection, "ANSWER_SECONDS", limit)
            answer = await server.client.get(f"/mine/fault/{fault}")
            assert answer.status_code == status, (fault, answer.text)
            error = answer.json()["error"]
            assert words in error["message"], (fault, error)
            if status >= 500:
                assert error["message"].startswith("server:mine")
                assert "server:mine" in caplog.text
            monkeypatch.setattr(route_connection, "ANSWER_SECONDS", 30.0)
            assert (await server.client.get("/mine")).status_code == 200, fault
            assert (await server.complete()).status_code == 200, fault
        assert "ValueError: boom (mine_" in caplog.text
        assert "observers of the server's context is not there" in caplog.text
        assert (await server.client.get("/health")).json()["status"] == "ok"


async def test_requests_beside_a_fault(tmp_path: Path) -> None:
    """They share the process: those whose answer has begun are cut off, others are told."""
    engine, more = ScriptedEngine(), asyncio.Event()

    async def hold(step: int) -> None:
        await more.wait()

    engine.hold = hold
    async with isolated(tmp_path, engine=engine) as server:
        work = asyncio.create_task(server.client.get("/mine/generate"))
        await until(lambda: engine.running == 1)
        assert (await server.client.get("/mine/fault/exit")).status_code == 503
        with pytest.raises(httpx.RemoteProtocolError):
            await work
        await until(lambda: engine.running == 0)
        assert engine.aborted == 1


async def test_a_process_that_is_lost_again_and_again_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with isolated(tmp_path) as server:
        get, found = server.client.get, isolated_routes(server)
        for _ in range(MAX_FAILURES):
            assert (await get("/mine/fault/exit")).status_code == 503
            await until(lambda: found._connection.lost)
        await until(lambda: found.refusal)
        refused = await get("/mine")
        assert refused.status_code == 503 and refused.headers["retry-after"]
        assert "was lost 4 times in a row; it is tried again in" in refused.text
        assert (await get("/health")).json() == {"status": "degraded", "plugins": ["server:mine"]}
        listed = (await get("/plugins")).json()["data"]
        (row,) = [row for row in listed if row["id"] == "server:mine"]
        assert row["state"] == "broken" and "lost 4 times in a row" in row["note"]
        assert (await server.complete()).status_code == 200

        now = found._clock() + RETRY_SECONDS
        monkeypatch.setattr(found, "_clock", lambda: now)  # half open: one request is tried
        assert (await get("/mine/fault/exit")).status_code == 503
        await until(lambda: found.refusal)
        assert "was lost 5 times in a row" in (await get("/mine")).text
        now += RETRY_SECONDS
        assert (await get("/mine")).status_code == 200
        await until(lambda: not found.refusal)
        assert (await get("/mine")).status_code == 200


async def test_a_process_ends_with_its_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = tmp_path / "closed"
    monkeypatch.setenv("MINE_CLOSED", str(closed))
    async with isolated(tmp_path) as server:
        process = isolated_routes(server)._connection.process
    assert process._child.poll() is not None
    assert closed.read_text() == "closed", "what the plugin opened was not closed"


EDITS = {
    "app.middleware": "app.middleware.append(lambda app: app)",
    "app.guards": "app.guards.append(lambda *_: None)",
    "app.exception_handlers": "app.exception_handlers[ValueError] = print",
    "app.before_request": "app.before_request = print",
    "app.cors_config": "from litestar.config.cors import CORSConfig; app.cors_config = CORSConfig()",
    "app.after_exception": "app.after_exception.append(print)",
    "app.response_headers": "from litestar.datastructures import ResponseHeader as R; app.response_headers.append(R('a', 'b'))",
    "observers of the server's context": "app.state.context.observers.append(print)",
    "config of the server's context": "app.state.context.config",
    "plugins of the engine": "engine.plugins",
    "set_error_form": "from treadle_server.surfaces import set_error_form; set_error_form(app, '/mine', print)",
    "names of metrics": "app.state.metric_names.append(1)",
    "has no websockets": "from litestar import websocket, WebSocket\n    @websocket('/w')\n    async def w(socket: WebSocket) -> None: ...\n    app.route_handlers.append(w)",
    "ZeroDivisionError: division by zero": "1 / 0",
    "SystemExit: 3": "sys.exit(3)",
    "exited with status 4": "os._exit(4)",
    "was killed by SIGSEGV": "ctypes.string_at(0)",
    "takes more than 2 s to be started": "time.sleep(100)",
    "ValueError: later": "from contextlib import asynccontextmanager\n    @asynccontextmanager\n    async def life(app):\n        raise ValueError('later')\n        yield\n    app.lifespan.append(life)",
}


IN_A_PROCESS = (
    "ValueError: later",
    "exited with status 4",
    "killed by SIGSEGV",
    "SystemExit: 3",
    "2 s to be started",
)


@pytest.mark.parametrize("words", [w for w in EDITS if not w.endswith(IN_A_PROCESS)])
def test_what_cannot_be_isolated_is_refused(tmp_path: Path, words: str) -> None:
    source = f"{HEADER}\n@impl\ndef treadle_server(app, engine):\n    {EDITS[words]}\n"
    plugins = PluginManager(PluginConfig(plugin_file=[str(write(tmp_path, source))]))
    hook: Any = plugins.hooks_for("server", "mine")
    start = Start({}, ["a-model"], ScriptedEngine().info, 1)
    engine: Any = Engine(Refusing("the link"), start)
    arguments: dict[str, Any] = {"engine": engine, "options": {}}
    with pytest.raises(PluginLoadError, match="server:mine") as error:
        build(engine, start, "server:mine", lambda app: hook.treadle_server(app=app, **arguments))
    assert words in str(error.value)


@pytest.mark.parametrize("words", [w for w in EDITS if w.endswith(IN_A_PROCESS)])
async def test_a_hook_that_fails_ends_the_start(
    tmp_path: Path, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = f"{HEADER}\n@impl\ndef treadle_server(app, engine):\n    {EDITS[words]}\n"
    if "more than" in words:
        monkeypatch.setattr(route_process, "START_SECONDS", 2.0)
    with pytest.raises(PluginLoadError, match="server:mine") as error:
        async with isolated(tmp_path, source):
            pass
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("statement", "words"),
    [
        ("raise ValueError('boom')", "ValueError: boom"),
        ("sys.exit(3)", "SystemExit: 3"),
        ("ctypes.string_at(0)", "was killed by SIGSEGV"),
        ("time.sleep(100)", "takes more than 2 s to be imported"),
    ],
)
async def test_an_import_that_fails_costs_the_plugin(
    tmp_path: Path,
    statement: str,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    if "more than" in words:
        monkeypatch.setattr(route_process, "START_SECONDS", 2.0)
    async with isolated(tmp_path, f"{HEADER}\n{statement}\n") as server:
        assert (await server.complete()).status_code == 200
    assert words in caplog.text and "goes on without it" in caplog.text


async def test_wrong_options_and_routes_of_others(tmp_path: Path) -> None:
    options = {"plugin_options": {"server:mine": {"greting": "a"}}}
    with pytest.raises(ConfigError, match=r"has no option 'greting'.*did you mean 'greeting'"):
        async with isolated(tmp_path, plugins=options):
            pass
    taken = "@get('/v1/models')\n    async def models() -> str: ...\n    app.route_handlers.append(models)"
    source = (
        f"{HEADER}\n@impl\ndef treadle_server(app):\n    from litestar import get\n    {taken}\n"
    )
    with pytest.raises(PluginLoadError, match=r"server:mine.*already registered.*'/v1/models'"):
        async with isolated(tmp_path, source):
            pass


@pytest.mark.parametrize("edit", ["message", "number", "flood"])
async def test_a_process_that_lies(
    tmp_path: Path, edit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever it sends costs its own requests."""
    link = "import gc; from treadle_server.isolation.route_child import ServerLink; "
    link += "link = [o for o in gc.get_objects() if isinstance(o, ServerLink)][0]; "
    lies = {
        "message": "link._sock.sendall(b'\\x03\\0\\0\\0abc')",
        "number": "from treadle_server.isolation.route_wire import PluginLoaded; link.send(PluginLoaded())",
        "flood": "from treadle_server.isolation.route_wire import Piece; "
        "[link.send(Piece(n, b'x' * 2**20)) for n in range(9)]",
    }
    source = PLUGIN.replace('raise ValueError("boom")', f"{link}{lies[edit]}; time.sleep(100)")
    async with isolated(tmp_path, source) as server:
        answer = await server.client.get("/mine/fault/raise")
        assert answer.status_code == 503
        assert "it sent what is not a message" in answer.text
        assert (await server.client.get("/mine")).status_code == 200


def test_what_real_plugins_do() -> None:
    """Those of treadle: a page works, another API and a tracer say what they need."""
    engine = ScriptedEngine()

    async def main(key: str, **options: Any) -> httpx.Response:
        config = PluginConfig(isolate=[f"server:{key}"], plugin_options=options)
        engine.plugins = PluginManager(config)
        async with serving(engine) as server:
            return await server.client.get("/ui")

    page = asyncio.run(main("web_ui"))
    assert page.status_code == 200 and "<html" in page.text and page.headers["etag"]
    with pytest.raises(PluginLoadError, match="config of the server's context is not there"):
        asyncio.run(main("ollama"))
    endpoint = {"endpoint": "http://127.0.0.1:9"}
    with pytest.raises(PluginLoadError, match="server:opentelemetry"):
        asyncio.run(main("opentelemetry", **{"server:opentelemetry": endpoint}))


def test_a_module_with_a_parser_and_routes(tmp_path: Path) -> None:
    """Both are isolated, in processes of their own, whichever is loaded first."""
    source = PLUGIN.replace('"server": ["mine"]', '"server": ["mine"], "tool_parsers": ["mine"]')
    source += """
@impl
def treadle_tool_parser(name, tokenizer, tools):
    raise RequestError("a parser")
"""

    async def main(isolate: str) -> None:
        engine = ScriptedEngine()
        engine.plugins = manager(write(tmp_path, source), isolate)
        engine.plugins.load("tool_parsers", "mine")
        async with serving(engine) as server:
            assert (await server.client.get("/mine")).text.startswith("hello ")
        process: Any = engine.plugins.load("tool_parsers", "mine")
        for part in process.processes.values():
            part.close()

    asyncio.run(main("tool_parsers:mine"))
    asyncio.run(main("server:mine"))


async def test_a_reload_starts_another_process(tmp_path: Path) -> None:
    """The old one ends with the application that it was a part of; a version that fails changes nothing."""
    async with isolated(tmp_path) as server:
        get, path = server.client.get, next(tmp_path.glob("mine_*.py"))
        old = isolated_routes(server)._connection.process
        path.write_text(f"{HEADER}\nraise ValueError('boom')\n")
        with pytest.raises(PluginLoadError, match="boom"):
            await reload(server.context, "server:mine")
        assert (await get("/mine")).text.startswith("hello ")
        path.write_text(PLUGIN.replace('greeting: str = "hello"', 'greeting: str = "again"'))
        await reload(server.context, "server:mine")
        answer = (await get("/mine")).text.split()
        assert answer[0] == "again" and int(answer[1]) == isolated_routes(server).pid != old.pid
        await until(lambda: old._child.poll() is not None)
