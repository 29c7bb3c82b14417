"""An application that can be replaced while it answers: its lifespan and its requests."""

from __future__ import annotations

import asyncio
import logging

from litestar import Litestar
from litestar.types import Receive, Scope, Send

from treadle_server.owners import PluginFaults

__all__ = ("AppInstance",)

log = logging.getLogger("treadle.server")

SHUTDOWN = 10.0
"""Seconds that all shutdown hooks together may take."""


class AppInstance:
    """One built application.

    Its lifespan is a task of its own, because what a lifespan manager has opened must be closed in
    the task that opened it.
    """

    def __init__(self, app: Litestar, owners: PluginFaults) -> None:
        self.app, self.owners = app, owners
        self._running = 0
        self._retired = False
        self._stopped = asyncio.Event()
        self._life: asyncio.Task[None] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._running += 1
        try:
            await self.app(scope, receive, send)
        finally:
            self._running -= 1
            self._stop_if_idle()

    async def start(self) -> None:
        """Run the startup hooks. Raises ``PluginLoadError``."""
        started = asyncio.get_running_loop().create_future()
        self._life = asyncio.create_task(self._live(started))
        try:
            await started
        except asyncio.CancelledError:
            self._life.cancel()
            raise

    def retire(self) -> None:
        """Run the shutdown hooks once the requests that it still answers have ended."""
        self._retired = True
        self._stop_if_idle()

    async def stop(self) -> None:
        """Run the shutdown hooks now. One that fails is logged, one that hangs is given up."""
        self._stopped.set()
        if self._life is None:
            return
        _, late = await asyncio.wait((self._life,), timeout=SHUTDOWN)
        if late:
            self._life.cancel()
            log.error(
                "the shutdown hooks of server plugins (%s) take more than %g s and are given up",
                self.owners,
                SHUTDOWN,
            )

    def _stop_if_idle(self) -> None:
        if self._retired and not self._running:
            self._stopped.set()

    async def _live(self, started: asyncio.Future[None]) -> None:
        try:
            async with self.app.lifespan():
                started.set_result(None)
                await self._stopped.wait()
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # a plugin may raise anything
            if started.done():
                log.error("%s", self.owners.lifespan_error(error, "its shutdown"), exc_info=error)
            else:
                started.set_exception(self.owners.lifespan_error(error, "its startup"))
