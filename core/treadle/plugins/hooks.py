"""Calling hooks of one plugin, with the extensions that wrap them.

pluggy orders, wraps and validates; who is called is decided here. A keyed hook is called with the
selected plugin and the extensions only: a module that serves two keys would otherwise answer for a
key that the user gave to another plugin.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from time import perf_counter
from typing import Any

import pluggy

from treadle.errors import PluginLoadError, TreadleError
from treadle.plugins.call_stats import NOT_CAUGHT, CircuitBreaker, PluginCallStats
from treadle.plugins.entries import Entry
from treadle.plugins.loader import PluginLoader

__all__ = ("HookWrappers", "PluginHooks")

HookWrappers = list[tuple[object, CircuitBreaker]]
"""Extensions, each with the circuit breaker that records its failures."""


class PluginHooks:
    """The hooks of one entry as methods: ``hooks.treadle_model(...)``. Failures name the plugin.

    An extension that fails is left out and the hook called again, unless the call is not
    ``repeatable``: hooks that act, instead of building something, must not run twice.
    """

    def __init__(
        self,
        loader: PluginLoader,
        entry: Entry,
        stats: PluginCallStats,
        wrappers: HookWrappers | None = None,
        *,
        repeatable: bool = True,
    ) -> None:
        self._loader, self._entry, self._stats = loader, entry, stats
        self._plugin = loader.load(entry)
        self._wrappers = wrappers or []
        self._repeatable_hooks = repeatable

    def __getattr__(self, hook: str) -> Callable[..., Any]:
        return lambda **arguments: self.call(hook, arguments)

    def call(self, hook: str, arguments: Mapping[str, Any]) -> Any:
        """Call ``hook``; what it raises, other than ``TreadleError``, is a ``PluginLoadError``."""
        wrappers = [(p, breaker) for p, breaker in self._wrappers if not breaker.is_open]
        while True:
            began = perf_counter()
            try:
                result = self._once(hook, arguments, wrappers)
                dropping = self._wrapper_dropping_result(hook, arguments, wrappers, result)
            except NOT_CAUGHT:
                raise
            except TreadleError:
                self._stats.failed(self._entry.id, hook, began)
                raise  # raised deliberately, in words for the user
            except BaseException as error:
                self._failed(hook, error, wrappers, began)
                continue  # once more, without the extension
            if dropping is None:
                self._stats.done(self._entry.id, hook, began)
                return result
            dropped = TypeError("a wrapper returned None and not the answer of the hook")
            dropping[1].failed(hook, dropped, began)
            wrappers.remove(dropping)

    def _once(self, hook: str, arguments: Mapping[str, Any], wrappers: HookWrappers) -> Any:
        others = self._loader.plugins_except(self._plugin, (plugin for plugin, _ in wrappers))
        return self._loader.pm.subset_hook_caller(hook, others)(**arguments)

    def _failed(
        self, hook: str, error: BaseException, wrappers: HookWrappers, began: float
    ) -> None:
        """Leave out the extension that raised ``error``; raise if the plugin did."""
        failing = failing_wrapper(error, self._plugin, (plugin for plugin, _ in wrappers))
        failing = failing or self._invalid_wrapper(hook, error)
        entry = self._entry
        for wrapper in wrappers:
            if wrapper[0] is failing:
                if self._repeatable_hooks:
                    wrapper[1].failed(hook, error, began)
                    wrappers.remove(wrapper)
                    return
                entry = wrapper[1].entry
        self._stats.failed(entry.id, hook, began)
        named = PluginLoadError(entry.failure(hook, error))
        named.plugin = entry.id
        raise named from error

    def _invalid_wrapper(self, hook: str, error: BaseException) -> object | None:
        """Return the plugin whose wrapper does not yield once; pluggy's error says its place."""
        for implementation in self._wrapping(hook):
            code = getattr(implementation.function, "__code__", None)
            if code and f"{code.co_filename}:{code.co_firstlineno} " in str(error):
                return implementation.plugin
        return None

    def _wrapper_dropping_result(
        self, hook: str, arguments: Mapping[str, Any], wrappers: HookWrappers, result: Any
    ) -> tuple[object, CircuitBreaker] | None:
        """Return the extension without which the hook has an answer."""
        if result is not None or not self._repeatable_hooks:
            return None
        wrapping = {id(implementation.plugin) for implementation in self._wrapping(hook)}
        suspects = [wrapper for wrapper in wrappers if id(wrapper[0]) in wrapping]
        for suspect in suspects:
            rest = [wrapper for wrapper in wrappers if wrapper is not suspect]
            if self._once(hook, arguments, rest) is not None:
                return suspect
        rest = [wrapper for wrapper in wrappers if wrapper not in suspects]
        if suspects and self._once(hook, arguments, rest) is not None:
            return suspects[0]
        return None

    def _wrapping(self, hook: str) -> Iterator[pluggy.HookImpl]:
        caller: pluggy.HookCaller = getattr(self._loader.pm.hook, hook)
        return (found for found in caller.get_hookimpls() if found.wrapper or found.hookwrapper)


def failing_wrapper(
    error: BaseException, plugin: object, wrappers: Iterable[object]
) -> object | None:
    """Return the one of ``wrappers`` that raised ``error``, or ``None``.

    An error of the plugin passes through its wrappers, so that only the innermost frame counts.
    """
    owners = {_module(each): each for each in wrappers} | {_module(plugin): plugin}
    owner = None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        owner = owners.get(frame.f_globals.get("__name__", ""), owner)
    return None if owner is plugin else owner


def _module(plugin: object) -> str:
    return str(getattr(plugin, "__name__", "") or type(plugin).__module__)
