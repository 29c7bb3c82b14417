"""From a started engine to the end of the process: serving, watching, draining.

::

    serving ── first signal ──> draining ── all answered, or drain_timeout ──> stopping ──> stopped
       └────── engine dead ──────────────── all told, or a few seconds ───────────┘

While it drains, the server still answers: new requests get 503, ``/ready`` 503 and ``/health`` 200.
A second signal goes straight to stopping.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import uvicorn

from treadle.errors import EngineDeadError
from treadle.processes.logs import LogSetup
from treadle_server.app import create_app
from treadle_server.batches.service import BatchService
from treadle_server.batches.storage import Folder
from treadle_server.call_monitor import stuck_calls
from treadle_server.context import ServerContext
from treadle_server.gateway import STOPPED
from treadle_server.memory_watch import MemoryWatch
from treadle_server.protocol import bounded, sweep
from treadle_server.signals import Signals
from treadle_server.stats_log import StatsLog

__all__ = ("Lifecycle",)

log = logging.getLogger("treadle.server")

TICK = 0.25
"""Seconds between two checks of the engine and the connections."""
HEARTBEAT = 1.0
"""Seconds between two requests for the engine's stats."""
LOOK_SECONDS = 5.0
"""Seconds between two looks at the memory of the processes."""
STOP_GRACE_SECONDS = 3.0
"""Seconds that stopped requests get to send their error."""


