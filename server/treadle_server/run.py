"""``serve``: an engine and a server around it, until a signal."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Callable
from typing import Any, Protocol, cast

import uvloop
from litestar.concurrency import set_asyncio_executor

from treadle.config import EngineConfig
from treadle.errors import EngineDeadError
from treadle_server.banner import banner
from treadle_server.batches.storage import check_files_dir
from treadle_server.config import ServerConfig
from treadle_server.context import ServerContext
from treadle_server.engine import Engine
from treadle_server.lifecycle import Lifecycle, Signals
from treadle_server.listen import bind, url_of
from treadle_server.logs import LogSettings
from treadle_server.logs import start as start_logging
from treadle_server.running import published
from treadle_server.threads import DaemonThreadPool
from treadle_server.tls import check_tls

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
    start_logging(
        LogSettings(server.log_level, server.log_format, server.log_config_file), "server"
    )
    check_tls(server)
    check_files_dir(server)
    bound = bind(server)
    set_asyncio_executor(cast("Any", DaemonThreadPool()))
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_serve(build, server, bound))
    finally:
        set_asyncio_executor(None)
        bound.close()
        if server.uds is not None:
            with contextlib.suppress(OSError):
                os.unlink(server.uds)


async def _serve(
    build: Callable[[], Startable], config: ServerConfig, bound: socket.socket
) -> None:
    signals = Signals()
    with signals.caught():
        engine = build()
        try:
            if not await signals.run_until_signal(engine.start()):
                return
            context = ServerContext(engine, config)
            parsers = context.chat_processor.parser_plugins
            for option, key in parsers.keys.items():
                if key is not None:  # a wrong name stops the start, and not a request
                    parsers.check(option, key)
            lifecycle = Lifecycle(context, bound, signals)
            url = url_of(config, bound)
            async with published(context, url):
                await lifecycle.run(banner(context, url))
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


async def shut_down(engine: Startable) -> None:
    """Release the engine and ignore the error of one that is dead."""
    try:
        async with asyncio.timeout(10):
            await engine.shutdown()
    except (TimeoutError, EngineDeadError) as error:
        log.warning("the engine did not shut down: %r", error)
