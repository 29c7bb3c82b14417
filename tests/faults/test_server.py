"""Server plugins that fail: in the hook, in routes, in what is around them, and in lifespans."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest
from faulty import errors, failing_plugins, plugins_of
from scripted import ScriptedEngine
from serving import events, serving, until

from treadle.errors import PluginLoadError
from treadle_server import lifecycle

ROUTES = '''
from typing import Any
from treadle.api import impl

TREADLE = {"server": ["faulty"]}


class Panic(BaseException):
    """Like a panic of a Rust library."""


@impl
def treadle_server(app, engine):
    import asyncio
    from contextlib import asynccontextmanager
    from litestar import Request, Response, asgi, get
    from litestar.background_tasks import BackgroundTask
    from litestar.events import listener
    from litestar.exceptions import HTTPException
    from litestar.response import Stream

    async def fail(error: BaseException) -> None:
        raise error

    async def half() -> Any:
        yield b"half"
        raise ValueError("/secret")

    @get("/raise/{what:str}")
    async def raises(request: Request) -> None:
        kinds = {"error": ValueError, "panic": Panic, "exit": SystemExit,
                 "cancel": asyncio.CancelledError, "group": ExceptionGroup}
        what = request.path_params["what"]
        await fail(kinds[what](*(("/secret", [ValueError("/secret")])[:1 + (what == "group")])))

    @get("/thread", sync_to_thread=True)
    def thread() -> None:
        raise SystemExit("/secret")

    @get("/type")
    async def wrong() -> int:
        return object()

    @get("/answer")
    async def answer() -> Response[Any]:
        return Response({"x": object()})

    @get("/half")
    async def cut() -> Stream:
        return Stream(half())

    @asgi("/nothing", copy_scope=True)
    async def nothing(scope: Any, receive: Any, send: Any) -> None:
        pass

    @asgi("/begun", copy_scope=True)
    async def begun(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})

    @asgi("/garbage", copy_scope=True)
    async def garbage(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "nonsense"})

    @asgi("/no-status", copy_scope=True)
    async def no_status(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start"})

    @get("/tea")
    async def tea() -> None:
        raise HTTPException(status_code=418, detail="tea only")

    @listener("told")
    async def hears() -> None:
        raise ValueError("/secret in a listener")

    @get("/tells")
    async def tells(request: Request) -> Response[str]:
        request.app.emit("told")
        return Response("fine", background=BackgroundTask(fail, ValueError("/secret behind")))

    @asynccontextmanager
    async def life(_: Any) -> Any:
        yield
        engine.ended = True

    app.listeners.append(hears)
    app.lifespan.append(life)

    @get("/waits")
    async def waits() -> None:
        await asyncio.Event().wait()

    app.route_handlers += [
        raises, thread, wrong, answer, cut, nothing, begun, garbage, no_status, tea, tells, waits
    ]
'''
ANSWERED = [
    *("/raise/error", "/raise/panic", "/raise/exit", "/raise/cancel", "/raise/group"),
    *("/thread", "/type", "/answer", "/nothing", "/garbage", "/no-status"),
]


def check(answer: httpx.Response) -> None:
    """An error object that names the plugin and nothing of its own."""
    assert answer.status_code == 500 and answer.headers["content-type"] == "application/json"
    error = answer.json()["error"]
    assert error["code"] == "plugin_failed" and error["type"] == "server_error"
    assert error["message"].startswith("server:faulty failed on this request")
    assert "secret" not in answer.text and "Traceback" not in answer.text


@pytest.mark.fault("server", "route")
async def test_a_route_that_fails_costs_its_request(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = ScriptedEngine(["a"] * 50, pause=0.01, plugins=plugins_of(tmp_path, ROUTES))
    async with serving(engine) as server:
        running = asyncio.create_task(server.chat(stream=True))
        await until(lambda: engine.running)
        for path in ANSWERED:
            check(await server.client.get(path))
        for path in ("/half", "/begun"):  # nobody may take it for the whole
            with pytest.raises(httpx.RemoteProtocolError):
                await server.client.get(path)
        tea = await server.client.get("/tea")
        page = (await server.client.get("/metrics")).text
        assert events((await running).text)[-1] == "[DONE]"
    assert (tea.status_code, tea.json()["error"]["message"]) == (418, "tea only")
    assert errors(page, "server:faulty") == {"request": len(ANSWERED) + 2}
    for words in (
        "failed in GET /raise/{what}: ValueError: /secret",
        "failed in GET /raise/{what}: Panic: /secret",
        "failed in GET /half: ValueError: /secret",
        "failed in GET /nothing: RuntimeError: its answer has no end",
    ):
        assert words in caplog.text
    assert "Exception in ASGI application" not in caplog.text


@pytest.mark.fault("server", "listeners", "background")
async def test_what_a_route_leaves_behind_harms_no_answer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine: Any = ScriptedEngine(plugins=plugins_of(tmp_path, ROUTES))
    engine.ended = False
    async with serving(engine) as server:
        assert [(await server.client.get("/tells")).text for _ in range(2)] == ["fine"] * 2
        await until(lambda: "/secret in a listener" in caplog.text)
        assert (await server.chat()).status_code == 200
        page = (await server.client.get("/metrics")).text
        assert not engine.ended, "the lifespan goes on"
    assert errors(page, "server:faulty") == {"request": 2}
    assert "failed in GET /tells: ValueError: /secret behind" in caplog.text


@pytest.mark.fault("server", "route")
async def test_a_route_that_hangs_holds_up_nobody_and_not_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lifecycle, "STOP_GRACE_SECONDS", 0.2)
    engine = ScriptedEngine(plugins=plugins_of(tmp_path, ROUTES))
    async with serving(engine, drain_timeout=0.1) as server:
        waiting = asyncio.create_task(server.client.get("/waits"))
        await until(lambda: server.context.metrics.active)
        assert (await server.chat()).status_code == 200
        server.signals.take(signal.SIGTERM)
        answer = await waiting
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "server_stopped")
        await server.task


AROUND = """
from treadle.api import impl

