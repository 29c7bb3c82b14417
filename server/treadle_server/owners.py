"""Whose code failed: the plugins that have edited one application."""

from __future__ import annotations

import logging
import sys
import traceback
from typing import Any, cast

from litestar.exceptions import LitestarException
from litestar.types import Scope

from treadle.errors import PluginError, PluginLoadError, TreadleError
from treadle.known_plugins import ALWAYS_ALLOWED
from treadle.plugins import PluginManager
from treadle.plugins.entries import Entry, normal
from treadle.plugins.local import module_name
from treadle_server.errors import APIError, error_of, known, plugin_failed

__all__ = ("PluginFaults", "home", "root_cause")

log = logging.getLogger("treadle.server")

OURS = "treadle_server.routes."
"""Where handlers begin that are no plugin's, though a plugin's middleware may be around them."""


class PluginFaults:
    """The plugins of ``treadle.server`` in a host that are not treadle's own."""

    def __init__(self, plugins: PluginManager) -> None:
        self._tally = plugins.call_stats
        self._homes = {
            home(entry): entry
            for entry in plugins.entries
            if entry.kind == "server"
            and entry.state == "loaded"
            and normal(entry.dist) not in ALWAYS_ALLOWED
        }

    def __str__(self) -> str:
        return ", ".join(f"{e.id} from {e.owner}" for e in self._homes.values())

    def build_error(self, error: Exception) -> TreadleError:
        """Why there is no application. Treadle's own plugins work, so that one of them which fails has
        found what another has left."""
        mine = {entry.id for entry in self._homes.values()}
        if isinstance(error, TreadleError) and not (
            isinstance(error, PluginError) and error.plugin is not None and error.plugin not in mine
        ):
            return error
        return PluginLoadError(
            "the application cannot be built as server plugins have edited it "
            f"({str(self) or 'none but those of treadle'}): {type(error).__name__}: {error}"
        )

    def error_for_client(self, error: BaseException, scope: Scope) -> APIError:
        """What the client of a request gets that failed. A plugin's failure is logged and counted
        as one."""
        if (found := known(error)) is not None:
            return found
        root = root_cause(error)
        entry = self._of(root) or self._of_route(scope)
        if entry is None:
            return error_of(root)
        asked = cast("dict[str, Any]", scope)
        where = f"{asked.get('method')} {asked.get('path_template') or asked.get('path')}"
        log.error("%s", entry.failure(where, root), exc_info=root)
        self._tally.counter(entry.id, "request").failed()
        return plugin_failed(entry.id)

    def lifespan_error(self, error: BaseException, method: str) -> PluginLoadError:
        """The failure of something that belongs to no request."""
        root = root_cause(error)
        entry = self._of(root)
        if entry is None:
            who = f"a server plugin ({self}) failed in {method}"
            found = PluginLoadError(f"{who}: {type(root).__name__}: {root}")
        else:
            found = PluginLoadError(entry.failure(method, root))
            found.plugin = entry.id
        found.__cause__ = root
        return found

    def _of(self, error: BaseException) -> Entry | None:
        found = None
        for frame, _ in traceback.walk_tb(error.__traceback__):
            name = frame.f_globals.get("__name__", "")
            found = None if name.startswith(OURS) else self._at(name) or found
        return found

    def _of_route(self, scope: Scope) -> Entry | None:
        """What a handler returns may fail after it has returned."""
        handler: Any = scope.get("route_handler")
        return self._at(getattr(getattr(handler, "fn", None), "__module__", ""))

    def _at(self, module: str) -> Entry | None:
        while module:
            if module in self._homes:
                return self._homes[module]
            module = module.rpartition(".")[0]
        return None


def root_cause(error: BaseException) -> BaseException:
    """The error itself, inside of what litestar and task groups make of it."""
    while True:
        if isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
            error = error.exceptions[0]
        elif type(error) is LitestarException and error.__cause__ is not None:
            error = error.__cause__
        else:
            return error


def home(entry: Entry) -> str:
    """The package or module that belongs to an entry's distribution alone: a namespace package
    around it is also that of others."""
    if entry.file is not None:
        return module_name(entry)
    name = ""
    for part in entry.target.partition(":")[0].split("."):
        name = f"{name}.{part}" if name else part
        module = sys.modules.get(name)
        if module is None or getattr(module, "__file__", None):
            break
    return name
