"""Imports a plugin, registers it as a whole or not at all, and calls its hooks.

pluggy orders, wraps and validates; who is called is decided here. A keyed hook is called with the
chosen plugin and the extensions only: a module that serves two keys would otherwise answer for a
key that the user gave to somebody else.
"""

from __future__ import annotations

import inspect
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import metadata
from time import perf_counter
from typing import Any

import pluggy

from treadle.api.hookspecs import PROJECT, Every, First
from treadle.errors import PluginLoadError, TreadleError
from treadle.plugins.call_stats import PASSED, Breaker, Tally
from treadle.plugins.entries import Entry
from treadle.plugins.kinds import KINDS
from treadle.plugins.local import import_file
from treadle.plugins.options import declared_options

__all__ = ("Loader", "Relay")

Around = list[tuple[object, Breaker]]


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
        later = {kind.hook for kind in KINDS.values() if kind.owner != "treadle-core"}
        for caller in callers:
            if not caller.has_spec() and caller.name not in later:
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

    def alone(self, plugin: object, around: Iterable[object] = ()) -> list[object]:
        """All registered plugins but ``plugin`` and those ``around`` it."""
        keep = {id(plugin), *map(id, around)}
        with self._lock:
            return [p for p in self.pm.get_plugins() if id(p) not in keep]


class Relay:
    """The hooks of one entry: ``relay.treadle_model(...)``. Failures name the plugin.

    ``around`` are the extensions, each with the breaker that takes note of its failures.
    """

    def __init__(
        self,
        loader: Loader,
        entry: Entry,
        around: Iterable[tuple[object, Breaker]] = (),
        tally: Tally | None = None,
    ) -> None:
        self._loader, self._entry = loader, entry
        self._plugin = loader.load(entry)
        self._around = list(around)
        self._tally = tally or Tally()

    def __getattr__(self, hook: str) -> Callable[..., Any]:
        def call(**arguments: Any) -> Any:
            around = [(p, breaker) for p, breaker in self._around if not breaker.open]
            while True:
                began = perf_counter()
                try:
                    found = self._once(hook, arguments, around)
                    lost = found is None and self._taker(hook, arguments, around)
                except PASSED:
                    raise
                except TreadleError:
                    self._tally.failed(self._entry.id, hook, began)
                    raise  # said on purpose, in words meant for the user
                except BaseException as error:
                    self._failed(hook, error, around, began)
                    continue  # once more, without the extension
                if not lost:
                    self._tally.done(self._entry.id, hook, began)
                    return found
                dropped = TypeError("a wrapper returned None and not the answer of the hook")
                lost[1].failed(hook, dropped, began)
                around.remove(lost)

        return call

    def _once(self, hook: str, arguments: Mapping[str, Any], around: Around) -> Any:
        others = self._loader.alone(self._plugin, (plugin for plugin, _ in around))
        return self._loader.pm.subset_hook_caller(hook, others)(**arguments)

    def _failed(self, hook: str, error: BaseException, around: Around, began: float) -> None:
        """Leave out the extension that raised ``error``; raise if it was none of them."""
        guilty = culprit(error, self._plugin, (plugin for plugin, _ in around))
        guilty = guilty or self._misused(hook, error)
        entry = self._entry
        for extension in around:
            if extension[0] is guilty:
                if self._repeatable:
                    extension[1].failed(hook, error, began)
                    around.remove(extension)
                    return
                entry = extension[1].entry
        self._tally.failed(entry.id, hook, began)
        named = PluginLoadError(entry.failure(hook, error))
        named.plugin = entry.id
        raise named from error

    @property
    def _repeatable(self) -> bool:
        """What all plugins of a kind are called for is something they do, and not to be done twice."""
        return KINDS[self._entry.kind].mode != "always"

    def _misused(self, hook: str, error: BaseException) -> object | None:
        """The plugin whose wrapper yields never, or twice: then pluggy raises, with its place."""
        for found in self._wrappers(hook):
            code = getattr(found.function, "__code__", None)
            if code and f"{code.co_filename}:{code.co_firstlineno} " in str(error):
                return found.plugin
        return None

    def _taker(
        self, hook: str, arguments: Mapping[str, Any], around: Around
    ) -> tuple[object, Breaker] | None:
        """The extension without which there is an answer."""
        wrapping = {id(found.plugin) for found in self._wrappers(hook)}
        suspects = [extension for extension in around if id(extension[0]) in wrapping]
        if not suspects or not self._repeatable:
            return None
        for suspect in suspects:
            rest = [extension for extension in around if extension is not suspect]
            if self._once(hook, arguments, rest) is not None:
                return suspect
        rest = [extension for extension in around if extension not in suspects]
        return suspects[0] if self._once(hook, arguments, rest) is not None else None

    def _wrappers(self, hook: str) -> Iterator[pluggy.HookImpl]:
        caller: pluggy.HookCaller = getattr(self._loader.pm.hook, hook)
        return (found for found in caller.get_hookimpls() if found.wrapper or found.hookwrapper)


def culprit(error: BaseException, plugin: object, around: Iterable[object]) -> object | None:
    """The one of ``around`` that raised ``error``; ``None`` if ``plugin`` or nobody of them did.

    An error of the plugin passes through the wrappers, so it counts only who is innermost.
    """
    homes = {_home(each): each for each in around} | {_home(plugin): plugin}
    found = None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        found = homes.get(frame.f_globals.get("__name__", ""), found)
    return None if found is plugin else found


def _home(plugin: object) -> str:
    """The module of a plugin object."""
    return str(getattr(plugin, "__name__", "") or type(plugin).__module__)


def _name(entry: Entry) -> str:
    return f"{entry.dist}:{entry.file or entry.target}"
