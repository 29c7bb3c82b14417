"""Imports a plugin, registers it as a whole or not at all, and calls its hooks.

pluggy orders, wraps and validates; who is called is decided here. A keyed hook is called with the
chosen plugin and the extensions only: a module that serves two keys would otherwise answer for a
key that the user gave to somebody else.
"""

from __future__ import annotations

import inspect
import threading
import traceback
from collections.abc import Callable, Iterable, Mapping
from importlib import metadata
from time import perf_counter
from typing import Any

import pluggy

from weft.api.hookspecs import PROJECT, Every, First
from weft.errors import PluginLoadError, WeftError
from weft.plugins.entries import Entry
from weft.plugins.kinds import KINDS
from weft.plugins.local import import_file
from weft.plugins.options import declared_options
from weft.plugins.tally import PASSED, Breaker, Tally

__all__ = ("Loader", "Relay")


class Loader:
    """Owns one pluggy manager. Loading is safe from several threads."""

    def __init__(self) -> None:
        self.pm = pluggy.PluginManager(PROJECT)
        self.pm.add_hookspecs(First)
        self.pm.add_hookspecs(Every)
        self._lock = threading.RLock()
        # One plugin object serves many entries, so it is kept by its name and not in an entry.
        self._plugins: dict[str, object] = {}

    def load(self, entry: Entry) -> object:
        """Import and register the plugin of an entry. Raises ``PluginLoadError`` if it is broken."""
        with self._lock:
            if entry.state == "ready":
                self._try(entry)
            if entry.state != "loaded":
                raise PluginLoadError(
                    f"{entry.id} from {entry.owner} failed to load: {entry.why}"
                ) from entry.error
            return self._plugins[_name(entry)]

    def without(self, entries: Iterable[Entry]) -> Loader:
        """Another loader, with the plugins of this one but for those of ``entries``."""
        other = Loader()
        gone = {_name(entry) for entry in entries}
        with self._lock:
            kept = {name: p for name, p in self._plugins.items() if name not in gone}
        for name, plugin in kept.items():
            if not other.pm.is_registered(plugin):
                other.pm.register(plugin, name=name)
        other._plugins = kept
        return other

    def _try(self, entry: Entry) -> None:
        try:
            self._plugins[_name(entry)] = self._register(entry)
        except (Exception, SystemExit) as error:  # a plugin may do anything while it is imported
            own = isinstance(error, PluginLoadError)
            entry.close("broken", str(error) if own else entry.said(error))
            entry.error = error
        else:
            entry.state = "loaded"

    def _register(self, entry: Entry) -> object:
        name = _name(entry)
        if name in self._plugins:
            return self._plugins[name]
        plugin = self._imported(entry)
        if self.pm.is_registered(plugin):
            return plugin  # two distributions name one object
        self._check_arguments(plugin)
        try:
            self.pm.register(plugin, name=name)
            self._check(plugin)
        except BaseException:
            # Left registered, the failed plugin would be blamed on whoever is registered next.
            if self.pm.is_registered(plugin):
                self.pm.unregister(plugin)
            raise
        return plugin

    @staticmethod
    def _imported(entry: Entry) -> object:
        if entry.file is not None:
            return import_file(entry)
        found = metadata.EntryPoint(entry.key, entry.target, entry.kind).load()
        return found() if isinstance(found, type) else found

    def _check_arguments(self, plugin: object) -> None:
        """Refuse unknown arguments, as pluggy would, and say which ones the hook has."""
        for name in dir(plugin):
            spec = getattr(getattr(self.pm.hook, name, None), "spec", None)
            if spec is None or self.pm.parse_hookimpl_opts(plugin, name) is None:
                continue
            given = inspect.signature(getattr(plugin, name)).parameters.values()
            asked = [p.name for p in given if p.default is p.empty]
            if unknown := [name for name in asked if name not in spec.argnames]:
                has = ", ".join(spec.argnames) or "none"
                raise PluginLoadError(
                    f"its {name} takes {unknown[0]!r}, which this hook does not have; name any of: {has}"
                )

    def _check(self, plugin: object) -> None:
        """Refuse hooks that nobody calls: pluggy would keep them silently."""
        callers = self.pm.get_hookcallers(plugin) or []
        later = {kind.hook for kind in KINDS.values() if kind.owner != "weft-core"}
        for caller in callers:
            if not caller.has_spec() and caller.name not in later:
                known = ", ".join(sorted(n for n in dir(self.pm.hook) if n.startswith("weft_")))
                raise PluginLoadError(
                    f"it implements the unknown hook {caller.name!r} (known: {known})"
                )
            if not hasattr(plugin, caller.name):
                raise PluginLoadError(
                    f"it implements {caller.name!r} under another name; give the function that name"
                )
        if not callers:
            raise PluginLoadError("it implements no hook; mark its functions with @weft.api.impl")
        declared_options(plugin)

    def alone(self, plugin: object, around: Iterable[object] = ()) -> list[object]:
        """All registered plugins but ``plugin`` and those ``around`` it."""
        keep = {id(plugin), *map(id, around)}
        with self._lock:
            return [p for p in self.pm.get_plugins() if id(p) not in keep]


class Relay:
    """The hooks of one entry: ``relay.weft_model(...)``. Failures name the plugin."""

    def __init__(
        self,
        loader: Loader,
        entry: Entry,
        around: Mapping[object, Breaker] | None = None,
        tally: Tally | None = None,
    ) -> None:
        self._loader, self._entry = loader, entry
        self._plugin = loader.load(entry)
        self._around = around or {}
        self._tally = tally or Tally()

    def __getattr__(self, hook: str) -> Callable[..., Any]:
        def call(**arguments: Any) -> Any:
            began = perf_counter()
            around = [p for p, breaker in self._around.items() if not breaker.open]
            while True:
                others = self._loader.alone(self._plugin, around)
                caller = self._loader.pm.subset_hook_caller(hook, others)
                try:
                    found = caller(**arguments)
                except PASSED:
                    raise
                except WeftError:
                    self._tally.failed(self._entry.id, hook, began)
                    raise  # said on purpose, in words meant for the user
                except BaseException as error:
                    guilty = culprit(error, self._plugin, around)
                    if guilty is not None:
                        self._around[guilty].failed(hook, error, began)
                        around.remove(guilty)
                        continue  # once more, without the extension
                    entry = self._entry
                    self._tally.failed(entry.id, hook, began)
                    raise PluginLoadError(entry.failure(hook, error)) from error
                self._tally.done(self._entry.id, hook, began)
                return found

        return call


def culprit(error: BaseException, plugin: object, around: Iterable[object]) -> object | None:
    """The one of ``around`` that raised ``error``; ``None`` if ``plugin`` or nobody of them did.

    An error of the plugin passes through the wrappers, so it counts only who is innermost.
    """
    homes = {_home(plugin): plugin} | {_home(each): each for each in around}
    found = None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        found = homes.get(frame.f_globals.get("__name__", ""), found)
    return None if found is plugin else found


def _home(plugin: object) -> str:
    """The module of a plugin object."""
    return str(getattr(plugin, "__name__", "") or type(plugin).__module__)


def _name(entry: Entry) -> str:
    return f"{entry.dist}:{entry.file or entry.target}"