TREADLE = {"server": ["faulty"]}


@impl
def treadle_server(app, options):
    from litestar import get

    @get("/fine")
    async def fine() -> str:
        return "fine"

    def fail(*_, **__):
        raise ValueError("/secret")

    async def fail_later(*_, **__):
        raise ValueError("/secret")

    class Middle:
        def __init__(self, app, **_):
            self.app = app

        async def __call__(self, scope, receive, send):
            sent = []

            async def twice(message):
                sent.append(message)
                if len(sent) > 3:
                    fail()
                await send(message)

            if options["failure"] == "middleware midway":
                await self.app(scope, receive, twice)
                return
            if options["failure"] == "middleware before":
                fail()
            await self.app(scope, receive, fail_later if options["failure"] == "middleware send" else send)
            if options["failure"] == "middleware after":
                fail()

    match options["failure"]:
        case "guards":
            app.guards.append(fail)
        case "before_request" | "after_request" | "after_response" as name:
            setattr(app, name, fail_later)
        case "before_send":
            app.before_send.append(fail_later)
        case "no answer":
            app.after_request = lambda _: None
        case "handlers":
            app.exception_handlers[500] = fail
            app.guards.append(fail)
        case _:
            app.middleware.append(Middle)
    app.route_handlers.append(fine)
