"""Calling hooks of one plugin, with the extensions that wrap them.

A hook is called with the selected plugin only, through pluggy: a module that serves two keys would
otherwise answer for a key that the user gave to another plugin. The wrappers of extensions are run
here, around that call, so that it is known who fails.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from time import perf_counter
from typing import Any

import pluggy

from treadle.errors import PluginLoadError, TreadleError
from treadle.plugins.guard import PluginGuard
from treadle.plugins.loader import PluginLoader
from treadle.processes.logs import steps

__all__ = ("PluginHooks",)


class PluginHooks:
    """The hooks of one plugin as methods: ``hooks.treadle_model(...)``. Failures name the plugin.

    ``extensions`` are the guards of those that may wrap. One whose wrapper fails costs only itself,
    except where a hook acts instead of building something: there it is an error.
    """

    def __init__(
        self, loader: PluginLoader, guard: PluginGuard, extensions: Iterable[PluginGuard] = ()
    ) -> None:
        self._pm, self._guard = loader.pm, guard
        self._plugin = loader.load(guard.entry)
        self._extensions = {id(loader.load(extension.entry)): extension for extension in extensions}
        self._extensions.pop(id(self._plugin), None)

    def __getattr__(self, hook: str) -> Callable[..., Any]:
        return lambda **arguments: self.call(hook, arguments)

    def call(self, hook: str, arguments: Mapping[str, Any]) -> Any:
        """Call ``hook``; what it raises, other than ``TreadleError``, is a ``PluginLoadError``."""
        other_plugins = [plugin for plugin in self._pm.get_plugins() if plugin is not self._plugin]
        call: Callable[[], Any] = partial(
            self._pm.subset_hook_caller(hook, other_plugins), **arguments
        )
        caller: pluggy.HookCaller = getattr(self._pm.hook, hook)
        for impl in caller.get_hookimpls():  # the outermost is the last
            extension = self._extensions.get(id(impl.plugin)) if impl.wrapper else None
            if extension is not None and perf_counter() >= extension.retry_time:
                impl_arguments = [arguments[name] for name in impl.argnames]
                call = partial(
                    self._wrapped, hook, extension, partial(impl.function, *impl_arguments), call
                )
        start_time, entry = perf_counter(), self._guard.entry
        steps.debug("calling %s of %s from %s", hook, entry.id, entry.owner)
        try:
            result = call()
        except BaseException as error:
            self._guard.fail(
                hook, error, in_step=False, start_time=start_time, error_class=PluginLoadError
            )
        finally:
            steps.debug("")
        self._guard.counter(hook).record_success(perf_counter() - start_time)
        return result

    def _wrapped(
        self, hook: str, extension: PluginGuard, wrapper: Callable[[], Any], call: Callable[[], Any]
    ) -> Any:
        """Return what ``call`` returns inside of a wrapper, or alone if the wrapper fails."""
        running, result, failure = wrapper(), None, None
        try:
            if next(running, running) is running:
                raise TypeError("a wrapper did not yield")
        except TreadleError:
            raise
        except BaseException as error:
            self._blame(hook, extension, error)
            return call()
        try:
            result = call()
        except BaseException as error:
            failure = error
        try:
            running.send(result) if failure is None else running.throw(failure)
            raise TypeError("a wrapper yielded more than once")
        except StopIteration as end:
            if end.value is not None or (result is None and failure is None):
                return end.value
            if failure is None:
                return_error = TypeError("a wrapper returned None and not the answer of the hook")
                self._blame(hook, extension, return_error)
        except TreadleError:
            raise  # raised deliberately, in words for the user
        except BaseException as error:
            if failure is None or failure not in (error, error.__cause__):
                self._blame(hook, extension, error)
        if failure is not None:
            raise failure
        return result

    def _blame(self, hook: str, extension: PluginGuard, error: BaseException) -> None:
        if self._guard.kind.mode == "always":
            extension.fail(hook, error, error_class=PluginLoadError)
        extension.strike(hook, error)
