"""Server plugins that fail while the server starts and ends, and that keep it from ending."""

from __future__ import annotations

import asyncio
import logging
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest
from faulty import failing_plugins
from scripted import ScriptedEngine
from serving import Server, serving, until

from treadle.errors import PluginLoadError
from treadle_server import app_instance

LIFE = '''
from contextlib import asynccontextmanager
from treadle.api import impl

TREADLE = {"server": ["faulty"]}


class Panic(BaseException):
    """Like a panic of a Rust library."""


@impl
def treadle_server(app, engine, options):
    import asyncio

    async def fails(failure):
        engine.reached = True
        match options["failure"]:
            case end if end != failure and end.rstrip("!?.") != failure:
                return
            case wait if wait.endswith("?"):
                await asyncio.Event().wait()
            case panic if panic.endswith("!"):
                raise Panic("oh")
            case leave if leave.endswith("."):
                raise SystemExit(3)
            case _:
                raise KeyError("oh")

    @asynccontextmanager
    async def life(_):
        await fails("start")
        yield
        await fails("end")

    @asynccontextmanager
    async def never(_):
        return
        yield

    app.lifespan.append(never if options["failure"] == "never" else life)
'''


@pytest.mark.fault("server", "lifespan")
@pytest.mark.parametrize("failure", ["start", "start!", "start.", "never"])
async def test_a_startup_that_fails_ends_the_start_and_says_whose(
    failure: str, tmp_path: Path
) -> None:
    engine = ScriptedEngine(plugins=failing_plugins(tmp_path, LIFE, failure))
    async with serving(engine) as server:
        with pytest.raises(PluginLoadError, match=r"server:faulty from .*failed in its startup"):
            await server.task


@pytest.mark.fault("server", "lifespan")
async def test_a_startup_that_hangs_can_be_ended(tmp_path: Path) -> None:
    engine: Any = ScriptedEngine(plugins=failing_plugins(tmp_path, LIFE, "start?"))
    engine.reached = False
    starting = asyncio.create_task(_whole(engine))
    await until(lambda: engine.reached)
    engine.server.signals.take(signal.SIGTERM)
    await asyncio.wait_for(starting, 5)


async def _whole(engine: Any) -> None:
    from treadle_server.config import server_from_options
    from treadle_server.context import ServerContext
    from treadle_server.lifecycle import Lifecycle
    from treadle_server.listen import bind
    from treadle_server.signals import Signals

    config = server_from_options({"port": 0})
    bound, signals = bind(config), Signals()
    try:
        context = ServerContext(engine, config)
        engine.server = Server(Lifecycle(context, bound, signals), context, signals, 0)
        await engine.server.task
        await engine.server.client.aclose()
    finally:
        bound.close()


@pytest.mark.fault("server", "lifespan")
@pytest.mark.parametrize("failure", ["end", "end!", "end.", "end?"])
async def test_a_shutdown_that_fails_is_told_and_does_not_keep_the_server(
    failure: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app_instance, "SHUTDOWN_TIMEOUT", 0.2)
    async with serving(ScriptedEngine(plugins=failing_plugins(tmp_path, LIFE, failure))) as server:
        assert (await server.chat()).status_code == 200
    assert server.task.exception() is None
    errors = [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR]
    words = "are cancelled" if failure == "end?" else "failed in its shutdown"
    assert len(errors) == 1 and "server:faulty from" in errors[0] and words in errors[0]


PROCESS = """
import sys
sys.path[:0] = {paths!r}
from pathlib import Path
from faulty import plugins_of
from scripted import ScriptedEngine
from treadle_server import lifecycle
from treadle_server.config import server_from_options
from treadle_server.run import serve_engine

lifecycle.STOP_GRACE_SECONDS = 0.2
plugins = plugins_of(Path({folder!r}), {source!r})
serve_engine(
    lambda: ScriptedEngine(plugins=plugins), server_from_options({{"port": 0, "drain_timeout": 0.1}})
)
"""
THREAD = """
from treadle.api import impl

TREADLE = {"server": ["faulty"]}


@impl
def treadle_server(app):
    import threading
    from litestar import get

    @get("/hang", sync_to_thread=True)
    def hang() -> None:
        print("hangs", flush=True)
        threading.Event().wait()

    app.route_handlers.append(hang)
"""


@pytest.mark.fault("server", "route")
def test_a_thread_that_hangs_does_not_keep_the_process(tmp_path: Path) -> None:
    folder = Path(__file__).parent
    script = PROCESS.format(
        paths=[str(folder), str(folder.parent / "server")], folder=str(tmp_path), source=THREAD
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        url = next(line.split()[1] for line in process.stdout if line.startswith("listening"))
        with httpx.Client(base_url=url) as client:
            request = threading.Thread(target=client.get, args=("/hang",), daemon=True)
            request.start()
            assert process.stdout.readline() == "hangs\n"
            assert client.get("/health").status_code == 200
            process.send_signal(signal.SIGTERM)
            assert process.wait(10) == 1  # the request that hangs was cut off
            request.join(10)
    finally:
        process.kill()
        process.communicate()