"""


BEFORE = ["guards", "before_request", "after_request", "before_send", "handlers"]


@pytest.mark.fault("server", "guards", "middleware", "before_request", "after_request")
@pytest.mark.fault("server", "before_send", "exception_handlers")
@pytest.mark.parametrize("failure", [*BEFORE, "middleware before", "middleware send"])
async def test_what_is_around_the_routes_fails_the_requests_inside(
    failure: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = ScriptedEngine(plugins=failing_plugins(tmp_path, AROUND, failure))
    async with serving(engine) as server:
        for request in (server.client.get("/fine"), server.chat(), server.complete(stream=True)):
            check(await request)
        assert engine.running == 0
        assert server.context.metrics.active == 0
    assert "ValueError: /secret" in caplog.text and "server:faulty from" in caplog.text


@pytest.mark.fault("server", "middleware", "after_response")
@pytest.mark.parametrize("failure", ["after_response", "middleware after"])
async def test_what_fails_behind_an_answer_leaves_it(
    failure: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(
        ScriptedEngine(plugins=failing_plugins(tmp_path, AROUND, failure))
    ) as server:
        assert (await server.client.get("/fine")).text == "fine"
        assert (await server.chat()).status_code == 200
        assert events((await server.chat(stream=True)).text)[-1] == "[DONE]"
        page = (await server.client.get("/metrics")).text
    assert errors(page, "server:faulty") == {"request": 3}
    assert caplog.text.count("ValueError: /secret") >= 3


@pytest.mark.fault("server", "middleware")
async def test_a_stream_that_is_broken_midway_is_cut_and_stops_the_engine(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = ScriptedEngine(
        ["x"] * 1000, plugins=failing_plugins(tmp_path, AROUND, "middleware midway")
    )
    engine.pause = 0.001
    async with serving(engine) as server:
        with pytest.raises(httpx.RemoteProtocolError):
            await server.chat(stream=True)
        await until(lambda: engine.running == 0)
        assert engine.aborted == 1
        assert (await server.chat()).status_code == 200, "one message is no stream"
        page = (await server.client.get("/metrics")).text
    assert errors(page, "server:faulty") == {"request": 1}
    assert "server:faulty from" in caplog.text


async def test_an_answer_taken_away_is_an_error_of_ours(tmp_path: Path) -> None:
    """Litestar does not say who did it."""
    async with serving(
        ScriptedEngine(plugins=failing_plugins(tmp_path, AROUND, "no answer"))
    ) as server:
        check(await server.client.get("/fine"))
        answer = await server.chat()
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "internal_error")


async def test_an_error_of_treadle_is_no_failure_of_a_plugin_around_it(tmp_path: Path) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("/secret")

    engine = ScriptedEngine(plugins=failing_plugins(tmp_path, AROUND, "middleware"), before=fail)
    async with serving(engine) as server:
        answer = await server.chat()
        page = (await server.client.get("/metrics")).text
    assert answer.json()["error"]["code"] == "internal_error"
    assert errors(page, "server:faulty") == {}


HOOK = """
from treadle.api import impl

TREADLE = {"server": ["faulty"]}


@impl
def treadle_server(app, options):
    from litestar.datastructures import State

    match options["failure"]:
        case "raise":
            raise KeyError("oh")
        case "answer":
            return 5
        case "routes":
            app.route_handlers = None
        case "item":
            app.route_handlers.append("no handler")
        case "twice":
            app.route_handlers.append(app.route_handlers[0])
        case "state":
            app.state = State()
        case "strange":
            app.middleware = 5
"""


@pytest.mark.fault("server", "hook")
@pytest.mark.parametrize("failure", ["raise", "routes", "item", "twice", "state", "strange"])
async def test_an_application_that_cannot_be_built_ends_the_start(
    failure: str, tmp_path: Path
) -> None:
    with pytest.raises(PluginLoadError, match=r"server:faulty from faulty_\w+\.py"):
        async with serving(ScriptedEngine(plugins=failing_plugins(tmp_path, HOOK, failure))):
            pass


async def test_what_the_hook_returns_does_not_matter(tmp_path: Path) -> None:
    async with serving(ScriptedEngine(plugins=failing_plugins(tmp_path, HOOK, "answer"))) as server:
        assert (await server.chat()).status_code == 200


@pytest.mark.fault("server", "import")
async def test_a_plugin_that_cannot_be_imported_is_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = 'TREADLE = {"server": ["faulty"]}\nimport missing_module\n'
    async with serving(ScriptedEngine(plugins=plugins_of(tmp_path, source))) as server:
        assert (await server.chat()).status_code == 200
    assert "server:faulty" in caplog.text and "goes on without it" in caplog.text
    strict = plugins_of(tmp_path, source, plugin_strict=True)
    with pytest.raises(PluginLoadError, match="strict mode, and plugins are broken"):
        async with serving(ScriptedEngine(plugins=strict)):
            pass
