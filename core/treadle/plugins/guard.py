"""Attribution of failures: what a plugin raises becomes an error that names it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import NoReturn

from treadle.api.plugin_kind import unexpected
from treadle.errors import EngineError, PluginError, PluginLoadError, TreadleError
from treadle.plugins.call_stats import NOT_CAUGHT, CallCounter, CircuitBreaker, PluginCallStats
from treadle.plugins.entries import Entry

__all__ = ("PluginGuard",)


class PluginGuard:
    """Names the plugin of ``entry`` in what its objects raise, and counts their calls.

    An exception becomes an ``error`` that names plugin, method and cause, which is chained. Not
    converted: ``PluginError`` (already names a plugin), ``KeyboardInterrupt`` and ``SystemExit``,
    and, outside a step, any ``TreadleError`` (raised deliberately for the user). With a ``breaker``
    a failure costs the plugin alone; with ``fatal`` every failure is an ``EngineError``.
    """

    def __init__(
        self,
        entry: Entry,
        stats: PluginCallStats,
        error: type[TreadleError] = PluginLoadError,
        *,
        breaker: CircuitBreaker | None = None,
        fatal: bool = False,
    ) -> None:
        self.entry = entry
        self.breaker = breaker
        self._stats = stats
        self._error = error
        self._fatal = fatal

    @contextmanager
    def call_context(self, method: str, *, in_step: bool = False) -> Iterator[None]:
        """The block is one call of ``method``; ``in_step`` converts every ``TreadleError`` too."""
        began = perf_counter()
        try:
            yield
        except NOT_CAUGHT:
            raise
        except BaseException as error:
            self.fail(method, error, in_step=in_step, began=began)
        self._stats.done(self.entry.id, method, began)

    def fail(
        self,
        method: str,
        error: BaseException,
        *,
        in_step: bool = True,
        began: float | None = None,
        error_class: type[TreadleError] | None = None,
    ) -> NoReturn:
        """Count and raise what ``method`` raised."""
        if isinstance(error, PluginError):
            raise error
        self._stats.failed(self.entry.id, method, perf_counter() if began is None else began)
        if isinstance(error, TreadleError) and not in_step:
            raise error
        text = self.entry.failure(method, error)
        if self._fatal:
            raise EngineError(f"{text} (plugin_strict makes it fatal)") from error
        named = (error_class or self._error)(text)
        if isinstance(named, PluginError):
            named.plugin = self.entry.id
        raise named from error

    def fail_result(self, method: str, result: object, expected: str) -> NoReturn:
        """Count and raise that ``method`` returned ``result`` and not what is ``expected``."""
        self.fail(method, unexpected(result, expected))

    def failed(self, method: str) -> None:
        """Count a failure that was noticed after the call."""
        self._stats.failed(self.entry.id, method, perf_counter())

    def counter(self, method: str) -> CallCounter:
        """Return the counter of a method."""
        return self._stats.counter(self.entry.id, method)

    @property
    def is_fatal(self) -> bool:
        return self._fatal
