"""Importing plugins and registering them with pluggy, as a whole or not at all."""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection, Iterable
from importlib import metadata
from typing import Any

import pluggy

from treadle.api.hookspecs import PROJECT
from treadle.api.plugin_kind import PluginKind
from treadle.api.plugin_options import declared_options
from treadle.errors import PluginLoadError
from treadle.plugins.entries import Entry
from treadle.plugins.local import module_name
from treadle.processes.logs import steps
from treadle.regular_files import import_file

__all__ = ("PluginLoader",)

log = logging.getLogger("treadle.plugins")
PROXY = "treadle_server.isolation.plugin:IsolatedPlugin"  # made from an entry


class PluginLoader:
    """Owns one pluggy manager, ``pm``. Loading is safe in threads.

    ``foreign_plugins`` names plugins that also declare keys of kinds which are unknown here: they may
    implement hooks of the distribution that declares such a kind. ``isolated`` names those of which
    a proxy is loaded. ``plugins`` are the loaded ones by name: one object serves many entries.
    """

    def __init__(
        self, kinds: Iterable[PluginKind[Any]], foreign_plugins: Collection[str] = ()
    ) -> None:
        self.pm = pluggy.PluginManager(PROJECT)
        self._kinds = {kind.name: kind for kind in kinds}
        for specs in dict.fromkeys(kind.specs for kind in self._kinds.values()):
            self.pm.add_hookspecs(specs)
        self.foreign_plugins = foreign_plugins
        self.isolated: Collection[str] = ()
        self.plugins: dict[str, object] = {}
        self._lock = threading.RLock()

    def load(self, entry: Entry) -> object:
        """Import and register the plugin of an entry. Raises ``PluginLoadError`` if it is broken."""
        with self._lock:
            if entry.state == "ready":
                try:
                    if entry.plugin not in self.plugins:
                        steps.debug("importing %s from %s", entry.id, entry.owner)
                        plugin = _import(entry, entry.plugin in self.isolated)
                        if entry.adapted:
                            text = "%s from %s %s: see docs/project/migration.md"
                            log.warning(text, entry.id, entry.owner, entry.reason)
                            plugin = self._kinds[entry.kind].adapt(plugin, declared_options(plugin))
                        self.add(entry.plugin, plugin)
                    entry.state = "loaded"
                except (Exception, SystemExit) as error:  # an import may do anything
                    is_load_error = isinstance(error, PluginLoadError)
                    entry.close("broken", str(error) if is_load_error else entry.error_text(error))
                    entry.error = error
                finally:
                    steps.debug("")
            if entry.state != "loaded":
                raise PluginLoadError(
                    f"{entry.id} from {entry.owner} failed to load: {entry.reason}"
                ) from entry.error
            return self.plugins[entry.plugin]

    def add(self, name: str, plugin: object) -> None:
        """Register a plugin. Raises ``PluginLoadError``, and what pluggy raises, if it is unusable."""
        if type(plugin).__hash__ is None:
            raise PluginLoadError(
                f"its object {type(plugin).__name__} has no hash, which pluggy needs; a dataclass has "
                "one with eq=False"
            )
        if not self.pm.is_registered(plugin):  # two distributions may name one object
            try:
                self.pm.register(plugin, name=name)
                self._check_hooks(plugin, name in self.foreign_plugins)
            except BaseException:
                # Left registered, the failed plugin would be blamed on whoever is registered next.
                if self.pm.is_registered(plugin):
                    self.pm.unregister(plugin)
                raise
        self.plugins[name] = plugin

    def _check_hooks(self, plugin: object, may_be_foreign: bool) -> None:
        """Refuse hooks that nobody calls: pluggy would keep them silently."""
        callers = self.pm.get_hookcallers(plugin) or []
        for caller in callers:
            if not caller.has_spec() and not may_be_foreign:
                hook_names = ", ".join(
                    sorted(n for n in dir(self.pm.hook) if n.startswith("treadle_"))
                )
                raise PluginLoadError(
                    f"it implements the unknown hook {caller.name!r} (known: {hook_names})"
                )
            if not hasattr(plugin, caller.name):
                raise PluginLoadError(
                    f"it implements {caller.name!r} under another name; give the function that name"
                )
            if any(impl.hookwrapper for impl in caller.get_hookimpls()):
                raise PluginLoadError(
                    f"it wraps {caller.name!r} with hookwrapper=True; write wrapper=True"
                )
        if not callers:
            raise PluginLoadError(
                "it implements no hook; mark its functions with @treadle.api.impl"
            )
        declared_options(plugin)


def _import(entry: Entry, is_isolated: bool) -> object:
    if is_isolated:
        return metadata.EntryPoint(entry.key, PROXY, entry.kind).load()(entry)
    if entry.file is not None:
        return import_file(module_name(entry), entry.file)
    plugin = metadata.EntryPoint(entry.key, entry.target, entry.kind).load()
    return plugin() if isinstance(plugin, type) else plugin
