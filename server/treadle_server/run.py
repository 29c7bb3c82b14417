"""``serve``: an engine and a server around it, until a signal."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import socket
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import uvloop

from treadle.config import EngineConfig
from treadle.errors import EngineDeadError, PluginLoadError
from treadle.processes.logs import steps
from treadle_server.batches.storage import check_files_dir
from treadle_server.config import ServerConfig
from treadle_server.engine import Engine
from treadle_server.exit_guard import EXIT_SECONDS, ExitGuard
from treadle_server.listen import bind
from treadle_server.load_monitor import StartWitness, last_step, steps_folder
from treadle_server.logs import SERVER, LogSettings
from treadle_server.logs import start as start_logging
from treadle_server.signals import Signals
from treadle_server.threads import DaemonThreadPool
from treadle_server.tls import check_tls

if TYPE_CHECKING:
    from treadle_server.lifecycle import Lifecycle

__all__ = ("Startable", "serve", "serve_engine")


log = logging.getLogger("treadle.server")


class Startable(Engine, Protocol):
    """An engine that is not running yet."""

    async def start(self) -> Any: ...
    async def shutdown(self) -> None: ...


def serve(engine: EngineConfig, server: ServerConfig) -> None:
    """Start an engine and serve it until SIGTERM or SIGINT, then finish what runs and return.

    Raises ``ConfigError`` (nothing was started), the error of an engine that does not start, and
    ``EngineDeadError`` if the engine dies, once its clients have been told. A second signal, and
    requests that were cut off at the end of the drain, raise ``SystemExit``.
    """

    def build() -> Startable:
        from treadle.entrypoints.async_llm import AsyncLLM

        return AsyncLLM(config=engine)

    serve_engine(build, server)


def serve_engine(build: Callable[[], Startable], server: ServerConfig) -> None:
    """``serve`` for any engine: ``build`` is called on the event loop's thread, before the loop
    listens."""
    folder = steps_folder()
    witness = StartWitness(folder)
    try:
        _serve_engine(build, server, folder, witness)
    except EngineDeadError as error:
        if step := last_step(folder):
            raise PluginLoadError(f"{error} (it ended {step})") from error
        raise
    finally:
        witness.dismiss()
        shutil.rmtree(folder, ignore_errors=True)


def _serve_engine(
    build: Callable[[], Startable], server: ServerConfig, folder: Path, witness: StartWitness
) -> None:
    settings = LogSettings(server.log_level, server.log_format, server.log_config_file, str(folder))
    start_logging(settings, SERVER)
    check_tls(server)
    check_files_dir(server)
    bound = bind(server)
    threads = DaemonThreadPool()
    try:
        # Left last: closing the loop waits for tasks that plugins have started.
        with (
            ExitGuard(server.drain_timeout + EXIT_SECONDS) as guard,
            asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
        ):
            runner.get_loop().set_default_executor(threads)
            runner.run(_serve(build, server, bound, guard, witness, threads))
    finally:
        # The module has no functions yet where the engine failed while a thread was importing it.
        concurrency = sys.modules.get("litestar.concurrency")
        if (forget := getattr(concurrency, "set_asyncio_executor", None)) is not None:
            forget(None)
        bound.close()
        if server.uds is not None:
            with contextlib.suppress(OSError):
                os.unlink(server.uds)


async def _serve(
    build: Callable[[], Startable],
    config: ServerConfig,
    bound: socket.socket,
    guard: ExitGuard,
    witness: StartWitness,
    threads: DaemonThreadPool,
) -> None:
    signals = Signals()
    with signals.caught(), guard.listening():
        engine = build()
        try:
            started: list[Lifecycle] = []

            async def start() -> None:
                started.append(await _start(engine, config, bound, signals, threads))

            if not await signals.run_until_signal(start()):
                return
            from treadle_server.application import run_lifecycle

            lifecycle = started[0]
            for handler in list(steps.handlers):
                handler.close()
            witness.dismiss()
            await run_lifecycle(lifecycle, config, bound)
        finally:
            await shut_down(engine)
        if signals.forced.is_set():
            raise SystemExit(128 + signals.last)
        if lifecycle.num_cut_off:
            log.error(
                "%d requests were cut off: they did not finish in %g s (--drain-timeout)",
                lifecycle.num_cut_off,
                config.drain_timeout,
            )
            raise SystemExit(1)


async def _start(
    engine: Startable,
    config: ServerConfig,
    bound: socket.socket,
    signals: Signals,
    threads: DaemonThreadPool,
) -> Lifecycle:
    """Start the engine, and then the application, which is imported meanwhile."""

    def build() -> Lifecycle:
        from treadle_server.application import create_lifecycle

        return create_lifecycle(engine, config, bound, signals, threads)

    importing = asyncio.to_thread(import_module, "treadle_server.application")
    await asyncio.gather(engine.start(), importing)
    return await asyncio.to_thread(build)


async def shut_down(engine: Startable) -> None:
    """Release the engine and ignore the error of one that is dead."""
    try:
        async with asyncio.timeout(10):
            await engine.shutdown()
    except (TimeoutError, EngineDeadError) as error:
        log.warning("the engine did not shut down: %r", error)