class HttpServer(uvicorn.Server):
    """Uvicorn without its signal handling: the lifecycle decides when to exit."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._leave = asyncio.Event()

    def leave(self) -> None:
        self.should_exit = True
        self._leave.set()

    async def main_loop(self) -> None:
        """Sleep until ``leave``; ``on_tick`` renews the Date header every second."""
        while not await self.on_tick(0):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    await self._leave.wait()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Lifecycle:
    """One server around a started engine, which it does not shut down.

    ``num_cut_off`` are the requests that were stopped because they outlasted the drain.
    """

    def __init__(self, context: ServerContext, bound: socket.socket, signals: Signals) -> None:
        self.context = context
        self._bound = bound
        self._signals = signals
        self.num_cut_off = 0
        config = context.config
        self.app = create_app(context)
        self._listener = HttpServer(
            uvicorn.Config(
                self.app,
                http=bounded(config),
                ws="none",
                lifespan="off",  # the application may change; see ``AppInstance``
                log_config=None,
                log_level=config.log_level if config.log_level == "debug" else "warning",
                access_log=False,  # the gateway writes it
                proxy_headers=False,
                server_header=False,
                backlog=config.backlog,
                timeout_keep_alive=int(max(1, config.timeout_keep_alive)),
                timeout_graceful_shutdown=int(STOP_GRACE_SECONDS),
                ssl_keyfile=config.ssl_keyfile,
                ssl_certfile=config.ssl_certfile,
                ssl_ca_certs=config.ssl_ca_certs,
                ssl_cert_reqs=2 if config.ssl_ca_certs else 0,
            )
        )
        self._memory = MemoryWatch()

    @property
    def started(self) -> bool:
        """Whether connections are accepted."""
        return self._listener.started

    async def run(self, announce: str = "") -> None:
        """Serve until a signal or the death of the engine, then drain.

        ``announce`` is printed once connections are accepted. Raises ``EngineDeadError``, and
        ``PluginLoadError`` if what a plugin does at the start fails.
        """
        context = self.context
        if context.config.files_dir is not None:
            context.batches = BatchService(context, Folder(Path(context.config.files_dir)))
        try:
            if await self._signals.run_until_signal(context.app_instance.start()):
                await self._serve(announce)
        finally:
            if context.batches is not None:
                await context.batches.close()
            await context.app_instance.stop()
            context.close()
        if self.context.is_dead is not None:
            raise self.context.is_dead

    async def _serve(self, announce: str) -> None:
        if self.context.batches is not None:
            self.context.batches.start()
        serving = asyncio.create_task(self._listener.serve(sockets=[self._bound]))
        monitor = asyncio.create_task(self._monitor())
        try:
            while not self._listener.started and not serving.done():
                await asyncio.sleep(0.005)
            if announce and not serving.done():
                print(announce, flush=True)
            await self._watch(serving)
            await self._drain()
        finally:
            monitor.cancel()
            await self._stop(serving)

    async def _watch(self, serving: asyncio.Task[None]) -> None:
        while not (serving.done() or self._signals.requested.is_set() or self.context.is_dead):
            await self._tick(self._signals.requested)

    async def _drain(self) -> None:
        context, loop = self.context, asyncio.get_running_loop()
        context.draining = True
        if context.batches is not None:  # the next server continues them
            await context.batches.stop()
        timeout = STOP_GRACE_SECONDS if context.is_dead else context.config.drain_timeout
        deadline = loop.time() + timeout
        if context.metrics.active:
            log.info(
                "draining: %d requests have up to %g s to finish", context.metrics.active, timeout
            )
        while context.metrics.active and loop.time() < deadline:
            if self._signals.forced.is_set():
                return
            await self._tick(self._signals.forced, min(TICK, 0.05))
            if context.is_dead:
                deadline = min(deadline, loop.time() + STOP_GRACE_SECONDS)

    async def _stop(self, serving: asyncio.Task[None]) -> None:
        context, loop = self.context, asyncio.get_running_loop()
        context.draining = True
        self.num_cut_off = context.metrics.active
        context.active_requests.stop_all(STOPPED)
        deadline = loop.time() + STOP_GRACE_SECONDS
        while context.metrics.active and loop.time() < deadline:
            await asyncio.sleep(0.01)
        if self._signals.forced.is_set():
            for connection in list(self._listener.server_state.connections):
                cast("Any", connection).transport.abort()
        self._listener.leave()
        await asyncio.wait((serving,))
        if not serving.cancelled() and (error := serving.exception()) is not None:
            raise error

    async def _tick(self, wake: asyncio.Event, pause: float = TICK) -> None:
        """Wait up to ``pause`` seconds for ``wake``, then check the connections and the engine."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(pause):
                await wake.wait()
        sweep(self._listener.server_state.connections, asyncio.get_running_loop().time())
        if self.context.is_dead is None and not self.context.engine.alive:
            try:
                await self.context.engine.stats(HEARTBEAT)  # it says why
            except EngineDeadError as error:
                self._end(error)
            else:
                self._end(EngineDeadError("the engine has stopped"))

    async def _monitor(self) -> None:
        """Poll the engine's stats. Mark it hung if it does not answer within ``hang_timeout``."""
        context, timeout = self.context, self.context.config.hang_timeout
        stats_log, next_look = StatsLog(), 0.0
        while context.is_dead is None:
            try:
                context.stats = await context.engine.stats(timeout)
                context.is_hung, context.stuck_calls = None, ""
                context.broken_plugins()
            except EngineDeadError as error:
                if context.engine.alive:
                    context.is_hung = context.is_hung or error
                    where = await self._stuck_calls()
                    context.is_hung = EngineDeadError(f"{error}; {where}") if where else error
                    context.stuck_calls = where
                    log.error("%s", context.is_hung)
                else:
                    self._end(error)
            else:
                if not context.config.disable_log_stats:
                    stats_log.update(context.stats)
            if time.monotonic() >= next_look:
                self._memory.look()
                next_look = time.monotonic() + LOOK_SECONDS
            await asyncio.sleep(HEARTBEAT)

    async def _stuck_calls(self) -> str:
        """Return which calls of plugins the processes of the engine are in."""
        settings = LogSetup.current().settings
        folder = settings.get("steps") if isinstance(settings, dict) else None
        return "" if folder is None else await asyncio.to_thread(stuck_calls, Path(folder))

    def _end(self, error: EngineDeadError) -> None:
        """Note that the engine has died, and log why, if the system knows more than the engine."""
        if self.context.is_dead is None:
            self.context.is_dead = error
            log.error("the engine has died: %s%s", error, self._memory.explain(str(error)))
