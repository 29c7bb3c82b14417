"""Attribution of failures to the plugins that have edited an application."""

from __future__ import annotations

import logging
import sys
import traceback
from typing import Any, cast

from litestar.exceptions import LitestarException
from litestar.types import Scope

from treadle.errors import PluginError, PluginLoadError, TreadleError
from treadle.known_plugins import ALWAYS_ALLOWED, DISTRIBUTIONS
from treadle.plugins import PluginManager
from treadle.plugins.entries import Entry, normal
from treadle.plugins.local import module_name
from treadle_server.errors import APIError, error_of, known_error, plugin_failed
from treadle_server.hookspecs import SERVER

__all__ = ("PluginFaults", "module_of", "root_cause")

log = logging.getLogger("treadle.server")

ROUTES_PREFIX = "treadle_server.routes."
"""Prefix of the modules of treadle's own handlers, which a plugin's middleware may wrap."""


class PluginFaults:
    """The third-party plugins of ``treadle.server`` in a plugin manager, and their failures."""

    def __init__(self, plugins: PluginManager) -> None:
        self._call_stats = plugins.call_stats
        self._failed: set[tuple[str, str]] = set()
        """Plugins and the routes on which they have failed since these worked last."""
        self._entries = {
            module_of(entry): entry
            for entry in plugins.entries
            if entry.kind == "server"
            and entry.state == "loaded"
            and normal(entry.dist) not in ALWAYS_ALLOWED
        }

    def __str__(self) -> str:
        return ", ".join(f"{e.id} from {e.owner}" for e in self._entries.values())

    def build_error(self, error: Exception) -> TreadleError:
        """Return the error for an application that cannot be built.

        A failure inside a plugin of treadle is attributed to the third-party plugins that edited the
        application before it.
        """
        foreign_ids = {
            entry.id for entry in self._entries.values() if normal(entry.dist) not in DISTRIBUTIONS
        }
        if isinstance(error, TreadleError) and not (
            isinstance(error, PluginError)
            and error.plugin is not None
            and error.plugin not in foreign_ids
        ):
            return error
        return PluginLoadError(
            "the application cannot be built as server plugins have edited it "
            f"({str(self) or 'none but those of treadle'}): {type(error).__name__}: {error}"
        )

    def error_for_client(self, error: BaseException, scope: Scope) -> APIError:
        """Return the error that the client of a failed request receives.

        A plugin's failure is logged and counted for that plugin.
        """
        if (api_error := known_error(error)) is not None:
            return api_error
        root = root_cause(error)
        entry = self._entry_of_error(root) or self._entry_of_route(scope)
        if entry is None:
            return error_of(root)
        fields = cast("dict[str, Any]", scope)
        route = f"{fields.get('method')} {fields.get('path_template') or fields.get('path')}"
        self._failed.add((entry.id, _template(scope)))
        log.error("%s", entry.failure(route, root), exc_info=root)
        self._call_stats.counter(SERVER, entry.id, "request").record_failure()
        return plugin_failed(entry.id)

    def record_answer(self, scope: Scope, status: int) -> None:
        """Count a request that did not fail, for plugins that had failed on its route.

        Without it, a plugin that has recovered would be called broken for ever.
        """
        for failed in [f for f in self._failed if status < 500 and f[1] == _template(scope)]:
            self._failed.remove(failed)
            self._call_stats.counter(SERVER, failed[0], "request").record_success(0.0)

    def lifespan_error(self, error: BaseException, method: str) -> PluginLoadError:
        """Return the error of a startup or shutdown hook, with the plugin if it is known."""
        root = root_cause(error)
        entry = self._entry_of_error(root)
        if entry is None:
            context = f"a server plugin ({self}) failed in {method}"
            plugin_error = PluginLoadError(f"{context}: {type(root).__name__}: {root}")
        else:
            plugin_error = PluginLoadError(entry.failure(method, root))
            plugin_error.plugin = entry.id
        plugin_error.__cause__ = root
        return plugin_error

    def _entry_of_error(self, error: BaseException) -> Entry | None:
        entry = None
        for frame, _ in traceback.walk_tb(error.__traceback__):
            name = frame.f_globals.get("__name__", "")
            entry = None if name.startswith(ROUTES_PREFIX) else self._entry_of_module(name) or entry
        return entry

    def _entry_of_route(self, scope: Scope) -> Entry | None:
        """Return the plugin of a request's handler: its response may fail after it has returned."""
        handler: Any = scope.get("route_handler")
        return self._entry_of_module(getattr(getattr(handler, "fn", None), "__module__", ""))

    def _entry_of_module(self, module: str) -> Entry | None:
        while module:
            if module in self._entries:
                return self._entries[module]
            module = module.rpartition(".")[0]
        return None


def _template(scope: Scope) -> str:
    return cast("dict[str, Any]", scope).get("path_template") or "other"


def root_cause(error: BaseException) -> BaseException:
    """Return the original error inside the exceptions of litestar and of task groups."""
    while True:
        if isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
            error = error.exceptions[0]
        elif type(error) is LitestarException and error.__cause__ is not None:
            error = error.__cause__
        else:
            return error


def module_of(entry: Entry) -> str:
    """Return the outermost package or module of an entry that is not a namespace package.

    A namespace package may contain modules of other distributions.
    """
    if entry.file is not None:
        return module_name(entry)
    name = ""
    for part in entry.target.partition(":")[0].split("."):
        name = f"{name}.{part}" if name else part
        module = sys.modules.get(name)
        if module is None or getattr(module, "__file__", None):
            break
    return name
