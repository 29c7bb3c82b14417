"""Importing plugins and registering them with pluggy, as a whole or not at all."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Collection, Iterable
from importlib import metadata
from typing import Any

import pluggy

from treadle.api.hookspecs import PROJECT
from treadle.api.plugin_kind import PluginKind
from treadle.errors import PluginLoadError
from treadle.plugins.entries import Entry
from treadle.plugins.local import import_file
from treadle.plugins.options import declared_options

__all__ = ("PluginLoader", "plugin_name")


class PluginLoader:
    """Owns one pluggy manager. Loading is safe in threads.

    ``foreign`` names plugins that also declare keys of kinds which are unknown here: they may
    implement hooks of the distribution that declares such a kind.
    """

    def __init__(self, kinds: Iterable[PluginKind[Any]], foreign: Collection[str] = ()) -> None:
        self.pm = pluggy.PluginManager(PROJECT)
        self._specs = list(dict.fromkeys(kind.specs for kind in kinds))
        self._third_party = foreign
        for specs in self._specs:
            self.pm.add_hookspecs(specs)
        self._lock = threading.RLock()
        # One plugin object serves many entries, so it is kept by its name and not in an entry.
        self._plugins: dict[str, object] = {}

    def load(self, entry: Entry) -> object:
        """Import and register the plugin of an entry. Raises ``PluginLoadError`` if it is broken."""
        with self._lock:
            if entry.state == "ready":
                self._import(entry)
            if entry.state != "loaded":
                raise PluginLoadError(
                    f"{entry.id} from {entry.owner} failed to load: {entry.why}"
                ) from entry.error
            return self._plugins[plugin_name(entry)]

    def copy_without(self, entries: Iterable[Entry]) -> PluginLoader:
        """Return another loader with the plugins of this one, except those of ``entries``."""
        other = PluginLoader((), self._third_party)
        other._specs = self._specs
        for specs in self._specs:
            other.pm.add_hookspecs(specs)
        removed = {plugin_name(entry) for entry in entries}
        with self._lock:
            other._plugins = {n: p for n, p in self._plugins.items() if n not in removed}
        for name, plugin in other._plugins.items():
            if not other.pm.is_registered(plugin):
                other.pm.register(plugin, name=name)
        return other

    def plugins_except(self, plugin: object, wrappers: Iterable[object] = ()) -> list[object]:
        """Return all registered plugins except ``plugin`` and its ``wrappers``."""
        keep = {id(plugin), *map(id, wrappers)}
        with self._lock:
            return [p for p in self.pm.get_plugins() if id(p) not in keep]

    def _import(self, entry: Entry) -> None:
        try:
            self._plugins[plugin_name(entry)] = self._register(entry)
        except (Exception, SystemExit) as error:  # a plugin may do anything while it is imported
            ours = isinstance(error, PluginLoadError)
            entry.close("broken", str(error) if ours else entry.error_text(error))
            entry.error = error
        else:
            entry.state = "loaded"

    def _register(self, entry: Entry) -> object:
        name = plugin_name(entry)
        if name in self._plugins:
            return self._plugins[name]
        plugin = _imported(entry)
        if type(plugin).__hash__ is None:
            raise PluginLoadError(
                f"its object {type(plugin).__name__} has no hash, which pluggy needs; a dataclass has "
                "one with eq=False"
            )
        if self.pm.is_registered(plugin):
            return plugin  # two distributions name one object
        self._check_arguments(plugin)
        try:
            self.pm.register(plugin, name=name)
            self._check_hooks(plugin, name in self._third_party)
        except BaseException:
            # Left registered, the failed plugin would be blamed on whoever is registered next.
            if self.pm.is_registered(plugin):
                self.pm.unregister(plugin)
            raise
        return plugin

    def _check_arguments(self, plugin: object) -> None:
        """Refuse unknown arguments, as pluggy would, and name those of the hook."""
        for name in dir(plugin):
            spec = getattr(getattr(self.pm.hook, name, None), "spec", None)
            if spec is None or self.pm.parse_hookimpl_opts(plugin, name) is None:
                continue
            parameters = inspect.signature(getattr(plugin, name)).parameters.values()
            required = [p.name for p in parameters if p.default is p.empty]
            if unknown := [name for name in required if name not in spec.argnames]:
                known = ", ".join(spec.argnames) or "none"
                raise PluginLoadError(
                    f"its {name} takes {unknown[0]!r}, which this hook does not have; name any of: "
                    f"{known}"
                )

    def _check_hooks(self, plugin: object, may_be_foreign: bool) -> None:
        """Refuse hooks that nobody calls: pluggy would keep them silently."""
        callers = self.pm.get_hookcallers(plugin) or []
        for caller in callers:
            if not caller.has_spec() and not may_be_foreign:
                known = ", ".join(sorted(n for n in dir(self.pm.hook) if n.startswith("treadle_")))
                raise PluginLoadError(
                    f"it implements the unknown hook {caller.name!r} (known: {known})"
                )
            if not hasattr(plugin, caller.name):
                raise PluginLoadError(
                    f"it implements {caller.name!r} under another name; give the function that name"
                )
        if not callers:
            raise PluginLoadError(
                "it implements no hook; mark its functions with @treadle.api.impl"
            )
        declared_options(plugin)


def _imported(entry: Entry) -> object:
    if entry.file is not None:
        return import_file(entry)
    loaded = metadata.EntryPoint(entry.key, entry.target, entry.kind).load()
    return loaded() if isinstance(loaded, type) else loaded


def plugin_name(entry: Entry) -> str:
    """Return the name under which the plugin of an entry is registered."""
    return f"{entry.dist}:{entry.file or entry.target}"
