"""An application that can be replaced while it answers: its lifespan and its requests."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator

from litestar import Litestar
from litestar.routes import HTTPRoute
from litestar.types import Receive, Scope, Send

from treadle_server.error_forms import ErrorForms
from treadle_server.metric_names import MetricName
from treadle_server.plugin_faults import PluginFaults

__all__ = ("AppInstance", "public_routes")

log = logging.getLogger("treadle.server")

SHUTDOWN_TIMEOUT = 10.0
"""Time limit of all shutdown hooks together, in seconds."""


def public_routes(app: Litestar) -> Iterator[tuple[str, str]]:
    """Yield methods and paths, without parameters, of handlers that say ``opt={"public": True}``."""
    for route in app.routes:
        if isinstance(route, HTTPRoute) and not route.path_parameters:
            for handler in route.route_handlers:
                if handler.opt.get("public") is True:
                    yield from ((method, route.path) for method in handler.http_methods)


class AppInstance:
    """One built application.

    ``public_routes``, methods and paths, need no API key and are answered while the server drains.

    Its lifespan is a separate task, because a lifespan manager must close its resources in the task
    that opened them.
    """

    def __init__(
        self,
        app: Litestar,
        faults: PluginFaults,
        error_forms: ErrorForms,
        metric_names: tuple[MetricName, ...] = (),
    ) -> None:
        self.app, self.faults = app, faults
        self.error_forms, self.metric_names = error_forms, metric_names
        self.public_routes = frozenset(public_routes(app))
        self._running = 0
        self._is_retired = False
        self._stop_event = asyncio.Event()
        self._lifespan_task: asyncio.Task[None] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._running += 1
        try:
            await self.app(scope, receive, send)
        finally:
            self._running -= 1
            self._stop_if_idle()

    async def start(self) -> None:
        """Run the startup hooks. Raises ``PluginLoadError``."""
        ready = asyncio.get_running_loop().create_future()
        self._lifespan_task = asyncio.create_task(self._run_lifespan(ready))
        try:
            await ready
        except asyncio.CancelledError:
            self._lifespan_task.cancel()
            raise

    def stop_when_idle(self) -> None:
        """Run the shutdown hooks once all running requests have ended."""
        self._is_retired = True
        self._stop_if_idle()

    async def stop(self) -> None:
        """Run the shutdown hooks now. Log one that fails, and cancel one that hangs."""
        self._stop_event.set()
        if self._lifespan_task is None:
            return
        _, pending = await asyncio.wait((self._lifespan_task,), timeout=SHUTDOWN_TIMEOUT)
        if pending:
            self._lifespan_task.cancel()
            log.error(
                "the shutdown hooks of server plugins (%s) take more than %g s and are cancelled",
                self.faults,
                SHUTDOWN_TIMEOUT,
            )

    def _stop_if_idle(self) -> None:
        if self._is_retired and not self._running:
            self._stop_event.set()

    async def _run_lifespan(self, ready: asyncio.Future[None]) -> None:
        try:
            async with self.app.lifespan():
                ready.set_result(None)
                await self._stop_event.wait()
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # a plugin may raise anything
            if ready.done():
                log.error("%s", self.faults.lifespan_error(error, "its shutdown"), exc_info=error)
            else:
                ready.set_exception(self.faults.lifespan_error(error, "its startup"))
