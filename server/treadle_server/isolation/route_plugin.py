"""The hook of a server plugin that runs in a process of its own."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from treadle.plugins import Entry
from treadle_server.hookspecs import SERVER
from treadle_server.isolation.route_process import MEMORY, RouteProcess
from treadle_server.isolation.wire import Hello

if TYPE_CHECKING:
    from litestar.config.app import AppConfig

    from treadle_server.isolation.routes import IsolatedRoutes

__all__ = ("ServerProxy",)


class ServerProxy:
    """The hook of one server plugin, which is called in a process for each application that it edits.

    The plugin is imported when this is made. Raises ``PluginLoadError``.
    """

    def __init__(self, entry: Entry) -> None:
        self._entry = entry
        self._lock = threading.Lock()
        # Those of an application that was replaced by a reload end with it.
        self._routes: weakref.WeakSet[IsolatedRoutes] = weakref.WeakSet()
        self._spare: RouteProcess | None = self._import()

    def add_to(self, app: AppConfig, options: Mapping[str, Any]) -> None:
        """Add the plugin's routes to an application. Raises ``PluginLoadError``, and what the hook raises."""
        from treadle_server.isolation.route_wire import Start
        from treadle_server.isolation.routes import IsolatedRoutes

        entry, context = self._entry, app.state.context
        engine = context.engine
        start = Start(
            dict(options), list(context.names), engine.info, context.config.max_body_bytes
        )
        counter = engine.plugins.call_stats.counter(SERVER, entry.id, "request")
        routes = IsolatedRoutes(entry.id, context, counter, start, self._process)
        routes.add_to(app)
        self._routes.add(routes)

    @property
    def parts(self) -> Sequence[IsolatedRoutes]:
        """What may have been lost too often."""
        return tuple(self._routes)

    def _process(self) -> RouteProcess:
        """Return a process that has imported the plugin, and of which nobody has called the hook."""
        with self._lock:
            process, self._spare = self._spare, None
        return process or self._import()

    def _import(self) -> RouteProcess:
        entry = self._entry
        source = (entry.kind, entry.key, entry.target, entry.dist, entry.version, entry.file)
        return RouteProcess(entry.id, Hello(*source, memory=MEMORY))
